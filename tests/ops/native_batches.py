"""Random ragged batches and bands, log-probabilities for their rows, and calls of raw ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

NEG_INF = float("-inf")
# (name, T_n, U_n, V): one frame, no symbols, more symbols than frames, one utterance, many.
SHAPES = [
    ("ragged", [7, 4, 5], [3, 3, 0], 6),
    ("one_frame", [1, 1], [2, 0], 4),
    ("only_blanks", [4, 2], [0, 0], 3),
    ("more_symbols_than_frames", [3, 2], [9, 5], 5),
    ("single_long", [67], [21], 37),
    ("wide_vocabulary", [5, 9, 2], [4, 8, 1], 301),
    ("tiny_vocabulary", [6, 3], [4, 2], 2),
]
# (dtype, rtol, atol): 16-bit results may differ by one rounding.
TOLERANCES = [
    (torch.float64, 1e-9, 1e-10),
    (torch.float32, 2e-4, 2e-5),
    (torch.float16, 4e-3, 4e-3),
    (torch.bfloat16, 3e-2, 3e-2),
]


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments, and the outputs as they are before it."""

    op: str
    inputs: tuple[object, ...]
    outputs: tuple[Tensor | None, ...]  # None: an output that is not computed

    def fresh_outputs(self) -> list[Tensor | None]:
        return [None if x is None else x.clone() for x in self.outputs]


@dataclass(frozen=True)
class Batch:
    """Ragged lengths; the first utterance always fills the padded size."""

    frames: int
    symbols: int
    logit_lengths: Tensor
    target_lengths: Tensor
    targets: Tensor

    @property
    def size(self) -> int:
        return len(self.logit_lengths)


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output of NaN, every element of which a kernel must overwrite."""
    return torch.full(shape, float("nan"), dtype=dtype)


def batch_of(logit_lengths: list[int], target_lengths: list[int], vocabulary: int) -> Batch:
    frames, symbols = max(logit_lengths), max(target_lengths)
    targets = torch.randint(1, vocabulary, (len(logit_lengths), symbols), dtype=torch.int32)
    as_int = [torch.tensor(x, dtype=torch.int32) for x in (logit_lengths, target_lengths)]
    return Batch(frames, symbols, as_int[0], as_int[1], targets)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """That number of threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
