"""Random bands of a batch, and random log-probabilities for their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.native_batches import Batch


def log_softmax_like(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.logsigmoid(2 * torch.randn(*shape, dtype=dtype))


def random_start(batch: Batch, columns: int) -> Tensor:
    """Bands from 0 to the last symbol that never move back."""
    last = (batch.target_lengths[:, None] + 1 - columns).clamp_min(0)
    share = torch.rand(batch.size, batch.frames).sort(1).values
    start = (share * (last + 0.999)).int()
    start[:, 0] = 0
    t = torch.arange(batch.frames)
    return torch.where(t >= batch.logit_lengths[:, None] - 1, last, start).int()


def sloping_start(batch: Batch, columns: int) -> Tensor:
    """Bands from 0 to the last symbol that move by one column per frame at most."""
    last = (batch.target_lengths[:, None] + 1 - columns).clamp_min(0)
    t = torch.arange(batch.frames)
    # The last two frames are left for the arcs after the last move.
    slope = last / (batch.logit_lengths[:, None] - 2).clamp_min(1)
    return torch.minimum((slope * t).int(), last).int()
