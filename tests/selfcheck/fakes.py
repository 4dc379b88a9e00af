"""Kernels that are wrong on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.native import has_native_kernel

# The start of a program whose kernel of `log_probs_backward` writes gradients a tenth too large.
WRONG_GRADIENT = """
import torch, pruned_rnnt
from pruned_rnnt.system.switched_kernels import ignore_switches
ignore_switches()
pruned_rnnt.rnnt_loss
right = torch.library.get_kernel("pruned_rnnt::log_probs_backward", "CPU")
def wrong(*arguments):
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    right.call_boxed(keys, *arguments)
    schema = torch.ops.pruned_rnnt.log_probs_backward.default._schema
    for value, argument in zip(arguments, schema.arguments):
        if argument.alias_info is not None:
            value.mul_(1.1)
library = torch.library.Library("pruned_rnnt", "IMPL")
library.impl("log_probs_backward", wrong, "CPU", allow_override=True)
"""


class Perturbed(TorchDispatchMode):
    """Within the context, the kernel of an op writes results that are a tenth too large.

    Attributes:
        calls: how often it ran.
    """

    def __init__(self, op: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "pruned_rnnt" and not has_native_kernel(name, "cpu"):
            with self:  # other ops, which it calls
                FALLBACKS[name](*args)
            return None
        done = func(*args, **(kwargs or {}))
        if func._schema.name == f"pruned_rnnt::{self.op}":
            self.calls += 1
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and isinstance(value, Tensor):
                    value.add_(1) if not value.is_floating_point() else value.mul_(1.1)
        return done


class Raising(Perturbed):
    """Within the context, the kernel of an op raises an error."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name == f"pruned_rnnt::{self.op}":
            raise RuntimeError("the kernel image is invalid")
        return func(*args, **(kwargs or {}))


def cpu() -> torch.device:
    return torch.device("cpu")
