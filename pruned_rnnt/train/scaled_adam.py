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

# Of a vector in which parameters are updated together; some ten copies of it exist for a moment.
_BUCKET_ELEMENTS = 2**24


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
        for group in self.param_groups:
            for parameter in group["params"]:
                self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = 0
        state["mean"] = torch.zeros_like(parameter)
        state["square"] = torch.zeros_like(parameter)
        state["size_mean"] = torch.zeros((), device=parameter.device)
        state["size_square"] = torch.zeros((), device=parameter.device)

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
            for parameters in self._buckets(group["params"]):
                self._update(parameters, group)
        return loss

    def _buckets(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Parameters with a gradient, in lists which one vector can hold; counts their step."""
        buckets: dict[tuple[torch.device, torch.dtype, int], list[list[Tensor]]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:  # it was added later, or a loaded state has nothing on it
                self._begin(parameter)
            state["step"] += 1
            key = (parameter.device, parameter.dtype, state["step"])
            several = buckets.setdefault(key, [[]])
            if sum(p.numel() for p in several[-1]) > _BUCKET_ELEMENTS:
                several.append([])
            several[-1].append(parameter)
        return [bucket for several in buckets.values() for bucket in several]

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters that have made the same number of steps.

        A model has a thousand parameters, most of them small: all are updated as one vector.
        """
        device = parameters[0].device
        sizes = [p.numel() for p in parameters]
        sizes_P = torch.tensor(sizes).to(device, non_blocking=True)
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [self.state[p] for p in parameters]
        means = [state["mean"] for state in states]
        squares = [state["square"] for state in states]
        size_mean_P = torch.stack([state["size_mean"] for state in states])
        size_square_P = torch.stack([state["size_square"] for state in states])
        step, lr, eps = states[0]["step"], group["lr"], group["eps"]
        beta1, beta2 = group["betas"]
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step

        def each(values_P: Tensor) -> Tensor:
            """The value of its parameter for every element."""
            return values_P.repeat_interleave(sizes_P, output_size=sum(sizes))

        rms_P = torch.stack(torch._foreach_norm(parameters)).float() / sizes_P.sqrt()
        floor_P = torch.where(sizes_P == 1, group["scalar_rms"], group["min_rms"])
        bounded_rms = each(rms_P.clamp(max=group["max_rms"]).maximum(floor_P))

        # The gradient for the parameter measured in units of its own size.
        scaled = _vector(gradients) * bounded_rms
        mean = _vector(means).lerp_(scaled, 1 - beta1)
        square = _vector(squares).mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        _write(mean, means, sizes)
        _write(square, squares, sizes)
        direction = mean.div_(correction1).div_(square.div_(correction2).sqrt_().add_(eps))
        change = direction.mul_(bounded_rms).mul_(-lr)

        products = torch._foreach_mul(parameters, gradients)
        positive = torch._foreach_norm(torch._foreach_clamp_min(products, 0.0), 1)
        negative = torch._foreach_norm(torch._foreach_clamp_max(products, 0.0), 1)
        size_gradient_P = torch.stack(positive).float() - torch.stack(negative).float()
        size_mean_P.lerp_(size_gradient_P, 1 - beta2)
        size_square_P.lerp_(size_gradient_P.square(), 1 - beta2)
        for state, size_mean, size_square in zip(
            states, size_mean_P.unbind(), size_square_P.unbind(), strict=True
        ):
            state["size_mean"], state["size_square"] = size_mean, size_square
        size_step_P = (size_mean_P / correction2) / ((size_square_P / correction2).sqrt() + eps)
        growth_P = (-lr * group["size_lr"] * size_step_P).clamp(-0.1, 0.1)
        # Neither shrink below the floor nor grow beyond the ceiling.
        stays_P = (sizes_P == 1) | ((rms_P < floor_P) & (growth_P < 0))
        stays_P |= (rms_P > group["max_rms"]) & (growth_P > 0)
        change.addcmul_(_vector(parameters), each(growth_P.masked_fill_(stays_P, 0.0)))
        torch._foreach_add_(parameters, _like(change, parameters, sizes))


def _vector(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _like(vector: Tensor, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    pieces = vector.split(sizes)
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def _write(vector: Tensor, tensors: list[Tensor], sizes: list[int]) -> None:
    torch._foreach_copy_(tensors, _like(vector, tensors, sizes))
