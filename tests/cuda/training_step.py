"""A small model whose training step uses PrunedTransducerLoss.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import pruned_rnnt
from pruned_rnnt.ops.common.native import has_native_kernel

N, T, U, V, WIDTH = 3, 23, 9, 37, 24
HAS_KERNELS = has_native_kernel("log_probs", "cuda")


class Batch(NamedTuple):
    """frames (N,T,8) and history (N,U+1,8), targets (N,U), lengths (N,)."""

    frames: Tensor
    history: Tensor
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


class Model(nn.Module):
    """One layer on each side of the loss."""

    def __init__(self, **options: object):
        super().__init__()
        self.encoder, self.predictor = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        joiner = pruned_rnnt.Joiner(WIDTH, WIDTH, WIDTH, V)
        options = {"warm_up_steps": 0, **options}
        self.loss = pruned_rnnt.PrunedTransducerLoss(joiner, WIDTH, WIDTH, V, **options)

    def forward(self, batch: Batch) -> Tensor:
        encoded, predicted = self.encoder(batch.frames), self.predictor(batch.history)
        loss: Tensor = self.loss(encoded, predicted, *batch[2:], 0).loss
        return loss


def make_model(device: str, dtype: torch.dtype = torch.float32, **options: object) -> Model:
    """A model with the same weights in each call."""
    torch.manual_seed(0)
    return Model(**options).to(device, dtype)


def make_batch(
    device: str, lengths_on: str, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Batch:
    """Random values and lengths that depend on the seed; utterance 0 has no symbols."""
    generator = torch.Generator().manual_seed(seed)
    frames, history = (torch.randn(N, x, 8, generator=generator) for x in (T, U + 1))
    targets = torch.randint(1, V - 1, (N, U), generator=generator, dtype=torch.int32)
    logit_lengths = torch.randint(U + 1, T + 1, (N,), generator=generator, dtype=torch.int32)
    target_lengths = torch.randint(1, U + 1, (N,), generator=generator, dtype=torch.int32)
    logit_lengths[1], target_lengths[0] = T, 0
    return Batch(
        frames.to(device, dtype),
        history.to(device, dtype),
        targets.to(device),
        logit_lengths.to(lengths_on),
        target_lengths.to(lengths_on),
    )


def gradients(model: Model, batch: Batch) -> list[Tensor]:
    """The loss and its gradients with respect to all weights."""
    loss = 1.7 * model(batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
