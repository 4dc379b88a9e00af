"""The shapes to which a training pads its batches: few at first, finer where that pays.

A shape is captured when it first occurs, which takes as long as several replays of it. So a batch
is padded to a shape that is in use, if one holds it, even if a finer one would hold it with less
padding. What the finer one would have saved is noted, and it comes into use when its savings reach
the price of a capture:

    batch 33 x 1637    in use 36 x 1672    finer 33 x 1640, saves 0.11 steps of its size
                                           in use after 73 such batches

So the captures of a short training cost little, those of a long one are soon repaid, and batches of
very different sizes, such as small ones or those of joined utterances (`data.joining`), do not
capture at every other step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pruned_rnnt.model.shape_steps import BatchPadding

Shape = tuple[int, int]

# Graphs that are kept: speech from buckets takes 40 to 80.
MOST_SHAPES = 160
_FRAME_STEP = 16
# At most 1/32 of the frames or utterances of a fine shape is padding, if they are many, and 1/8 of
# a coarse one.
_FINE, _COARSE = 32, 8
# A shape in use holds a batch if its size is at most this times that of the batch's coarse shape.
_LARGEST = 1.5
# A capture takes the host as long as so many steps take the GPU.
_CAPTURE_STEPS = 8.0


class TrainingShapes:
    """Chooses shapes by the batches so far, and by nothing else.

    With the state of a checkpoint, a resumed training pads as one that was not interrupted.

    Args:
        more: frames in addition to a grid of 16; see `BatchPadding`.
    """

    def __init__(self, more: int) -> None:
        self._more = more
        self._used: set[Shape] = set()
        # Of each shape that is not in use: how many steps of its size it would have saved.
        self._saved: dict[Shape, float] = {}

    def shape_of(self, utterances: int, frames: int) -> Shape:
        """The padded numbers of utterances and of feature frames of the next batch.

        No shape is larger than the coarse shape of some batch, so a dry run that has tried the
        largest coarse shape has seen the most memory.
        """
        coarse = self._padded(utterances, frames, _COARSE)
        holding = [
            shape
            for shape in self._used
            if shape[0] >= utterances
            and shape[1] >= frames
            and _size(shape) <= _LARGEST * _size(coarse)
        ]
        if not holding:
            self._used.add(coarse)
            return coarse
        smallest = min(holding, key=lambda shape: (_size(shape), shape))
        for steps in (_COARSE, _FINE):
            shape = self._padded(utterances, frames, steps)
            if _size(shape) >= _size(smallest):
                continue
            saved = self._saved.pop(shape, 0.0) + _size(smallest) / _size(shape) - 1.0
            if saved >= _CAPTURE_STEPS and len(self._used) < MOST_SHAPES:
                self._used.add(shape)
                return shape
            self._saved[shape] = saved
        return smallest

    def _padded(self, utterances: int, frames: int, steps: int) -> Shape:
        padding = BatchPadding(_FRAME_STEP, steps, self._more)
        return padding.rows_of(utterances), padding.frames_of(frames)

    def state_dict(self) -> dict[str, Any]:
        return {"used": sorted(self._used), "saved": sorted(self._saved.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Checkpoints of earlier versions have the shapes that had occurred as "seen".
        used = state["used"] if "used" in state else state["seen"]
        self._used = {(rows, frames) for rows, frames in used}
        self._saved = {(rows, frames): saved for (rows, frames), saved in state.get("saved", ())}


def _size(shape: Shape) -> int:
    return shape[0] * shape[1]
