"""The shapes to which a training pads its batches: as fine as their number allows.

Each shape is captured when it first occurs, which takes as long as several replays. Batches from
buckets have few shapes. Those of joined utterances (`data.joining`), and small ones, have many:
with fine shapes, every other step would capture one. No shape is coarser than those of the start,
so that a dry run has seen the memory of the largest batch.

    steps between powers of two      8 -----------> 32     after the start, if it had few shapes
                                     8 <--- 16 <--- 32     each time more occur than are kept
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pruned_rnnt.model.shape_steps import BatchPadding

# Graphs that are kept: speech from buckets takes 30 to 80 fine shapes.
MOST_SHAPES = 160
_FRAME_STEP = 16
# At most 1/32 of a large count of frames or utterances is padding, and 1/8 in the first steps of a
# training: batches of LibriSpeech then take 17 instead of 41 shapes in 200 steps, and 7% longer.
_FINEST, _COARSEST = 32, 8
START = 1000
# Fine shapes are up to four times as many as those of the start.
_FEW = MOST_SHAPES // 4


class TrainingShapes:
    """Chooses shapes by the batches so far, and by nothing else.

    With the state of a checkpoint, a resumed training pads as one that was not interrupted.

    Args:
        more: frames in addition to a grid of 16; see `BatchPadding`.

    Attributes:
        steps: sizes between powers of two; when it changes, earlier shapes do not occur again.
    """

    def __init__(self, more: int) -> None:
        self.steps = _COARSEST
        self._more = more
        self._is_start = True
        self._seen: set[tuple[int, int]] = set()

    def shape_of(self, utterances: int, frames: int, step: int) -> tuple[int, int]:
        """The padded numbers of utterances and of feature frames of the next batch.

        Args:
            step: number of optimiser steps before that of the batch.
        """
        if self._is_start and step >= START:
            self._is_start = False
            if len(self._seen) <= _FEW:
                self._change(_FINEST)
        shape = self._padded(utterances, frames)
        if shape not in self._seen and len(self._seen) >= MOST_SHAPES and self.steps > _COARSEST:
            self._change(self.steps // 2)
            shape = self._padded(utterances, frames)
        self._seen.add(shape)
        return shape

    def _padded(self, utterances: int, frames: int) -> tuple[int, int]:
        padding = BatchPadding(_FRAME_STEP, self.steps, self._more)
        return padding.rows_of(utterances), padding.frames_of(frames)

    def _change(self, steps: int) -> None:
        self.steps = steps
        self._seen.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "is_start": self._is_start, "seen": sorted(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self._is_start = state["is_start"]
        self._seen = {(rows, frames) for rows, frames in state["seen"]}
