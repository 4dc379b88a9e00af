"""Random ragged batches, and calls of raw ops on them.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

NEG_INF = float("-inf")


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
