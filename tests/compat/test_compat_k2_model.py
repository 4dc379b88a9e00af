"""A model as icefall writes it, from lists of tokens to losses, with k2 not installed.

It uses k2 as egs/librispeech/ASR/zipformer/model.py and icefall/utils.py do: in annotations that
are resolved when the file is imported, RaggedTensor, ragged.cat, the row_splits, padding, and
the three steps of the pruned loss.
"""

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.compat import k2
from pruned_rnnt.compat.ragged import RaggedTensor

BLANK = 0
SIZE = 20


pytestmark = pytest.mark.usefixtures("no_k2")


def with_start(tokens: k2.RaggedTensor, start: int) -> k2.RaggedTensor:
    """Each row with the start symbol before it."""
    column = torch.full((tokens.tot_size(0), 1), start, dtype=tokens.dtype, device=tokens.device)
    return k2.ragged.cat([k2.RaggedTensor(column), tokens], axis=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 12)
        self.predictor = nn.Embedding(SIZE, 10)
        self.simple_am_proj, self.simple_lm_proj = nn.Linear(12, SIZE), nn.Linear(10, SIZE)
        self.joiner_am_proj, self.joiner_lm_proj = nn.Linear(12, 16), nn.Linear(10, 16)
        self.joiner = nn.Sequential(nn.Tanh(), nn.Linear(16, SIZE))
        self.ctc_output = nn.Linear(12, SIZE)

    def forward(
        self, x: Tensor, x_lens: Tensor, y: k2.RaggedTensor, twice: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert x.size(0) == x_lens.size(0) == y.dim0
        assert y.num_axes == 2
        if twice:  # two augmented copies of the batch
            x, x_lens, y = x.repeat(2, 1, 1), x_lens.repeat(2), k2.ragged.cat([y, y], axis=0)
        encoder_out = self.encoder(x)
        row_splits = y.shape.row_splits(1)
        y_lens = row_splits[1:] - row_splits[:-1]
        simple, pruned = self.transducer(encoder_out, x_lens, y.to(x.device), y_lens)
        ctc = nn.functional.ctc_loss(
            self.ctc_output(encoder_out).log_softmax(2).transpose(0, 1),
            y.values,
            x_lens,
            y_lens,
            reduction="sum",
        )
        return simple, pruned, ctc

    def transducer(
        self, encoder_out: Tensor, x_lens: Tensor, y: k2.RaggedTensor, y_lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        started = with_start(y, BLANK).pad(mode="constant", padding_value=BLANK)
        decoder_out = self.predictor(started)
        symbols = y.pad(mode="constant", padding_value=0).to(torch.int64)
        boundary = torch.zeros((encoder_out.size(0), 4), dtype=torch.int64)
        boundary[:, 2], boundary[:, 3] = y_lens, x_lens
        simple, (px_grad, py_grad) = k2.rnnt_loss_smoothed(
            lm=self.simple_lm_proj(decoder_out),
            am=self.simple_am_proj(encoder_out),
            symbols=symbols,
            termination_symbol=BLANK,
            lm_only_scale=0.25,
            am_only_scale=0.0,
            boundary=boundary,
            reduction="sum",
            return_grad=True,
        )
        ranges = k2.get_rnnt_prune_ranges(
            px_grad=px_grad, py_grad=py_grad, boundary=boundary, s_range=4
        )
        am, lm = k2.do_rnnt_pruning(
            am=self.joiner_am_proj(encoder_out), lm=self.joiner_lm_proj(decoder_out), ranges=ranges
        )
        pruned = k2.rnnt_loss_pruned(
            logits=self.joiner(am + lm),
            symbols=symbols,
            ranges=ranges,
            termination_symbol=BLANK,
            boundary=boundary,
            reduction="sum",
        )
        return simple, pruned


def batch() -> tuple[Tensor, Tensor, RaggedTensor]:
    torch.manual_seed(1)
    tokens = [[3, 5, 2, 9, 9], [], [7, 1], [4, 4, 18, 6]]
    lengths = torch.tensor([15, 6, 9, 12], dtype=torch.int32)
    return torch.randn(4, 15, 8), lengths, k2.RaggedTensor(tokens)


def test_it_trains() -> None:
    x, x_lens, y = batch()
    model = Model()
    assert type(y) is RaggedTensor
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    history = []
    for _ in range(20):
        simple, pruned, ctc = model(x, x_lens, y)
        loss = 0.5 * simple + pruned + 0.2 * ctc
        history.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
    assert history[-1] < 0.5 * history[0]


def test_a_batch_twice_has_twice_the_loss() -> None:
    model = Model()
    once, twice = model(*batch()), model(*batch(), twice=True)
    for first, second in zip(once, twice, strict=True):
        torch.testing.assert_close(second, 2 * first)
