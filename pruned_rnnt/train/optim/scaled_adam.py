"""ScaledAdam (Yao et al. 2023, "Zipformer", arXiv 2310.11230, section 3.5) as icefall trains it.

Adam with steps proportional to the size of each parameter, so that one learning rate fits all of
them. It learns the size of each parameter separately. With r the root mean square of a
parameter and g its gradient after clipping, one step is

    v      = beta2 * v + (1 - beta2) * g^2
    change = beta1 * change + (1 - beta1) * (-lr * r * g / (sqrt(v) + eps) + growth * parameter)
    parameter += change

where v is corrected for its bias as in Adam, while `change` starts at zero without a correction,
which makes the first steps short. Every fourth step measures r anew and has a growth other than
zero: with s_1 to s_4 the scalar gradients sum(g * parameter) since the previous one, which are the
derivatives of the loss for multiplying the parameter by 1 + x,

    growth = -size_lr * lr * (s_1 + s_2 + s_3 + s_4) / (sqrt(v_s) + eps)

with v_s the running mean of their mean square. A parameter of one element has the fixed r =
size_lr, no growth, and values limited to [-max_scalar, max_scalar].

Gradients are clipped by the norm of all g * r together, to clip_scale times the median of this norm
over the last 100 steps; see `_MedianClipping`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.train.optim.conditional import Condition, loss_of
from pruned_rnnt.train.optim.scaled_adam_passes import (
    Passes,
    PlainPasses,
    Rates,
    Update,
    vector_of,
)

# Size of the vectors in which parameters are updated; about six copies of one exist during an
# update, unless fused kernels compute it.
_BUCKET_ELEMENTS = 2**24
# Steps from one change of the sizes to the next.
_SIZE_PERIOD = 4
# Entries of a parameter's state that are float32, whatever its own dtype.
_IN_FLOAT32 = ("rms", "size_square", "size_gradients")
# Largest growth of a parameter by one change of its size, as a fraction of the parameter.
_MAX_GROWTH = 0.1
# From this value on, Adam's bias correction is left out.
_NEGLIGIBLE_CORRECTION = 0.99
# Steps from one estimate of the limit of gradients to the next, and those of early estimates.
_CLIP_PERIOD = 100
_EARLY_STEPS = (10, 20, 40)


class ScaledAdam(torch.optim.Optimizer):
    """A `ConditionalOptimiser`; its formulas are in the docstring of the module.

    A parameter without a gradient is updated as with a gradient of zero. No call waits for the
    device.

    Args:
        params: parameters or groups of them; each group is on one device and clipped by itself.
        lr: about 0.045 at the peak of the schedule.
        betas: decay of the change and of the mean square of the gradient.
        clip_scale: limit of the norm, in medians; 0 switches clipping off.
        size_lr: learning rate of the size, and of parameters of one element, as a fraction of lr.
        min_rms, max_rms: the step is at least lr times min_rms, sizes below min_rms do not change,
            and no size grows beyond max_rms.
        max_scalar: limit of the absolute value of a parameter of one element.

    Attributes:
        sum_over_processes: sums the square () of the norm over the processes that divide the
            parameters among them, in place; None if this process has all. Groups may be empty then.
    """

    sum_over_processes: Callable[[Tensor], None] | None = None

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float = 0.045,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        clip_scale: float = 2.0,
        size_lr: float = 0.1,
        min_rms: float = 1e-5,
        max_rms: float = 3.0,
        max_scalar: float = 10.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "clip_scale": clip_scale,
                "size_lr": size_lr,
                "min_rms": min_rms,
                "max_rms": max_rms,
                "max_scalar": max_scalar,
                "step": 0,
            },
        )
        # Allocated here, as an update that runs out of memory cannot be repeated.
        self._groups = self._new_groups()

    def _new_groups(self) -> list[_Group]:
        device = next(p.device for group in self.param_groups for p in group["params"])
        return [_Group(group, self.state, device) for group in self.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by `load_state_dict`.

        Raises:
            ValueError: the state is that of another optimiser.
        """
        super().__setstate__(state)
        self._groups = self._new_groups()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch's; it rounds all values to the dtypes of the parameters."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        if all(p.dtype == torch.float32 for p in parameters):
            return
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name in _IN_FLOAT32:
                    self.state[parameter][name] = value.to(parameter.device, torch.float32)
        self._groups = self._new_groups()

    @torch.no_grad()
    def step_if(self, applies: Tensor) -> None:
        """Update if the flag on the device is true; see `ConditionalOptimiser`."""
        self._update(Condition(applies))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Compute the loss by `closure` if there is one, and update."""
        loss = loss_of(closure)
        self._update(Condition(None))
        return loss

    def _update(self, condition: Condition) -> None:
        for group in self._groups:
            group.update(condition, self.sum_over_processes)

    def take_back(self) -> None:
        """Subtract the last update, which did not apply, from the count of updates."""
        for group in self.param_groups:
            group["step"] -= 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which start as those of a new optimiser."""
        super().add_param_group(param_group)
        if hasattr(self, "_groups"):  # not while torch's constructor adds the first ones
            group = self.param_groups[-1]
            self._groups.append(_Group(group, self.state, group["params"][0].device))


