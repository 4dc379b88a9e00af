"""Chooses the padded shape of each training batch, so that few CUDA graphs are captured.

Capturing the graphs of a new shape takes about as long as eight replays. So a batch is padded to an
earlier shape that is large enough, even if a smaller shape would need less padding. The compute
that the smaller shape would have saved is added up over the batches; the shape is captured once
these savings reach the cost of a capture:

    batch 33 x 1637    earlier shape 36 x 1672    smaller shape 33 x 1640 saves 0.112 of its steps,
                                                  and is captured with the 72nd such batch

A short training then spends little time on captures, a long one soon earns them back, and batches
of very different sizes, such as small ones or those of joined utterances (`data.joining`), do not
cause a capture at every other step.
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
# The largest shape to which a batch is padded, relative to the size of its coarse shape.
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
        # Shapes to which batches were padded, and the newest of them.
        self._used: set[Shape] = set()
        self._newest: Shape | None = None
        # Of other shapes: how many steps of its size each would have saved.
        self._saved: dict[Shape, float] = {}

    def shape_of(self, utterances: int, frames: int) -> Shape:
        """The padded numbers of utterances and of feature frames of the next batch.

        No shape is larger than the coarse shape of some batch, so the encoder takes the most memory
        for the largest coarse shape.
        """
        self._newest = self._choose(utterances, frames)
        self._used.add(self._newest)
        return self._newest

    def most_frames(self, frames: int) -> int:
        """The feature frames to which a batch is padded where no shape is used yet."""
        return BatchPadding(_FRAME_STEP, _COARSE, self._more).frames_of(frames)

    def drop_newest(self) -> None:
        """Pad no further batch to the newest shape or one that holds it, unless it is that batch's
        coarse shape.

        For a batch that ran out of memory: smaller ones would do so at these shapes, too.
        """
        if self._newest is not None:
            rows, frames = self._newest
            self._used = {s for s in self._used if s[0] < rows or s[1] < frames}

    def clear(self) -> None:
        """Begin as a new training."""
        self._used.clear()
        self._saved.clear()
        self._newest = None

    def _choose(self, utterances: int, frames: int) -> Shape:
        coarse = self._padded(utterances, frames, _COARSE)
        holding = [
            shape
            for shape in self._used
            if shape[0] >= utterances
            and shape[1] >= frames
            and _size(shape) <= _LARGEST * _size(coarse)
        ]
        if not holding:
            return coarse
        smallest = min(holding, key=lambda shape: (_size(shape), shape))
        if len(self._used) >= MOST_SHAPES:
            return smallest
        for steps in (_COARSE, _FINE):
            shape = self._padded(utterances, frames, steps)
            if _size(shape) >= _size(smallest):
                continue
            saved = self._saved.pop(shape, 0.0) + _size(smallest) / _size(shape) - 1.0
            if saved >= _CAPTURE_STEPS:
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
