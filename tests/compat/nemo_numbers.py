"""Costs and gradients that NeMo's unit tests publish for its RNN-T loss; the blank is column 0."""

import torch

from tests.loss import published_numbers

SMALL_LOGITS = torch.tensor([published_numbers.SMALL_LOGITS])
SMALL_TARGETS = torch.tensor([published_numbers.SMALL_TARGETS])
SMALL_COST = 4.495666
SMALL_GRADIENT = torch.tensor(
    [
        [
            [
                [-0.13116688, -0.3999269, 0.17703125, 0.17703125, 0.17703125],
                [-0.18572757, 0.12247056, -0.18168412, 0.12247056, 0.12247056],
                [-0.32091254, 0.06269141, 0.06928472, 0.12624499, 0.06269141],
            ],
            [
                [0.05456069, -0.21824276, 0.05456069, 0.05456069, 0.05456069],
                [0.12073959, 0.12073959, -0.48295835, 0.12073959, 0.12073959],
                [-0.6925882, 0.16871116, 0.18645467, 0.16871116, 0.16871116],
            ],
        ]
    ]
)
# The same batch with clamp=0.1.
SMALL_CLAMPED_GRADIENT = SMALL_GRADIENT.clamp(-0.1, 0.1)

BIG_LOGITS = torch.tensor(published_numbers.BATCH_LOGITS)
BIG_TARGETS = torch.tensor(published_numbers.BATCH_TARGETS)
BIG_COSTS = torch.tensor(published_numbers.BATCH_LOSSES)
BIG_GRADIENT = torch.tensor(published_numbers.BATCH_GRADIENT)
