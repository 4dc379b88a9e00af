"""Clipping of gradients by the median of their recent norms, as icefall does it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.train.optim.conditional import Condition

# Steps from one estimate of the limit to the next, and the steps of the early estimates.
_PERIOD = 100
_EARLY_STEPS = (10, 20, 40)


class MedianClipping:
    """The factor of the gradients in each step, computed on the device.

    The limit is clip_scale times the median norm of the last 100 steps. It is estimated every 100
    steps, and before that after 10, 20 and 40 steps, when it is twice as high, because norms change
    fast then. The first step is neither clipped nor counted.

    Args:
        options: the optimiser's options, with `step` and `clip_scale`; the norms and the limit
            become entries of it, so that they are saved with the optimiser.
        device: of the norms.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        self.options = options
        for name, start in (
            ("clip_norms", torch.zeros(_PERIOD)),
            ("clip_limit", torch.tensor(math.inf)),
        ):
            options[name] = options.get(name, start).to(device, torch.float32)

    def factor(self, norm: Tensor, condition: Condition) -> Tensor | None:
        """(), at most 1, from the norm () of the gradients of this step; None for 1.

        The norm and the limit are kept only if the step applies.
        """
        step, norms, limit = (self.options[name] for name in ("step", "clip_norms", "clip_limit"))
        if step == 0:
            return None
        condition.assign(norms[step % _PERIOD], norm)
        if step % _PERIOD == 0:
            condition.assign(limit, self.options["clip_scale"] * _median(norms))
        elif step in _EARLY_STEPS:
            early = 2.0 * self.options["clip_scale"] * _median(norms[1 : step + 1])
            condition.assign(limit, early)
        elif step < _EARLY_STEPS[0]:
            return None
        factor: Tensor = (limit / (norm + 1e-20)).clamp_(max=1.0)
        return factor


def change_clip_scale(options: dict[str, Any], clip_scale: float) -> None:
    """Change clip_scale in the options of an optimiser; the present limit changes with it.

    If there was no clipping before, there is none until 100 norms are known.
    """
    before = options["clip_scale"]
    if before > 0 and clip_scale > 0:
        if before != clip_scale:
            options["clip_limit"].mul_(clip_scale / before)
    elif clip_scale > 0:
        options["clip_norms"].fill_(math.inf)
        options["clip_limit"].fill_(math.inf)
    options["clip_scale"] = clip_scale


def _median(norms: Tensor) -> Tensor:
    """The upper of the two middle values if their number is a multiple of 4, else the lower."""
    return norms.kthvalue(norms.numel() // 4 * 2 + 1).values
