"""Losses and gradients on a device against plain torch in float64 on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from pruned_rnnt.ops.step import step_ops
from pruned_rnnt.selfcheck.loss_problems import LossProblem, loss_problems
from pruned_rnnt.selfcheck.plain_ops import PlainOps, difference
from pruned_rnnt.selfcheck.problem import Finding, Outputs, first_line, guarded
from pruned_rnnt.system.switched_kernels import LOSSES

# Largest error of a result as a fraction of its largest value.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Smaller values of bfloat16 have no equal in float16.
_LEAST = 2.0**-16


def check_losses(device: torch.device) -> Iterator[Finding]:
    """One finding for each loss and dtype."""
    for problem in loss_problems():
        wanted = _wanted(problem)
        for dtype in problem.dtypes:
            name = str(dtype).removeprefix("torch.")
            kind = "autocast " if problem.autocast and dtype != torch.float32 else ""
            what = f"{problem.name}, {kind}{name}"
            compare = functools.partial(_compare, problem, dtype, device, what, wanted)
            yield guarded(LOSSES, what, compare)


def _wanted(problem: LossProblem) -> Outputs:
    """The results in float64, of plain torch on the CPU."""
    with PlainOps():
        return _results(problem, _leaves(problem, torch.float64, torch.device("cpu")))


def _compare(
    problem: LossProblem, dtype: torch.dtype, device: torch.device, what: str, wanted: Outputs
) -> Finding:
    products = dtype if problem.autocast and dtype != torch.float32 else None
    given = torch.float32 if problem.autocast else dtype

    def results() -> Outputs:
        return _results(problem, _leaves(problem, given, device), products)

    name, error = _measured(results, wanted)
    tolerance = TOLERANCES[dtype]
    if error <= tolerance:
        return Finding(part=LOSSES, what=what, error=error, tolerance=tolerance)
    kernels = PlainOps(compares=True)
    # The compiled step calls other kernels without the ops.
    with kernels, mock.patch.object(step_ops, "FIELDS", None):
        plain = _measured(results, wanted)[1]
    is_right = plain <= tolerance
    if kernels.wrong:
        culprits = f"the kernels of {', '.join(sorted(kernels.wrong))} differ from plain torch"
    elif is_right and step_ops.has_native_step() and "training loss" in problem.name:
        culprits = "the compiled step of the training loss differs from plain torch"
    else:
        culprits = "no single kernel differs from plain torch"
    if not is_right:
        culprits += ", which is wrong as well"
    return Finding(
        part=LOSSES,
        what=what,
        error=error,
        tolerance=tolerance,
        failure=f"{name}: {culprits}",
        plain_is_right=is_right,
    )


def _leaves(problem: LossProblem, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The inputs, which every dtype represents exactly."""
    generator = torch.Generator().manual_seed(0)
    values = (
        (torch.randn(shape, generator=generator) * problem.scale).bfloat16().double()
        for shape in problem.leaves
    )
    exact = (x.where(x.abs() >= _LEAST, 0.0) for x in values)
    return [x.to(device, dtype).requires_grad_() for x in exact]


def _results(
    problem: LossProblem, leaves: Sequence[Tensor], products: torch.dtype | None = None
) -> Outputs:
    """Results and the gradients of the leaves. products: dtype of autocast."""
    device = leaves[0].device.type
    with torch.autocast(device, products) if products is not None else nullcontext():
        outputs = dict(problem.run(*leaves))
    loss = outputs.get("loss")
    if loss is not None:
        # Each utterance has another factor, so that a mixed-up gradient shows.
        factors = torch.linspace(0.5, 1.5, max(loss.numel(), 1), dtype=loss.dtype)
        total = (loss.flatten() * factors.to(loss.device)).sum()
        gradients = torch.autograd.grad(total, list(leaves))
        outputs |= {f"gradient {n + 1}": x for n, x in enumerate(gradients)}
    return {name: x.detach() for name, x in outputs.items()}


def _measured(results: Callable[[], Outputs], wanted: Outputs) -> tuple[str, float]:
    """The result with the largest error; an exception is an infinite one."""
    try:
        return _worst(results(), wanted)
    except Exception as error:
        return first_line(error), float("inf")


def _worst(found: Outputs, wanted: Outputs) -> tuple[str, float]:
    """The result with the largest error."""
    errors = {name: difference(found[name].cpu(), wanted[name]) for name in wanted}
    name = max(errors, key=lambda name: errors[name])
    return name, errors[name]
