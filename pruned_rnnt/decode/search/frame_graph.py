"""Run a loop over frames as a CUDA graph: one launch for a block of frames.

Axes: N batch, T encoder frames, D joiner width, M symbols per frame, K frames of a block,
R rows of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.decode.search.states import Rows
from pruned_rnnt.model.captured_passes import CAPTURE_AT, captured

# Frames of a block. A longer block takes longer to capture and wastes more of the last block.
_BLOCK_FRAMES = 32

# (am_NTD, lengths_N, state) -> outputs with axes N, T first, state; it must not synchronise.
FrameLoop = Callable[[Tensor, Tensor, Rows], tuple[Rows, Rows]]


def graph_rows(batch_size: int) -> int:
    """Rows of the graph for a batch: a power of two, so that few graphs are needed."""
    return 1 << max(batch_size - 1, 0).bit_length()


class FrameGraph:
    """`loop` over K frames, captured once and replayed for each block.

    Args:
        loop: the loop to capture; it must not modify its inputs or any other state.
        rows: R, the largest batch; smaller batches are padded with empty rows.
        am_NTD, state: example inputs; their dtypes and widths are used, and K = T up to
            `_BLOCK_FRAMES`, but not N.
    """

    def __init__(self, loop: FrameLoop, rows: int, am_NTD: Tensor, state: Rows) -> None:
        self._loop = loop
        self._frames = min(am_NTD.size(1), _BLOCK_FRAMES)
        self._am_RKD = am_NTD.new_zeros(rows, self._frames, am_NTD.size(2))
        self._remaining_R = torch.zeros(rows, dtype=torch.int64, device=am_NTD.device)
        self._state = tuple(x.new_zeros(rows, *x.shape[1:]) for x in state)
        self._graph, self._outputs = captured(self._block, am_NTD.device)

    def _block(self) -> Rows:
        outputs, state = self._loop(self._am_RKD, self._remaining_R, self._state)
        for old, new in zip(self._state, state, strict=True):
            old.copy_(new)
        self._remaining_R.sub_(self._frames)
        return outputs

    def __call__(self, am_NTD: Tensor, lengths_N: Tensor, state: Rows) -> tuple[Rows, Rows]:
        """Run the loop for N <= R and any T; outputs have the frames of whole blocks, T or more."""
        batch_size, num_frames, _ = am_NTD.shape
        self._remaining_R.zero_()[:batch_size].copy_(lengths_N)
        for own, given in zip(self._state, state, strict=True):
            own.zero_()[:batch_size].copy_(given)
        blocks = []
        for begin in range(0, num_frames, self._frames):
            block_NKD = am_NTD[:, begin : begin + self._frames]
            missing = self._frames - block_NKD.size(1)
            self._am_RKD[:batch_size].copy_(functional.pad(block_NKD, (0, 0, 0, missing)))
            self._graph.replay()
            blocks.append([output[:batch_size].clone() for output in self._outputs])
        outputs = tuple(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True))
        return outputs, tuple(own[:batch_size].clone() for own in self._state)


class FrameGraphs:
    """The graphs of a search: one for each padded number of rows and of frames of a block."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], FrameGraph] = {}
        self._counts: Counter[tuple[int, int]] = Counter()

    def clear(self) -> None:
        """Drop all graphs, which refer to tensors that were replaced."""
        self._graphs.clear()

    def loop(self, loop: FrameLoop, am_NTD: Tensor, state: Rows) -> FrameLoop:
        """A graph of `loop` for these inputs; the loop itself for few frames that are rare."""
        batch_size, num_frames, _ = am_NTD.shape
        key = graph_rows(batch_size), min(num_frames, _BLOCK_FRAMES)
        if key not in self._graphs:
            self._counts[key] += 1
            is_rare = num_frames <= _BLOCK_FRAMES and self._counts[key] < CAPTURE_AT
            if is_rare or num_frames == 0:
                return loop
            self._graphs[key] = FrameGraph(loop, key[0], am_NTD, state)
        return self._graphs[key]
