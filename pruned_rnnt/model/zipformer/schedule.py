"""Values that change during training, and the clock that evaluates them.

The only state is the clock's step, which the trainer sets before each batch, so a resumed run has
the same values at the same step. Random decisions come from torch's CPU generator, so an exact
continuation needs no other random state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Random numbers sampled together.
_SAMPLES = 512
# Numbers that a captured pass can read; the largest Zipformer needs some thousands.
_CAPACITY = 2**16
# Numbers of one place, so that all places are aligned alike and kernels are compiled once for them.
_ALIGNED = 4


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


class Recorder:
    """The host's part of a captured training pass: numbers that its kernels read from the device.

    A CUDA graph repeats kernels, but not the Python code that takes random decisions and evaluates
    schedules. While a pass is captured, each such function is added here, with the place on the
    device for its results. `refresh` calls all of them again, in the same order, before each
    replay, so random decisions are the same as in a pass that is not captured.

    Attributes:
        conditions: schedules; which kernels were captured depends on whether their values are 0.
        program: what `refresh` runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._values_K = torch.zeros(_CAPACITY, device=device)
        self._used = 0
        self.program: list[Callable[[], Sequence[float]]] = []
        self.conditions: dict[Schedule, None] = {}

    def start(self) -> None:
        """Begin the capture of another pass; the places on the device are used again."""
        self._used, self.program = 0, []

    def add(self, compute: Callable[[], Sequence[float]], count: int) -> Tensor:
        """(count,) float32 on the device, which `refresh` fills with the numbers of `compute`."""
        place = self._used
        self._used += _padded(count)
        if self._used > _CAPACITY:
            raise RuntimeError(f"a captured pass needs more than {_CAPACITY} numbers from the host")
        self.program.append(compute)
        return self._values_K[place : place + count]

    def refresh(self, program: Sequence[Callable[[], Sequence[float]]]) -> None:
        """Fill the numbers of a captured pass, without waiting for the device."""
        values: list[float] = []
        for compute in program:
            values += compute()
            values += [0.0] * (_padded(len(values)) - len(values))
        if values:
            values_K = torch.tensor(values, pin_memory=self._values_K.is_cuda)
            self._values_K[: len(values)].copy_(values_K, non_blocking=True)


def _padded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


class Clock:
    """The training step, shared by all modules of one encoder; it may be a fraction.

    Args:
        speed: steps of the schedules for each step of training.
        dropout_scale: factor on all dropout rates.

    Attributes:
        recorder: records the decisions of the pass that is being captured; None otherwise.
    """

    def __init__(self, *, speed: float = 1.0, dropout_scale: float = 1.0) -> None:
        self.step = 0.0
        self.speed = speed
        self.dropout_scale = dropout_scale
        self.recorder: Recorder | None = None
        self._samples: list[float] = []

    def set_step(self, step: float) -> None:
        self.step = step * self.speed

    def value(self, schedule: float | Schedule) -> float:
        """The value at the current step."""
        return schedule.at(self.step) if isinstance(schedule, Schedule) else schedule

    def dropout_rate(self, schedule: float | Schedule) -> float:
        """The fraction of channels or sequences that training leaves out."""
        return self.dropout_scale * self.value(schedule)

    def is_zero(self, schedule: float | Schedule) -> bool:
        """Whether the value is zero; a captured pass is valid only while this does not change."""
        if self.recorder is not None and isinstance(schedule, Schedule):
            self.recorder.conditions[schedule] = None
        return self.value(schedule) == 0.0

    def drops(self, schedule: float | Schedule) -> bool:
        """Whether a dropout rate is above zero; captured passes depend on it as on `is_zero`."""
        return self.dropout_scale > 0.0 and not self.is_zero(schedule)

    def numbers(self, compute: Callable[[], Sequence[float]], device: torch.device) -> Tensor:
        """The results of `compute` as float32 on the device."""
        if self.recorder is not None:
            return self.recorder.add(compute, len(compute()))
        return torch.tensor(compute()).to(device, non_blocking=True)

    def dropout_rate_on(
        self, schedule: float | Schedule, device: torch.device
    ) -> float | Tensor | None:
        """As `dropout_rate`, but None for 0, and (1,) on the device if the pass is captured."""
        if not self.drops(schedule):
            return None
        if self.recorder is None:
            return self.dropout_rate(schedule)
        return self.numbers(lambda: (self.dropout_rate(schedule),), device)

    def start_batch(self) -> None:
        """Discards unused random numbers, because checkpoints do not save them."""
        self._samples.clear()

    def bernoulli(self, probability: float) -> bool:
        """True with this probability; 0 and 1 take no random number."""
        if probability <= 0.0 or probability >= 1.0:
            return probability >= 1.0
        return self.uniform() < probability

    def uniform(self) -> float:
        """A random number in [0, 1).

        Raises:
            RuntimeError: within a backward pass: it computes a part of the forward pass again.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a module with random decisions runs within a backward pass, and cannot repeat "
                "those of its forward pass: use no activation checkpointing "
                "(torch.utils.checkpoint) in this module"
            )
        if not self._samples:
            # Hundreds of modules need one per batch; sampling them one by one takes milliseconds.
            self._samples = torch.rand(_SAMPLES, device="cpu").tolist()
        return self._samples.pop()

    def choose(self, probability: float | Schedule) -> bool | Tensor:
        """True with this probability; if the pass is captured, (1,) of 0 or 1 on the device."""
        if self.recorder is None or self.is_zero(probability):
            return self.bernoulli(self.value(probability))
        return self.recorder.add(lambda: (float(self.bernoulli(self.value(probability))),), 1)
