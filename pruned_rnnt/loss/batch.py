"""The checks of a batch of utterances: targets, lengths, and whether an utterance has a path.

Shapes, dtypes and devices are always checked, without reading data. Lengths, targets and paths are
checked on the CPU, where that needs no synchronization. On other devices such an utterance gets a
loss of +inf and a gradient of 0, unless validate=True requests the synchronization and the checks;
this also applies to all devices in torch.compile, which refuses validate=True.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import (
    check_floating,
    check_integers,
    check_last_axis,
    check_same,
    check_shape,
    check_validate,
    first_bad,
    readable,
)
from pruned_rnnt.loss.durations import check_durations_have_path
from pruned_rnnt.ops.common.library import REGULAR, RNA, RNNT_TYPES
from pruned_rnnt.ops.common.utterances import HostLengths, Utterances, as_int32, lengths_on
from pruned_rnnt.ops.lattice.recursion import Recursion


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
    batch, frames, vocabulary = am.shape
    return Sizes(batch, frames, lm.shape[1] - 1, vocabulary, am.device, "am and lm")


def check_batch(
    targets: Tensor,
    logit_lengths: Tensor | None,
    target_lengths: Tensor | None,
    sizes: Sizes,
    recursion: Recursion,
    validate: bool = False,
) -> Utterances:
    """Targets and lengths that fit the sizes and the recursion. Lengths stay on the CPU if both are
    there, except in torch.compile."""
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
    options, both_lengths = recursion.loss, (logit_lengths, target_lengths)
    lengths, numbers = check_lengths(*both_lengths, sizes, options.rnnt_type, validate)
    if numbers is not None and recursion.tdt is not None and not recursion.blanks:
        check_durations_have_path(numbers, recursion.tdt.durations)
    blanks = recursion.blanks or (options.blank,)
    if targets.shape[1] > 0 and numbers is not None and readable(validate, targets):
        for blank in blanks:
            check_symbols(targets, lengths[1], sizes.vocabulary, blank)
    targets = as_int32(targets)
    for blank in blanks[1:]:
        # Where that is not checked, a target that is the blank has no path.
        targets = targets.masked_fill(targets == blank, options.blank)
    if numbers is not None and lengths[0].is_cpu and lengths[1].is_cpu:
        return Utterances(targets, *lengths, numbers)
    return Utterances(targets, *lengths_on(sizes.device, lengths), None)


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
    check_validate(validate)
    _check_not_empty(sizes.source, sizes.frames, sizes.symbols)
    lengths = (
        _length("logit_lengths", logit_lengths, sizes.frames, sizes),
        _length("target_lengths", target_lengths, sizes.symbols, sizes),
    )
    numbers = _numbers(lengths, validate)
    if numbers is not None:
        _check_paths(numbers, sizes, rnnt_type)
    return lengths, numbers


def _check_not_empty(source: str, frames: int | None, symbols: int) -> None:
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
