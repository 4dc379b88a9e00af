"""Losses and gradients on a device against plain torch in float64 on the CPU; for a wrong one, also
which kernels differ from their op in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pruned_rnnt.ops.common.library import FALLBACKS, NAMESPACE
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.step import step_library
from pruned_rnnt.selfcheck.loss_problems import LossProblem, loss_problems
from pruned_rnnt.selfcheck.problem import Finding, Outputs, first_line, guarded
from pruned_rnnt.system.switched_kernels import LOSSES

# Largest error of a result as a fraction of its largest value.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Smaller values of bfloat16 have no equal in float16.
_LEAST_INPUT = 2.0**-16
# Below it are values that stand for the logarithm of 0.
_LEAST_NUMBER = -1e29
# Largest error of an op's output that is right, as a fraction of the largest value, by dtype.
_OP_ERRORS = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
# Of integers, which may differ in ties.
_UNEQUAL = 0.02
# Outputs that are only memory for the op, or have rows that no kernel needs to write.
_MEMORY = ("partial", "scratch", "work")
_MEMORY_OF_FUSED = ("hidden", "logits")
_PARTLY_WRITTEN = (
    "active_joiner_rows",
    "active_log_probs_backward",
    "counted_rows_product",
    "list_active_rows",
)


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
    with kernels, mock.patch.object(step_library, "FIELDS", None):
        plain = _measured(results, wanted)[1]
    is_right = plain <= tolerance
    if kernels.wrong:
        culprits = f"the kernels of {', '.join(sorted(kernels.wrong))} differ from plain torch"
    elif is_right and step_library.has_native_step() and "training loss" in problem.name:
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
    exact = (x.where(x.abs() >= _LEAST_INPUT, 0.0) for x in values)
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


class PlainOps(TorchDispatchMode):
    """Within the context, each op runs its plain twin, in backward passes as well.

    compares: also run the kernel, on a copy of the arguments, and compare what it writes.

    Attributes:
        wrong: the ops whose kernels wrote something else, with the largest error.
    """

    def __init__(self, *, compares: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compares = compares
        self.wrong: dict[str, float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace != NAMESPACE or name not in FALLBACKS:
            return func(*args, **(kwargs or {}))
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        copies = None
        if self._compares and has_native_kernel(name, device):
            copies = _copied(args)
            try:
                func(*copies)
            except Exception:  # the result of the twin counts
                copies, self.wrong[name] = None, float("inf")
        with self:  # ops that the twin calls
            FALLBACKS[name](*args)
        for position, argument in enumerate(func._schema.arguments) if copies is not None else ():
            if _is_result(name, argument) and args[position] is not None:
                self._compare(name, copies[position], args[position])  # type: ignore[index]
        return None

    def _compare(self, op: str, found: Tensor, twin: Tensor) -> None:
        error = difference(found, twin)
        if not error <= _OP_ERRORS.get(twin.dtype, _UNEQUAL):
            self.wrong[op] = max(error, self.wrong.get(op, 0.0))


def _is_result(op: str, argument: Any) -> bool:
    if argument.alias_info is None or argument.name in _MEMORY or op in _PARTLY_WRITTEN:
        return False
    is_fused = op.startswith("fused_") or op == "packed_log_probs"
    return not (is_fused and argument.name in _MEMORY_OF_FUSED)


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest error as a fraction of the largest value, of integers the share of unequal ones.

    Infinite if one is not finite where the other one is.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    if not wanted.is_floating_point():
        return float((found != wanted).double().mean())
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    is_number = wanted.isfinite() & (wanted > _LEAST_NUMBER)
    if not torch.equal(is_number, found.isfinite() & (found > _LEAST_NUMBER)):
        return float("inf")
    others = ~is_number & ~wanted.isfinite()
    same = torch.equal(found[others].nan_to_num(7.0), wanted[others].nan_to_num(7.0))
    if not same:
        return float("inf")
    found, wanted = found[is_number], wanted[is_number]
    if not wanted.numel():
        return 0.0
    largest = float(wanted.abs().max())
    worst = float((found - wanted).abs().max())
    return worst / largest if largest else worst


def _copied(arguments: tuple[Any, ...]) -> list[Any]:
    """Copies of the tensors; an argument that occurs twice is one copy."""
    copies: dict[Any, Tensor] = {}
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            found.append(copies.setdefault(key, x.clone()))
        else:
            found.append(x)
    return found
