"""Chunks of a causal encoder: its frames attend to their chunk and to earlier ones.

frames  0 1 | 2 3 4 5 | 6 7 8 9 | ...     size 4, cut 2: the first chunk has 2 frames
chunk   0     1         2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.encoder import WHOLE


class Chunks(NamedTuple):
    """The chunks of a batch of N utterances.

    Attributes:
        size: frames of a chunk: a number, or (N,) integers.
        left: how many earlier chunks a chunk attends to; None: all.
        cut_N: (N,) integer, by how many frames the first chunk is shorter, below the size; None: 0.
    """

    size: int | Tensor
    left: int | None
    cut_N: Tensor | None = None

    def of_frames(self, frames_T: Tensor) -> Tensor:
        """The chunk of each frame: (T,), or (N, T) if utterances have chunks of their own."""
        frames = frames_T if self.cut_N is None else frames_T + self.cut_N[:, None]
        return frames // (self.size[:, None] if isinstance(self.size, Tensor) else self.size)


def drawn_chunks(
    sizes: Sequence[int],
    left: int | None,
    lengths_N: Tensor,
    num_frames: int,
    *,
    cut: bool,
    only_smallest: Tensor | None = None,
) -> Chunks:
    """Chunks for a training batch, of a random size for each utterance.

    They are drawn on the device of the lengths, so that one CUDA graph serves all sizes.

    Args:
        sizes: the sizes to draw from; `WHOLE` becomes `num_frames`.
        cut: shorten first chunks at random, but for those of whole utterances.
        only_smallest: () bool on the device; if true, all chunks have the smallest of the sizes.
    """
    device = lengths_N.device
    drawn_N = torch.randint(len(sizes), lengths_N.shape, device=device)
    if only_smallest is not None:
        smallest = min((size for size in sizes if size != WHOLE), default=WHOLE)
        drawn_N = torch.where(only_smallest, sizes.index(smallest), drawn_N)
    size_N, choices_N = torch.empty_like(drawn_N), torch.ones_like(drawn_N)
    for index, size in enumerate(sizes):
        is_drawn_N = drawn_N == index
        size_N.masked_fill_(is_drawn_N, num_frames if size == WHOLE else size)
        if cut and size != WHOLE:
            choices_N.masked_fill_(is_drawn_N, size)
    cut_N = (torch.rand(drawn_N.shape, device=device) * choices_N).long() if cut else None
    return Chunks(size_N, left, cut_N)
