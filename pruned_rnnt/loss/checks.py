"""Checks of tensors and scalars, in the caller's words. None reads values but those on the CPU."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import unpack_dual

from pruned_rnnt.ops.common.library import CONSTRAINED, REGULAR, RNNT_TYPES, accumulator
from pruned_rnnt.ops.joiner.log_probs import HAT, LOG_PROBS, LOGITS
from pruned_rnnt.ops.lattice.recursion import LossOptions

REDUCTIONS = ("none", "mean", "sum")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)


def check_tensor(name: str, x: object) -> None:
    """TypeError for a list, an array or anything else that is not a tensor; ValueError for a sparse
    or nested one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    if x.layout != torch.strided or x.is_nested:
        kind, dense = f"of layout {x.layout}", "to_dense()"
        if x.is_nested:
            kind, dense = "nested", "to_padded_tensor(0)"
        raise ValueError(f"{name} is {kind}; it must be a dense tensor; {name}.{dense} is one")
    if not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(x):
        raise RuntimeError(
            f"{name} is inside a transform of torch.func (vmap, grad, jvp, ...), which cannot see "
            "into the loss; use its batch axis and torch.autograd.grad"
        )
    if not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None:
        raise RuntimeError(
            f"{name} is a dual tensor of forward-mode AD, which the losses do not have; use "
            "torch.autograd.grad, of a tensor without tangent"
        )


def has_values(x: Tensor) -> bool:
    """False for meta and FakeTensors, which have shapes alone."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def check_has_values(name: str, x: Tensor, function: str) -> None:
    """RuntimeError for a tensor without values, for functions that follow what it holds."""
    if not has_values(x):
        raise RuntimeError(f"{name} has no values (meta or FakeTensor), which {function} needs")


def check_integers(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in INTEGERS:
        raise ValueError(f"{name} is {x.dtype}; it must be int32 or int64")


def check_floating(name: str, x: Tensor, shape: str, dims: int) -> None:
    """A floating tensor of `dims` dimensions, `shape` in words."""
    check_tensor(name, x)
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(
            f"torch.jit.trace cannot record the loss of {name}; use torch.compile or torch.export"
        )
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}; it must be float64, float32, float16 or bfloat16")
    if x.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")
    if x.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; there must be at least one utterance")


def check_last_axis(name: str, x: Tensor) -> None:
    """ValueError for a vocabulary, or a width, of 0."""
    if x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; its last axis must not be empty")


def check_same(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Same device as another argument."""
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device} but {other_name} on {other.device}")