class _Group:
    """The vectors of a group of parameters, and their clipping.

    Args:
        device: of an empty group.
    """

    def __init__(
        self, options: dict[str, Any], state: dict[Tensor, Any], device: torch.device
    ) -> None:
        self.options = options
        self.vectors = [_Vectors(bucket, state, options) for bucket in _buckets(options["params"])]
        self._device = options["params"][0].device if options["params"] else device
        self.clipping = _MedianClipping(options, self._device)

    def update(
        self, condition: Condition, sum_over_processes: Callable[[Tensor], None] | None
    ) -> None:
        for vectors in self.vectors:
            vectors.passes.start(condition)
        factor = None
        if self.options["clip_scale"] > 0:
            squares = [vectors.square_norm() for vectors in self.vectors]
            total = torch.stack(squares).sum() if squares else torch.zeros((), device=self._device)
            if sum_over_processes is not None:
                sum_over_processes(total)
            factor = self.clipping.factor(total.sqrt_(), condition)
        for vectors in self.vectors:
            vectors.update(factor, condition)
        self.options["step"] += 1


class _Vectors:
    """Parameters that are updated as one vector; their optimiser states are views of vectors."""

    def __init__(
        self, parameters: list[Tensor], state: dict[Tensor, Any], options: dict[str, Any]
    ) -> None:
        self.passes = _passes_over(parameters)
        self.sizes_P = self.passes.sizes_P
        self.options = options
        states = [state[parameter] for parameter in parameters]
        for of_parameter, parameter in zip(states, parameters, strict=True):
            _fill(of_parameter, parameter, options)
        self.is_scalar_P = self.sizes_P == 1
        self.change, self.square, self.rms_P, self.size_square_P = (
            vector_of([of_parameter[name] for of_parameter in states])
            for name in ("change", "square", "rms", "size_square")
        )
        self.size_gradients_KP = torch.stack([each["size_gradients"] for each in states], dim=1)
        for name, pieces in (
            ("change", _unflatten_dense_tensors(self.change, parameters)),
            ("square", _unflatten_dense_tensors(self.square, parameters)),
            ("rms", self.rms_P.unbind()),
            ("size_square", self.size_square_P.unbind()),
            ("size_gradients", self.size_gradients_KP.unbind(dim=1)),
        ):
            for of_parameter, piece in zip(states, pieces, strict=True):
                of_parameter[name] = piece
        self._set_rms()

    def square_norm(self) -> Tensor:
        """(): sum of the squares of gradient times root mean square of its parameter."""
        return torch.dot(self.passes.gradient_squares(), self.rms_P.square())

    def update(self, factor: Tensor | None, condition: Condition) -> None:
        """One step with gradients times `factor`."""
        options = self.options
        beta1, beta2 = options["betas"]
        place = options["step"] % _SIZE_PERIOD
        condition.assign(self.size_gradients_KP[place], self.passes.value_gradients(factor))
        growth_P = None
        if place == _SIZE_PERIOD - 1:
            rms_P = (self.passes.value_squares() / self.sizes_P).sqrt_()
            condition.assign(self.rms_P, torch.where(self.is_scalar_P, self.rms_P, rms_P))
            self._set_rms()
            growth_P = condition.zero_(self._growth_P(condition))
        correction = 1 - beta2 ** (options["step"] + 1)
        rates = Rates(
            step=-options["lr"] * (1 - beta1),
            change_decay=beta1,
            square_decay=beta2,
            correction=correction if correction < _NEGLIGIBLE_CORRECTION else 1.0,
            eps=options["eps"],
            max_scalar=options["max_scalar"],
        )
        self.passes.update(Update(self.change, self.square, growth_P, rates, condition))

    def _set_rms(self) -> None:
        self.passes.set_rms(self.rms_P.clamp(min=self.options["min_rms"]))

    def _growth_P(self, condition: Condition) -> Tensor:
        """(P,): change of the size of each parameter, as a fraction of the size."""
        options = self.options
        beta2 = options["betas"][1] ** _SIZE_PERIOD
        updates = (options["step"] + 1) // _SIZE_PERIOD
        squares_P = self.size_gradients_KP.square().mean(dim=0)
        condition.lerp_(self.size_square_P, squares_P, 1 - beta2)
        spread_P = self.size_square_P.sqrt().add_(options["eps"])
        rate = -options["size_lr"] * options["lr"] * math.sqrt(1 - beta2**updates)
        growth_P = self.size_gradients_KP.sum(dim=0).div_(spread_P).mul_(rate)
        stays_P = self.is_scalar_P | (self.rms_P < options["min_rms"])
        growth_P = growth_P.masked_fill_(stays_P, 0.0).clamp_(-_MAX_GROWTH, _MAX_GROWTH)
        return growth_P.minimum((options["max_rms"] - self.rms_P) / self.rms_P)


