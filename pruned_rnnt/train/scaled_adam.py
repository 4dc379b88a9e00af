"""ScaledAdam (Yao et al. 2023, "Zipformer", arXiv 2310.11230, section 3.5).

Adam whose step is proportional to the size of the parameter it changes, so that one learning rate
fits all of them, and which learns that size separately. With r the root mean square of a
parameter, g its gradient, m and v Adam's moments (bias-corrected), one step is

    parameter -= lr * r * m / (sqrt(v) + eps)               change of direction
    parameter *= 1 - size_lr * lr * m_s / (sqrt(v_s) + eps)  change of size

where the size moments m_s, v_s follow the scalar gradient sum(g * parameter): the derivative of
the loss for multiplying the parameter by 1 + s. Outside [min_rms, max_rms] the change of size only
leads back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor


class ScaledAdam(torch.optim.Optimizer):
    """See the module's text.

    Args:
        params: parameters or groups of them.
        lr: about 0.045 at the top of the schedule.
        betas: decay of the two moments; the size uses the second for both of its own.
        size_lr: learning rate of the size, as a fraction of lr.
        min_rms, max_rms: bounds on the root mean square of a parameter; a vector of one element is
            treated as having a root mean square of at least scalar_rms.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float = 0.03,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        size_lr: float = 0.1,
        min_rms: float = 1e-5,
        max_rms: float = 3.0,
        scalar_rms: float = 0.1,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "size_lr": size_lr,
                "min_rms": min_rms,
                "max_rms": max_rms,
                "scalar_rms": scalar_rms,
            },
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter which has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
            state["size_mean"] = torch.zeros((), device=parameter.device)
            state["size_square"] = torch.zeros((), device=parameter.device)
        state["step"] += 1
        step, lr, eps = state["step"], group["lr"], group["eps"]
        beta1, beta2 = group["betas"]

        rms = parameter.float().square().mean().sqrt()
        floor = group["scalar_rms"] if parameter.numel() == 1 else group["min_rms"]
        bounded_rms = rms.clamp(min=floor, max=group["max_rms"])

        # The gradient for the parameter measured in units of its own size.
        scaled = gradient * bounded_rms
        state["mean"].lerp_(scaled, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        size_gradient = (gradient.float() * parameter.float()).sum()
        state["size_mean"].lerp_(size_gradient, 1 - beta2)
        state["size_square"].lerp_(size_gradient.square(), 1 - beta2)

        direction = (state["mean"] / (1 - beta1**step)) / (
            (state["square"] / (1 - beta2**step)).sqrt() + eps
        )
        correction = 1 - beta2**step
        size_step = (state["size_mean"] / correction) / (
            (state["size_square"] / correction).sqrt() + eps
        )
        change = -lr * bounded_rms * direction
        if parameter.numel() > 1:
            growth = (-lr * group["size_lr"] * size_step).clamp(-0.1, 0.1)
            # Neither shrink below the floor nor grow beyond the ceiling.
            growth = torch.where((rms < floor) & (growth < 0), 0.0, growth)
            growth = torch.where((rms > group["max_rms"]) & (growth > 0), 0.0, growth)
            change = change + parameter * growth
        parameter.add_(change.to(parameter.dtype))
