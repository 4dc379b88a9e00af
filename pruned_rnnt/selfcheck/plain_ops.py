"""Runs the ops of the losses in plain torch, and finds the kernels that differ from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pruned_rnnt.ops.common.library import FALLBACKS, NAMESPACE
from pruned_rnnt.ops.common.native import has_native_kernel

# Below it are values that stand for the logarithm of 0.
_LEAST = -1e29
# Largest error of an op's output as a fraction of the largest value, by dtype.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
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
        if not error <= _TOLERANCES.get(twin.dtype, _UNEQUAL):
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
    is_number = wanted.isfinite() & (wanted > _LEAST)
    if not torch.equal(is_number, found.isfinite() & (found > _LEAST)):
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
