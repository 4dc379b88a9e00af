"""The learning rate as a stateless function of the steps and epochs done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pruned_rnnt.config.checks import check_at_least, check_types


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate rises and falls; every kind starts with a linear warm-up.

    kind:
        cosine: falls to final_scale at the last step along half a cosine.
        exponential: falls to final_scale at the last step by a constant factor per step.
        constant: stays at the full rate.
        eden: of the Zipformer paper (arXiv 2310.11230, equation 8), with eden_steps and
            eden_epochs; icefall's warm-up takes 500 steps and starts at a tenth of the rate, the
            paper's at half of it.
    warm_up_steps: steps from almost 0 (eden: eden_warm_up_start) to the full rate.
    final_scale: for cosine and exponential: fraction of the rate at the last step.
    eden_steps, eden_epochs: for eden: steps and epochs after which the rate begins to fall.
    eden_warm_up_start: for eden: fraction of the rate at the first step of the warm-up.
    """

    kind: Literal["cosine", "exponential", "constant", "eden"] = "cosine"
    warm_up_steps: int = 200
    final_scale: float = 0.01
    eden_steps: float = 7500.0
    eden_epochs: float = 3.5
    eden_warm_up_start: float = 0.1

    def __post_init__(self) -> None:
        check_types("schedule", self)
        if not 0 < self.final_scale <= 1:
            raise ValueError(f"schedule.final_scale is {self.final_scale}, needs 0 < x <= 1")
        check_at_least("schedule", self, warm_up_steps=0)
        for name in ("eden_steps", "eden_epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"schedule.{name} is {getattr(self, name)}, needs > 0")
        start = self.eden_warm_up_start
        if not 0 < start <= 1:
            raise ValueError(f"schedule.eden_warm_up_start is {start}, needs 0 < x <= 1")


def learning_rate_scale(config: ScheduleConfig, step: int, epoch: int, total_steps: int) -> float:
    """Factor of the learning rate for the step after `step` steps, in epoch `epoch` (from 0)."""
    if config.kind == "eden":
        by_step = math.pow(1 + (step / config.eden_steps) ** 2, -0.25)
        by_epoch = math.pow(1 + (epoch / config.eden_epochs) ** 2, -0.25)
        done = min(1.0, step / config.warm_up_steps) if config.warm_up_steps > 0 else 1.0
        rising = config.eden_warm_up_start + (1.0 - config.eden_warm_up_start) * done
        return rising * by_step * by_epoch
    # Starts above 0, because a step with a rate of 0 changes nothing.
    rising = min(1.0, (step + 1) / (config.warm_up_steps + 1))
    if config.kind == "constant" or step < config.warm_up_steps:
        return rising
    falling_steps = max(1, total_steps - config.warm_up_steps)
    progress = min(1.0, (step - config.warm_up_steps) / falling_steps)
    if config.kind == "exponential":
        return math.pow(config.final_scale, progress)
    half_cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_scale + (1 - config.final_scale) * half_cosine