def check_shape(name: str, x: Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    check_tensor(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {meaning} = {shape}")


def in_one_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating-point inputs of one computation: as they are if all of them are float64 or none is,
    else in float64, to which torch promotes them. Kernels sum all in one accumulator."""
    if len({accumulator(x.dtype) for x in tensors}) == 1:
        return tensors
    return tuple(x.double() for x in tensors)


def check_occupancies(**parts: Tensor) -> list[Tensor]:
    """Parts of an occupancy by name, (N, T, U+1) each: without gradient, contiguous and in one
    accumulator's dtype."""
    first_name, first = next(iter(parts.items()))
    for name, x in parts.items():
        check_floating(f"occupancy.{name}", x, "(N, T, U+1)", 3)
        check_same(f"occupancy.{name}", x, f"occupancy.{first_name}", first)
        meaning = f"the shape of occupancy.{first_name}"
        check_shape(f"occupancy.{name}", x, tuple(first.shape), meaning)
    return [
        x.detach().to(accumulator(x.dtype)).contiguous() for x in in_one_precision(*parts.values())
    ]


def check_one_of(name: str, value: str, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {list(choices)}")


def check_rnnt_type(rnnt_type: str) -> int:
    check_one_of("rnnt_type", rnnt_type, RNNT_TYPES)
    return RNNT_TYPES[rnnt_type]


def check_reduction(reduction: str) -> None:
    check_one_of("reduction", reduction, REDUCTIONS)


def check_integer(name: str, value: int) -> int:
    """An integer of Python, NumPy or torch.compile; no bool, and no float even if it is whole."""
    if isinstance(value, bool) or not isinstance(value, (int, Integral, torch.SymInt)):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def check_at_least(name: str, value: int, least: int) -> int:
    """An integer from `least` on."""
    value = check_integer(name, value)
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return value


def check_flag(name: str, value: bool) -> bool:
    """True or False, of Python or NumPy; nothing else, because texts such as 'False' are true."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}, needs True or False")
    return bool(value)


def check_validate(validate: bool) -> None:
    """A flag, and no request that torch.compile would ignore."""
    if check_flag("validate", validate) and torch.compiler.is_compiling():
        raise ValueError(
            "validate is True, but torch.compile cannot check values; use validate=False there, or "
            "call the loss once without torch.compile"
        )


def check_s_range(s_range: int, rnnt_type: int) -> int:
    s_range = check_integer("s_range", s_range)
    # A symbol of these types needs two columns of one frame.
    least = 2 if rnnt_type in (REGULAR, CONSTRAINED) else 1
    if s_range < least:
        raise ValueError(f"s_range is {s_range}; it must be at least {least} for this rnnt_type")
    if not isinstance(s_range, torch.SymInt) and s_range > torch.iinfo(torch.int32).max:
        raise ValueError(f"s_range is {s_range}; it must be an int32")
    return s_range


def check_finite(name: str, value: float) -> float:
    """A number, which is no tensor and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real, torch.SymFloat)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    # Not math.isfinite, which torch.compile of torch 2.11 does not take for a dynamic number.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)


def check_fastemit(fastemit_lambda: float) -> float:
    """A number from 0 on: the gradient through symbols is multiplied by 1 plus it."""
    fastemit_lambda = check_finite("fastemit_lambda", fastemit_lambda)
    if fastemit_lambda < 0:
        raise ValueError(
            f"fastemit_lambda is {fastemit_lambda}; it must be at least 0 (0 turns FastEmit off): "
            "negative values train symbols less, and values below -1 train the model to avoid them"
        )
    return fastemit_lambda


def check_options(
    blank: int,
    vocabulary: int,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    hat: bool = False,
    from_log_probs: bool = False,
    negative_fastemit: bool = False,
) -> LossOptions:
    """The scalar arguments that the losses of logits share.

    negative_fastemit: take a negative fastemit_lambda.
    """
    hat, from_log_probs = check_flag("hat", hat), check_flag("from_log_probs", from_log_probs)
    if hat and from_log_probs:
        raise ValueError("hat=True needs logits; it cannot be combined with from_log_probs=True")
    blank = check_integer("blank", blank)
    if not 0 <= blank < vocabulary:
        raise ValueError(
            f"blank is {blank}; it must be in 0..{vocabulary - 1} for a vocabulary of {vocabulary}"
        )
    if clamp is not None and not check_finite("clamp", clamp) > 0:
        raise ValueError(f"clamp is {clamp}; it must be above 0, or None for no clamping")
    if negative_fastemit:
        fastemit_lambda = check_finite("fastemit_lambda", fastemit_lambda)
    else:
        fastemit_lambda = check_fastemit(fastemit_lambda)
    return LossOptions(
        blank=blank,
        normalization=HAT if hat else LOG_PROBS if from_log_probs else LOGITS,
        rnnt_type=check_rnnt_type(rnnt_type),
        delay_penalty=check_finite("delay_penalty", delay_penalty),
        fastemit_lambda=fastemit_lambda,
        clamp=0.0 if clamp is None else float(clamp),
    )


def readable(validate: bool, *tensors: Tensor | None) -> bool:
    """True if values may be read: on the CPU, or because of validate. Traced tensors have none."""
    if torch.compiler.is_compiling() or any(isinstance(x, FakeTensor) for x in tensors):
        return False
    return validate or all(x is None or x.is_cpu for x in tensors)


def first_bad(bad_N: Tensor) -> int | None:
    """The first marked utterance, or None; synchronizes with the device."""
    return int(bad_N.int().argmax()) if bool(bad_N.any()) else None
