"""The recursions of models whose arcs have durations, TDT and multi-blank, from a caller's
arguments; and whether the durations of an utterance can add up to its frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import (
    check_finite,
    check_floating,
    check_integer,
    check_same,
    check_shape,
    in_one_precision,
)
from pruned_rnnt.ops.common.utterances import HostLengths
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion
from pruned_rnnt.ops.lattice.tdt_lattice import MOST_DURATIONS, TdtOptions

LONGEST_DURATION = 1024  # in frames
_CPU = torch.device("cpu")


def check_durations(durations: Sequence[int]) -> list[int]:
    """Different integers from 0 on, one above 0, at most MOST_DURATIONS."""
    try:
        found = [check_integer("durations", x) for x in durations]
    except TypeError:
        found = []
    if not any(found) or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(
            f"durations is {durations}; it must be different integers from 0 on, one of them above "
            "0, for example (0, 1, 2, 3, 4)"
        )
    if len(found) > MOST_DURATIONS:
        raise ValueError(
            f"durations has {len(found)} elements; it can have {MOST_DURATIONS} at most"
        )
    _check_longest("durations", max(found))
    return found


def check_band_durations(durations: Sequence[int]) -> list[int]:
    """Durations of a pruned lattice, 1 among them."""
    found = check_durations(durations)
    if 1 not in found:
        raise ValueError(
            f"durations is {durations}; 1 must be among them, because the band of a pruned lattice "
            "need not have a path otherwise: add 1, or use the full loss rnnt_loss_tdt"
        )
    return found


def _check_longest(name: str, duration: int) -> None:
    """The recursion keeps as many frames."""
    if duration > LONGEST_DURATION:
        raise ValueError(
            f"{name} has a duration of {duration} frames; it can be {LONGEST_DURATION} at most"
        )


def tdt_recursion(
    loss: LossOptions,
    durations: Sequence[int],
    sigma: float = 0.0,
    omega: float = 0.0,
    device: torch.device = _CPU,
) -> Recursion:
    """The recursion of one call with logits on the device, for which omega has been drawn."""
    found, sigma = check_durations(durations), check_finite("sigma", sigma)
    is_rnnt = check_omega(omega) > 0 and draws_rnnt(omega, device)
    return Recursion(loss, TdtOptions(found, sigma, loss.delay_penalty), is_rnnt)


def multi_blank_recursion(
    loss: LossOptions, big_blanks: Mapping[int, int], sigma: float, vocabulary: int
) -> Recursion:
    """big_blanks: the frames by which each further blank advances, by its column."""
    found = _check_big_blanks(big_blanks, loss.blank, vocabulary)
    durations = [0, 1, *found.values()]
    tdt = TdtOptions(durations, check_finite("sigma", sigma), loss.delay_penalty, True)
    return Recursion(loss, tdt, blanks=(loss.blank, *found))


def _check_big_blanks(big_blanks: Mapping[int, int], blank: int, vocabulary: int) -> dict[int, int]:
    if not isinstance(big_blanks, Mapping):
        raise TypeError(
            f"big_blanks is a {type(big_blanks).__name__}; it must be a mapping of columns to "
            "durations, for example {1: 2, 2: 4}"
        )
    found = {
        check_integer("a column of big_blanks", column): check_integer(
            f"big_blanks[{column}]", duration
        )
        for column, duration in big_blanks.items()
    }
    for column, duration in found.items():
        if not 0 <= column < vocabulary or column == blank:
            raise ValueError(
                f"big_blanks has the column {column}; it must be in 0..{vocabulary - 1} and not "
                f"that of blank, {blank}"
            )
        if duration < 2:
            raise ValueError(
                f"big_blanks[{column}] is {duration}; a big blank advances 2 frames or more"
            )
        _check_longest(f"big_blanks[{column}]", duration)
    if len(set(found.values())) < len(found):
        raise ValueError(f"big_blanks is {big_blanks}; each blank needs a duration of its own")
    most = MOST_DURATIONS - 2
    if len(found) > most:
        raise ValueError(f"big_blanks has {len(found)} elements; it can have {most} at most")
    return found


def check_omega(omega: float) -> float:
    if not 0 <= check_finite("omega", omega) <= 1:
        raise ValueError(f"omega is {omega}; it must be a probability, in 0..1")
    return float(omega)


def draws_rnnt(omega: float, device: torch.device) -> bool:
    """Whether this call uses the RNN-T loss; by torch's generator on the CPU."""
    is_recorded = torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )
    if is_recorded:
        raise ValueError(
            f"omega is {omega}, but torch.export, torch.compile(fullgraph=True) and CUDA graphs "
            "would repeat one random choice; use omega=0 there"
        )
    return bool(torch.rand((), device="cpu") < omega)


def check_durations_have_path(lengths: HostLengths, durations: list[int]) -> None:
    """ValueError for an utterance whose durations cannot add up to its frames."""
    for n, (frames, symbols) in enumerate(zip(*lengths, strict=True)):
        if not _has_path(frames, symbols, durations):
            raise ValueError(
                f"utterance {n} has no path: the durations {durations} of {symbols} symbols and at "
                f"least one blank cannot add up to its {frames} frames"
            )


def _has_path(frames: int, symbols: int, durations: list[int]) -> bool:
    if 1 in durations:
        # Blanks of duration 1 take the frames that the shortest symbols leave, at least one.
        return frames > symbols * min(durations)
    # Bit t of reached: some arcs arrive at frame t.
    reached, inside = 1, (1 << (frames + 1)) - 1
    for _ in range(symbols):
        reached = _moved(reached, durations) & inside
    steps = [x for x in durations if x > 0]
    reached = _moved(reached, steps) & inside
    while True:
        further = (reached | _moved(reached, steps)) & inside
        if further == reached:
            return bool(reached >> frames)
        reached = further


def _moved(reached: int, durations: list[int]) -> int:
    result = 0
    for duration in durations:
        result |= reached << duration
    return result


def check_duration_logits(
    duration_logits: Tensor, logits: Tensor, durations: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """logits, and duration_logits of their shape with K instead of V as contiguous rows (R,K); both
    in one precision."""
    shape = (*logits.shape[:-1], len(durations))
    check_floating("duration_logits", duration_logits, "that of logits", len(shape))
    meaning = "that of logits with one column for each of durations"
    check_shape("duration_logits", duration_logits, shape, meaning)
    check_same("duration_logits", duration_logits, "logits", logits)
    logits, duration_logits = in_one_precision(logits, duration_logits)
    return logits, duration_logits.contiguous().view(-1, len(durations))
