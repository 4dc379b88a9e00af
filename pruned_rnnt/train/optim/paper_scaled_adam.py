"""ScaledAdam by the formulas of its paper (Yao et al. 2023, arXiv 2310.11230, section 3.5).

Its first steps are longer than those of icefall's update (`scaled_adam`), because both moments are
corrected for their bias. This helps training runs of a few hundred steps.

Adam with steps proportional to the size of each parameter, so that one learning rate fits all of
them. It learns the size of each parameter separately. With r the root mean square of a
parameter, g its gradient, m and v Adam's moments (bias-corrected), one step is

    parameter -= lr * r * m / (sqrt(v) + eps)               change of direction
    parameter *= 1 - size_lr * lr * m_s / (sqrt(v_s) + eps)  change of size

where the size moments m_s, v_s follow the scalar gradient sum(g * parameter): the derivative of
the loss for multiplying the parameter by 1 + s. Outside [min_rms, max_rms] the size only changes
towards this range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from pruned_rnnt.train.optim.conditional import Condition
from pruned_rnnt.train.optim.parameter_vectors import ClosureOptimiser, ParameterVector, vector_of

# Size of the vectors in which parameters are updated; about ten copies exist during an update.
_BUCKET_ELEMENTS = 2**24


class PaperScaledAdam(ClosureOptimiser):
    """The optimiser; its formulas are in the docstring of the module.

    Args:
        params: parameters or groups of them.
        lr: about 0.045 at the peak of the schedule.
        betas: decay of the two moments; the size uses the second one for both of its moments.
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
        self._vectors: dict[Tensor, _Vectors] = {}
        self._updated: list[_Vectors] = []
        self._allocate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by `load_state_dict`."""
        super().__setstate__(state)
        self._vectors = {}
        self._allocate()

    def _allocate(self) -> None:
        """Allocate all moments: an update that runs out of memory cannot be repeated."""
        for group in self.param_groups:
            for parameters in self._buckets(group["params"]):
                self._vectors_of(parameters)

    def _vectors_of(self, parameters: list[Tensor]) -> _Vectors:
        """The vectors of these parameters, rebuilt after a change of grouping or state."""
        vectors = self._vectors.get(parameters[0])
        if vectors is None or not vectors.hold(parameters, self.state):
            vectors = _Vectors(parameters, self.state)
            for parameter in parameters:
                self._vectors[parameter] = vectors
        return vectors

    def update(self, condition: Condition) -> None:
        """Update every parameter that has a gradient."""
        self._updated = []
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for parameters in self._buckets(with_gradient):
                vectors = self._vectors_of(parameters)
                _update(vectors, group, condition)
                self._updated.append(vectors)

    def take_back(self) -> None:
        """Subtract the last update, which did not apply, from the count of updates."""
        for vectors in self._updated:
            for state in vectors.states:
                state["step"] -= 1

    def _buckets(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Lists of parameters with the same step, device and dtype, each at most a vector long."""
        buckets: dict[tuple[torch.device, torch.dtype, int], list[list[Tensor]]] = {}
        elements: dict[tuple[torch.device, torch.dtype, int], int] = {}
        for parameter in parameters:
            state = self.state[parameter]
            if not state:  # added later, or absent from a loaded state
                state["step"] = 0
                state["mean"] = torch.zeros_like(parameter)
                state["square"] = torch.zeros_like(parameter)
                state["size_mean"] = torch.zeros((), device=parameter.device)
                state["size_square"] = torch.zeros((), device=parameter.device)
            key = (parameter.device, parameter.dtype, state["step"])
            several = buckets.setdefault(key, [[]])
            if elements.get(key, 0) > _BUCKET_ELEMENTS:
                several.append([])
                elements[key] = 0
            several[-1].append(parameter)
            elements[key] = elements.get(key, 0) + parameter.numel()
        return [bucket for several in buckets.values() for bucket in several]


class _Vectors(ParameterVector):
    """Parameters that are updated as one vector; their optimiser states are views of vectors."""

    def __init__(self, parameters: list[Tensor], state: dict[Tensor, Any]) -> None:
        super().__init__(parameters)
        self.parameters = parameters
        self.states = [state[parameter] for parameter in parameters]
        self.mean, self.square, self.size_mean_P, self.size_square_P = (
            vector_of([state[name] for state in self.states])
            for name in ("mean", "square", "size_mean", "size_square")
        )
        for name, pieces in (
            ("mean", _unflatten_dense_tensors(self.mean, parameters)),
            ("square", _unflatten_dense_tensors(self.square, parameters)),
            ("size_mean", self.size_mean_P.unbind()),
            ("size_square", self.size_square_P.unbind()),
        ):
            for of_parameter, piece in zip(self.states, pieces, strict=True):
                of_parameter[name] = piece
        self._views = [of_parameter["mean"] for of_parameter in self.states]

    def hold(self, parameters: list[Tensor], state: dict[Tensor, Any]) -> bool:
        """Whether these are the parameters, and their moments are views of these vectors."""
        return len(parameters) == len(self.parameters) and all(
            one is other and state[one].get("mean") is view
            for one, other, view in zip(parameters, self.parameters, self._views, strict=True)
        )


def _update(vectors: _Vectors, group: dict[str, Any], condition: Condition) -> None:
    """One step of parameters with the same step count."""
    for state in vectors.states:
        state["step"] += 1
    step, lr, eps = vectors.states[0]["step"], group["lr"], group["eps"]
    beta1, beta2 = group["betas"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    sizes_P = vectors.sizes_P
    values = vector_of(vectors.parameters)
    # If the update is skipped: zeros change nothing, but infinity or NaN times zero would.
    gradient = condition.zero_(
        vector_of([p.grad for p in vectors.parameters if p.grad is not None])
    )

    rms_P = (vectors.sums(values.square()) / sizes_P).sqrt_()
    floor_P = torch.where(sizes_P == 1, group["scalar_rms"], group["min_rms"])
    bounded_rms = vectors.each(rms_P.clamp(max=group["max_rms"]).maximum(floor_P))
    size_gradient_P = vectors.sums(values * gradient)

    # The gradient for the parameter measured in units of its own size.
    scaled = gradient.mul_(bounded_rms)
    mean = condition.lerp_(vectors.mean, scaled, 1 - beta1)
    square = condition.mul_(vectors.square, beta2).addcmul_(scaled, scaled, value=1 - beta2)
    direction = (mean / correction1).div_((square / correction2).sqrt_().add_(eps))
    change = direction.mul_(bounded_rms).mul_(-lr)

    size_mean_P = condition.lerp_(vectors.size_mean_P, size_gradient_P, 1 - beta2)
    size_square_P = condition.lerp_(vectors.size_square_P, size_gradient_P.square(), 1 - beta2)
    size_step_P = (size_mean_P / correction2) / ((size_square_P / correction2).sqrt() + eps)
    growth_P = (-lr * group["size_lr"] * size_step_P).clamp(-0.1, 0.1)
    # Neither shrink below the floor nor grow beyond the ceiling.
    stays_P = (sizes_P == 1) | ((rms_P < floor_P) & (growth_P < 0))
    stays_P |= (rms_P > group["max_rms"]) & (growth_P > 0)
    change.addcmul_(values, vectors.each(growth_P.masked_fill_(stays_P, 0.0)))
    pieces = _unflatten_dense_tensors(condition.or_zeros(change), vectors.parameters)
    torch._foreach_add_(vectors.parameters, list(pieces))
