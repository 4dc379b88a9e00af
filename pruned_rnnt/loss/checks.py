"""The checks that every loss makes of its arguments, in the caller's words.

Shapes, dtypes, devices and scalars are always checked, without reading data. Lengths, targets and
whether an utterance has a path are checked on the CPU, where that needs no synchronization. On
other devices such an utterance gets a loss of +inf and a gradient of 0, unless validate=True
requests the synchronization and the checks; this also applies to all devices in torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from pruned_rnnt.ops.common.library import CONSTRAINED, REGULAR, RNA, RNNT_TYPES, accumulator
from pruned_rnnt.ops.common.utterances import HostLengths, Utterances, as_int32, lengths_on
from pruned_rnnt.ops.joiner.log_probs import HAT, LOG_PROBS, LOGITS
from pruned_rnnt.ops.joiner.row_loss import LossOptions

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


def check_occupancies(**given: Tensor) -> list[Tensor]:
    """Parts of an occupancy by name, (N, T, U+1) each: without gradient, contiguous and in one
    accumulator's dtype."""
    first_name, first = next(iter(given.items()))
    for name, x in given.items():
        check_floating(f"occupancy.{name}", x, "(N, T, U+1)", 3)
        check_same(f"occupancy.{name}", x, f"occupancy.{first_name}", first)
        meaning = f"the shape of occupancy.{first_name}"
        check_shape(f"occupancy.{name}", x, tuple(first.shape), meaning)
    return [
        x.detach().to(accumulator(x.dtype)).contiguous() for x in in_one_precision(*given.values())
    ]


class Sizes(NamedTuple):
    """The sizes that targets and lengths must fit: batch N, frames T, symbols U, vocabulary V; and
    the device and the name of the argument that they belong to.

    None where packed rows leave a size open: then any N and U will do, and logit_lengths has no
    upper bound.
    """

    batch: int | None
    frames: int | None
    symbols: int | None
    vocabulary: int
    device: torch.device
    source: str


def check_am_lm(am: Tensor, lm: Tensor, width: str) -> Sizes:
    """Sizes of am (N, T, width) and lm (N, U+1, width), at least one row, on one device; the
    vocabulary is that width."""
    check_floating("am", am, f"(N, T, {width})", 3)
    check_floating("lm", lm, f"(N, U+1, {width})", 3)
    check_same("lm", lm, "am", am)
    check_last_axis("am", am)
    shape = (am.shape[0], max(lm.shape[1], 1), am.shape[2])
    check_shape("lm", lm, shape, f"(N, U+1, {width}) by the shape of am")
    batch, frames, size = am.shape
    return Sizes(batch, frames, lm.shape[1] - 1, size, am.device, "am and lm")


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


def check_options(
    blank: int,
    vocabulary: int,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    hat: bool = False,
    from_log_probs: bool = False,
) -> LossOptions:
    """The scalar arguments that the losses of logits share."""
    if hat and from_log_probs:
        raise ValueError("hat=True needs logits; it cannot be combined with from_log_probs=True")
    blank = check_integer("blank", blank)
    if not -vocabulary <= blank < vocabulary:
        raise ValueError(
            f"blank is {blank}; it must be in 0..{vocabulary - 1}, or negative to count from the "
            f"end, for a vocabulary of {vocabulary}"
        )
    if clamp is not None and not check_finite("clamp", clamp) > 0:
        raise ValueError(f"clamp is {clamp}; it must be above 0, or None for no clamping")
    return LossOptions(
        blank=blank % vocabulary,
        normalization=HAT if hat else LOG_PROBS if from_log_probs else LOGITS,
        rnnt_type=check_rnnt_type(rnnt_type),
        delay_penalty=check_finite("delay_penalty", delay_penalty),
        fastemit_lambda=check_finite("fastemit_lambda", fastemit_lambda),
        clamp=0.0 if clamp is None else float(clamp),
    )


def readable(validate: bool, *tensors: Tensor | None) -> bool:
    """True if values may be read: on the CPU, or because of validate. Traced tensors have none."""
    if torch.compiler.is_compiling() or any(isinstance(x, FakeTensor) for x in tensors):
        return False
    return validate or all(x is None or x.is_cpu for x in tensors)


def check_batch(
    targets: Tensor,
    logit_lengths: Tensor | None,
    target_lengths: Tensor | None,
    sizes: Sizes,
    options: LossOptions,
    validate: bool = False,
) -> Utterances:
    """Targets and lengths that fit the sizes. Lengths stay on the CPU if both are there, except in
    torch.compile."""
    check_integers("targets", targets)
    if targets.dim() != 2:
        raise ValueError(f"targets has shape {tuple(targets.shape)}; it must be (N, U)")
    if targets.device != sizes.device:
        raise ValueError(f"targets is on {targets.device} but {sizes.source} on {sizes.device}")
    if sizes.batch is None:
        sizes = sizes._replace(batch=targets.shape[0])
    if sizes.symbols is None:
        sizes = sizes._replace(symbols=targets.shape[1])
    shape = (sizes.batch, sizes.symbols)
    check_shape("targets", targets, shape, f"(N, U) by the shape of {sizes.source}")
    given = (logit_lengths, target_lengths)
    lengths, numbers = check_lengths(*given, sizes, options.rnnt_type, validate)
    if targets.shape[1] > 0 and numbers is not None and readable(validate, targets):
        check_symbols(targets, lengths[1], sizes.vocabulary, options.blank)
    if numbers is not None and lengths[0].is_cpu and lengths[1].is_cpu:
        return Utterances(as_int32(targets), *lengths, numbers)
    return Utterances(as_int32(targets), *lengths_on(sizes.device, lengths), None)