class _MedianClipping:
    """The factor of the gradients in each step, computed on the device as icefall does it.

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
            ("clip_norms", torch.zeros(_CLIP_PERIOD)),
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
        condition.assign(norms[step % _CLIP_PERIOD], norm)
        if step % _CLIP_PERIOD == 0:
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


def _buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of parameters of one device and dtype, each at most about a vector long.

    Without those that have no elements, whose root mean square is not a number.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    for parameter in filter(torch.numel, parameters):
        several = buckets.setdefault((parameter.device, parameter.dtype), [[]])
        if sum(p.numel() for p in several[-1]) > _BUCKET_ELEMENTS:
            several.append([])
        several[-1].append(parameter)
    return [bucket for several in buckets.values() for bucket in several]


def _fill(state: dict[str, Any], parameter: Tensor, options: dict[str, Any]) -> None:
    """Set the state of a parameter before its first step; ValueError for one of another kind."""
    if "change" in state:
        return
    if state:
        raise ValueError(
            f"the saved optimiser state has {', '.join(map(str, state))} for each parameter, and "
            "no change: it is not from this version's scaled_adam. Set train.init=RUN in a new "
            "train.folder to train further from the parameters of that run"
        )
    values = parameter.detach().float()
    state["change"] = torch.zeros_like(parameter)
    state["square"] = torch.zeros_like(parameter)
    state["rms"] = (
        values.square().mean().sqrt()
        if parameter.numel() != 1
        else torch.full((), options["size_lr"], device=parameter.device)
    )
    state["size_square"] = torch.zeros((), device=parameter.device)
    state["size_gradients"] = torch.zeros(_SIZE_PERIOD, device=parameter.device)


def _passes_over(parameters: list[Tensor]) -> Passes:
    """Passes over these parameters, by fused kernels if they can run."""
    fits = all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    if not (fits and use_kernels(*parameters)):
        return PlainPasses(parameters)
    from pruned_rnnt.train.optim.scaled_adam_kernels import FusedPasses

    return FusedPasses(parameters)
