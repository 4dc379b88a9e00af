"""Values that change during training, and the clock that evaluates them.

The only state is the clock's step, which the trainer sets before each batch, so a resumed run has
the same values at the same step. Random decisions come from torch's CPU generator, so an exact
continuation needs no other random state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Random numbers sampled together.
_SAMPLES = 512


@dataclass(frozen=True)
class Schedule:
    """A piecewise linear function of the step, constant before its first and after its last point.

    Args:
        points: (step, value) pairs with increasing steps.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, step: float) -> float:
        before_step, before = self.points[0]
        for after_step, after in self.points:
            if step <= after_step:
                if after_step == before_step:
                    return after
                fraction = max(step - before_step, 0.0) / (after_step - before_step)
                return before + fraction * (after - before)
            before_step, before = after_step, after
        return before


def ramp(start: float, end: float, steps: float, begin: float = 0.0) -> Schedule:
    """From `start` at step `begin` to `end` at step `steps`."""
    return Schedule(((begin, start), (steps, end)))


class Clock:
    """The training step, shared by all modules of one encoder; it may be a fraction.

    Args:
        speed: steps of the schedules for each step of training.
        dropout_scale: factor on all dropout rates.
    """

    def __init__(self, *, speed: float = 1.0, dropout_scale: float = 1.0) -> None:
        self.step = 0.0
        self.speed = speed
        self.dropout_scale = dropout_scale
        self._samples: list[float] = []

    def set_step(self, step: float) -> None:
        self.step = step * self.speed

    def value(self, schedule: float | Schedule) -> float:
        """The value at the current step."""
        return schedule.at(self.step) if isinstance(schedule, Schedule) else schedule

    def dropout_rate(self, schedule: float | Schedule) -> float:
        """The fraction of channels or sequences that training leaves out."""
        return self.dropout_scale * self.value(schedule)

    def start_batch(self) -> None:
        """Discards unused random numbers, because checkpoints do not save them."""
        self._samples.clear()

    def bernoulli(self, probability: float) -> bool:
        """True with this probability; 0 and 1 take no random number."""
        if probability <= 0.0 or probability >= 1.0:
            return probability >= 1.0
        if not self._samples:
            # Hundreds of modules need one per batch; sampling them one by one takes milliseconds.
            self._samples = torch.rand(_SAMPLES, device="cpu").tolist()
        return self._samples.pop() < probability
