"""Sizes to which shapes are padded, so that few of them occur."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BatchPadding(NamedTuple):
    """How the features of batches are padded to few shapes.

    frame_step: numbers of feature frames, less `more`, are multiples of it.
    steps: numbers of utterances, and of frames, between powers of two.
    more: frames in addition. One less than the receptive field of an encoder makes the numbers of
        its output frames multiples of a step, and its matrices aligned.
    """

    frame_step: int
    steps: int
    more: int = 0

    def shape_of(self, features_NTF: Tensor) -> tuple[int, int, int]:
        """The padded shape of a batch."""
        batch, frames, bins = features_NTF.shape
        return self.rows_of(batch), self.frames_of(frames), bins

    def rows_of(self, utterances: int) -> int:
        """The padded number of utterances."""
        return round_up(utterances, 1, steps=self.steps)

    def frames_of(self, frames: int) -> int:
        """The padded number of feature frames."""
        return round_up(frames - self.more, self.frame_step, steps=self.steps) + self.more

    def most_rows(self, rows: int) -> int:
        """The largest padded number of utterances that is at most `rows`."""
        return round_down(rows, 1, steps=self.steps)


def round_up(count: int, smallest: int, *, steps: int) -> int:
    """`count` or slightly more, so that only `steps` results lie between powers of two.

    Args:
        smallest: results are multiples of it, as long as that is more than a step.
        steps: a power of two; at most 1 / steps of a result is padding where steps are larger than
            `smallest`.
    """
    step = _step(count, smallest, steps)
    return -(-count // step) * step


def round_down(count: int, smallest: int, *, steps: int) -> int:
    """The largest result of `round_up` that is at most `count`."""
    step = _step(count, smallest, steps)
    return count // step * step


def _step(count: int, smallest: int, steps: int) -> int:
    return max(1 << max(count.bit_length() - steps.bit_length(), 0), smallest)