def check_lengths(
    logit_lengths: Tensor | None,
    target_lengths: Tensor | None,
    sizes: Sizes,
    rnnt_type: int,
    validate: bool,
) -> tuple[tuple[Tensor, Tensor], HostLengths | None]:
    """The lengths, those that are missing on the device, and the same as numbers where they may be
    read; sizes has a batch and symbols."""
    assert sizes.symbols is not None
    check_not_empty(sizes.source, sizes.frames, sizes.symbols)
    lengths = (
        _length("logit_lengths", logit_lengths, sizes.frames, sizes),
        _length("target_lengths", target_lengths, sizes.symbols, sizes),
    )
    numbers = _numbers(lengths, validate)
    if numbers is not None:
        _check_paths(numbers, sizes, rnnt_type)
    return lengths, numbers


def check_not_empty(source: str, frames: int | None, symbols: int) -> None:
    """ValueError for a lattice without a frame or without the column of u = 0."""
    if frames is not None and frames < 1:
        raise ValueError(f"{source} has no frames; there must be at least one")
    if symbols < 0:
        raise ValueError(f"{source} has no columns; there must be at least that of u = 0")


def known_lengths(utterances: Utterances, validate: bool) -> HostLengths | None:
    """The lengths as numbers where they may be read."""
    return utterances.host_lengths or _numbers(utterances.lengths, validate)


def _numbers(lengths: tuple[Tensor, Tensor], validate: bool) -> HostLengths | None:
    if not readable(validate, *lengths):
        return None
    return HostLengths(lengths[0].tolist(), lengths[1].tolist())


def _length(name: str, lengths: Tensor | None, full: int | None, sizes: Sizes) -> Tensor:
    assert sizes.batch is not None
    if lengths is None:
        if full is None:
            raise ValueError(f"{name} is missing; packed rows need it")
        return torch.full((sizes.batch,), full, dtype=torch.int32, device=sizes.device)
    check_integers(name, lengths)
    check_shape(name, lengths, (sizes.batch,), "(N,)")
    if lengths.device != sizes.device and lengths.device.type != "cpu":
        where = "the CPU" if sizes.device.type == "cpu" else f"{sizes.device} or the CPU"
        raise ValueError(f"{name} is on {lengths.device}; it must be on {where}")
    return lengths


def first_bad(bad_N: Tensor) -> int | None:
    """The first marked utterance, or None; synchronizes with the device."""
    return int(bad_N.int().argmax()) if bool(bad_N.any()) else None


def _check_paths(lengths: HostLengths, sizes: Sizes, rnnt_type: int) -> None:
    frames, symbols, (frames_N, symbols_N) = sizes.frames, sizes.symbols, lengths
    assert symbols is not None
    most = frames if frames is not None else torch.iinfo(torch.int32).max
    if frames_N and not 1 <= min(frames_N) <= max(frames_N) <= most:
        n = next(n for n, length in enumerate(frames_N) if not 1 <= length <= most)
        raise ValueError(
            f"logit_lengths[{n}] is {frames_N[n]}; it must be at least 1"
            + (f" and at most {frames}, the frames of {sizes.source}" if frames is not None else "")
        )
    if symbols_N and not 0 <= min(symbols_N) <= max(symbols_N) <= symbols:
        n = next(n for n, length in enumerate(symbols_N) if not 0 <= length <= symbols)
        raise ValueError(
            f"target_lengths[{n}] is {symbols_N[n]}; it must be in 0..{symbols}, the columns of "
            "targets"
        )
    if rnnt_type == REGULAR:
        return
    name = next(name for name, number in RNNT_TYPES.items() if number == rnnt_type)
    for n, (length, count) in enumerate(zip(frames_N, symbols_N, strict=True)):
        needed = count + (1 if rnnt_type == RNA else 0)
        if length < needed:
            raise ValueError(
                f"utterance {n} has no path: {count} symbols need at least {needed} frames with "
                f"rnnt_type {name!r}, but logit_lengths[{n}] is {length}"
            )


def check_symbols(targets: Tensor, target_lengths: Tensor, vocabulary: int, blank: int) -> None:
    u = torch.arange(targets.shape[1], device=targets.device)
    used = u < target_lengths.to(targets.device)[:, None]
    bad = used & ((targets < 0) | (targets >= vocabulary) | (targets == blank))
    n = first_bad(bad.any(1))
    if n is not None:
        column = int(bad[n].int().argmax())
        raise ValueError(
            f"targets[{n}, {column}] of utterance {n} is {int(targets[n, column])}; targets must "
            f"be in 0..{vocabulary - 1} and not the blank {blank}"
        )
