"""Values which change over training, and the one clock they all read.

Nothing here keeps state of its own but the clock's step, which the trainer sets before each batch:
a resumed run that sets the same step sees the same values. Yes-or-no draws come from torch's CPU
generator, so that its saved state is all that an exact continuation needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Drawn at once.
_DRAWS = 512


@dataclass(frozen=True)
class Schedule:
    """A piecewise linear function of the step, constant before its first and after its last point.

    Args:
        points: (step, value) pairs with rising steps.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, step: float) -> float:
        before_step, before = self.points[0]
        for after_step, after in self.points:
            if step <= after_step:
                if after_step == before_step:
                    return after
                share = max(step - before_step, 0.0) / (after_step - before_step)
                return before + share * (after - before)
            before_step, before = after_step, after
        return before


def ramp(start: float, end: float, steps: float, begin: float = 0.0) -> Schedule:
    """From `start` at step `begin` to `end` at step `steps`."""
    return Schedule(((begin, start), (steps, end)))


class Clock:
    """The step of training, shared by all modules of one encoder; fractions are welcome.

    Args:
        speed: steps of the schedules for each step of training.
        dropout_scale: of what `share` gives.
    """

    def __init__(self, *, speed: float = 1.0, dropout_scale: float = 1.0) -> None:
        self.step = 0.0
        self.speed = speed
        self.dropout_scale = dropout_scale
        self._draws: list[float] = []

    def set_step(self, step: float) -> None:
        self.step = step * self.speed

    def read(self, value: float | Schedule) -> float:
        return value.at(self.step) if isinstance(value, Schedule) else value

    def share(self, value: float | Schedule) -> float:
        """A share of channels or sequences which training leaves out."""
        return self.dropout_scale * self.read(value)

    def start_batch(self) -> None:
        """Forget the draws that are left over, which no checkpoint holds."""
        self._draws.clear()

    def chance(self, probability: float) -> bool:
        """True with this probability; draws only where the answer is open."""
        if probability <= 0.0 or probability >= 1.0:
            return probability >= 1.0
        if not self._draws:
            # Hundreds of modules ask on every batch: one by one that takes milliseconds.
            self._draws = torch.rand(_DRAWS, device="cpu").tolist()
        return self._draws.pop() < probability
