"""Updates that depend on a flag on the device, so that the host need not wait for the flag."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


def leave_dynamo_unloaded() -> None:
    """Let the methods of `torch.optim.Optimizer` run as they are.

    torch wraps them for torch.compile, which must not trace them: the first call imports Dynamo
    (1.2 s of 2.3 s of processor time until a training starts) to get the function that is called
    instead, unless the method already names one. Does nothing where Dynamo is loaded.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dict__.setdefault("__dynamo_disable", plain)


def check_saved_state(state_dict: Mapping[str, Any], name: str) -> None:
    """ValueError unless the state of each parameter has an entry of this name."""
    for state in state_dict["state"].values():
        if name not in state:
            raise ValueError(
                f"the saved optimiser state has {', '.join(map(str, state))} for each parameter, "
                f"and no {name}"
            )


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """The loss that the closure of `torch.optim.Optimizer.step` computes, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrapper of `step` that breaks Dynamo's graphs around the update."""

    _update = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))

    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for p in self._fused_on_cpu():
            if p.grad is not None:
                p.grad = _in_order_of(p, p.grad)
        self._update()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the moments; ValueError if the state is that of another optimiser."""
        check_saved_state(state_dict, "exp_avg")
        # The saved form of the update may be that of another device.
        own = {"fused": self.defaults["fused"]}
        groups = [group | own for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})
        for p in self._fused_on_cpu():
            state = self.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _in_order_of(p, state[name])

    def _fused_on_cpu(self) -> list[nn.Parameter]:
        """The parameters of torch's fused update on a CPU, which reads all memory in one order."""
        groups = self.param_groups if self.defaults["fused"] else []
        return [p for group in groups for p in group["params"] if p.is_cpu]


def _in_order_of(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """The values, as a copy if their order in memory is another than the parameter's."""
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter).copy_(values)


@runtime_checkable
class ConditionalOptimiser(Protocol):
    """An optimiser that can update or not, depending on a flag on the device."""

    def step_if(self, applies: Tensor) -> None:
        """Update as `step` does if the flag is true, else change nothing; the host does not wait.

        The host counts the update in any case: `take_back` must be called before the next update
        if the flag was false.

        Args:
            applies: () bool, on the device of the parameters.
        """

    def take_back(self) -> None:
        """Subtract the last update, whose flag was false, from the count of updates."""


class Condition:
    """Operations of an update that takes effect if a flag is true, or always if there is no flag.

    Args:
        applies: () bool on the device, or None.
    """

    def __init__(self, applies: Tensor | None) -> None:
        self.applies = applies

    def mul_(self, values: Tensor, factor: float) -> Tensor:
        """Multiply all values, in place."""
        if self.applies is None:
            return values.mul_(factor)
        one = torch.ones((), dtype=values.dtype, device=values.device)
        # This kernel is faster than the usual one for a factor on the device.
        torch._foreach_mul_([values], one.masked_fill_(self.applies, factor))
        return values

    def or_zeros(self, values: Tensor) -> Tensor:
        """The values, or zeros if the update does not apply."""
        if self.applies is None:
            return values
        product: Tensor
        (product,) = torch._foreach_mul([values], self.applies.to(values.dtype))
        return product

    def lerp_(self, values: Tensor, end: Tensor, weight: float) -> Tensor:
        """Move `values` towards `end`, in place; `end` may be infinite or NaN."""
        if self.applies is None:
            return values.lerp_(end, weight)
        return self.assign(values, values.lerp(end, weight))

    def assign(self, values: Tensor, new: Tensor) -> Tensor:
        """Copy `new` into `values`."""
        if self.applies is None:
            return values.copy_(new)
        return torch.where(self.applies, new, values, out=values)

    def zero_(self, values: Tensor) -> Tensor:
        """Set all values to zero, in place, if the update does not apply."""
        return values if self.applies is None else values.masked_fill_(~self.applies, 0.0)


class FusedAdamW(AdamW):
    """AdamW with one kernel for all parameters, which also reads the flag; see
    `ConditionalOptimiser`."""

    def step_if(self, applies: Tensor) -> None:
        # With these attributes GradScaler lets the kernel skip an update and its count.
        self.grad_scale, self.found_inf = None, (~applies).float()
        try:
            self.step()
        finally:
            del self.grad_scale, self.found_inf

    def take_back(self) -> None:
        """The kernel has not counted the update."""
