"""The losses of k2 and fast_rnnt: simple, smoothed, full and pruned.

A batch runs on the native losses if its boundaries begin at [0, 0] and have frames, and no target
is the blank. Others are computed from their log-probabilities by the recursion, as k2 computes all
of them. The test for this reads symbols and boundary in each call, which synchronizes with a GPU.

Axes: B batch, S symbols, T frames, C vocabulary, R kept columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.k2_arguments import (
    check_ranges,
    check_symbols_and_boundary,
    column_of,
    in_names_of_k2,
)
from pruned_rnnt.compat.k2_log_probs import (
    RNNT_TYPES,
    get_rnnt_logprobs_joint,
    get_rnnt_logprobs_pruned,
    get_rnnt_logprobs_smoothed,
)
from pruned_rnnt.compat.k2_pruning import bounds_of_ranges
from pruned_rnnt.compat.k2_recursion import mutual_information_recursion
from pruned_rnnt.loss.checks import (
    REDUCTIONS,
    check_finite,
    check_flag,
    check_floating,
    check_one_of,
    check_tensor,
    first_bad,
    readable,
)
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.ops.common.utterances import as_int32

LossAndGrads = tuple[Tensor, tuple[Tensor, Tensor]]


class _Options(NamedTuple):
    """The last arguments of all four losses."""

    boundary: Tensor | None
    rnnt_type: str
    delay_penalty: float
    reduction: str
    return_grad: bool

    def check(self) -> None:
        check_one_of("rnnt_type", self.rnnt_type, RNNT_TYPES)
        check_one_of("reduction", self.reduction, REDUCTIONS)
        check_finite("delay_penalty", self.delay_penalty)
        check_flag("return_grad", self.return_grad)

    def native(self, blank: int) -> dict[str, Any]:
        """The arguments of the native losses by name."""
        return {
            "blank": blank,
            "rnnt_type": self.rnnt_type,
            "delay_penalty": max(self.delay_penalty, 0.0),
            "reduction": self.reduction,
        }


def rnnt_loss_simple(
    lm: Tensor,
    am: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    reduction: str = "mean",
    return_grad: bool = False,
) -> Tensor | LossAndGrads:
    """Loss of the trivial joiner am + lm.

    Args:
        lm: (B, S + 1, C) and am: (B, T, C), unnormalised.
        symbols: (B, S) integers.
        termination_symbol: the blank.
        boundary: (B, 4) integers [s_begin, t_begin, s_end, t_end]; default [0, 0, S, T]. A box
            without frames and symbols scores 0, one with symbols alone -inf.
        rnnt_type: 'regular', 'modified' or 'constrained'.
        delay_penalty: favours early symbols if positive.
        reduction: 'none', 'mean' (over utterances) or 'sum'.
        return_grad: also return the occupation probabilities, which carry no gradient.

    Returns:
        The loss; with return_grad (loss, (px_grad, py_grad)) with px_grad (B, S, T + 1), or
        (B, S, T) for types other than 'regular', and py_grad (B, S + 1, T).

    Raises:
        ValueError: shapes that do not fit, an unknown rnnt_type or reduction.
    """
    options = _Options(boundary, rnnt_type, delay_penalty, reduction, return_grad)
    return rnnt_loss_smoothed(lm, am, symbols, termination_symbol, 0.0, 0.0, *options)


@in_names_of_k2
def rnnt_loss_smoothed(
    lm: Tensor,
    am: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    lm_only_scale: float = 0.1,
    am_only_scale: float = 0.1,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    reduction: str = "mean",
    return_grad: bool = False,
) -> Tensor | LossAndGrads:
    """Loss of the trivial joiner mixed with those of lm alone and of am alone.

    Args, Returns and Raises: as `rnnt_loss_simple`, and
        lm_only_scale, am_only_scale: the weights of the two parts.
    """
    options = _Options(boundary, rnnt_type, delay_penalty, reduction, return_grad)
    options.check()
    # The native loss averages the am part over real positions; k2 over all of them.
    check_tensor("am", am)
    column = column_of(termination_symbol, am)
    if am_only_scale != 0.0 or not _is_native(symbols, column, boundary):
        scales = (lm_only_scale, am_only_scale)
        scores = get_rnnt_logprobs_smoothed(
            lm, am, symbols, termination_symbol, *scales, boundary, rnnt_type
        )
        return _loss_of_log_probs(*scores, options)
    lengths = _lengths(boundary, am, symbols)
    native = options.native(column)
    loss, occupancy = pruned_rnnt.rnnt_loss_simple(
        am, lm, symbols, *lengths, lm_only_scale=lm_only_scale, **native
    )
    if not return_grad:
        return loss
    px_grad = occupancy.emit[:, :, :-1].detach().transpose(1, 2)
    py_grad = occupancy.blank.detach().transpose(1, 2)
    if rnnt_type == "regular":
        px_grad = torch.nn.functional.pad(px_grad, (0, 1))
    elif rnnt_type == "constrained":
        # k2 counts the blank that follows a symbol with the symbol.
        py_grad = py_grad - torch.nn.functional.pad(px_grad, (0, 0, 1, 0))
    return loss, (px_grad.contiguous(), py_grad.contiguous())


def rnnt_loss(
    logits: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    reduction: str = "mean",
    use_hat_loss: bool = False,
    return_grad: bool = False,
) -> Tensor | LossAndGrads:
    """Loss of a joiner's logits over the whole lattice.

    Args, Returns and Raises: as `rnnt_loss_simple`, and
        logits: (B, T, S + 1, C), unnormalised.
        use_hat_loss: the blank is a Bernoulli variable, the symbols share the rest.
    """
    options = _Options(boundary, rnnt_type, delay_penalty, reduction, return_grad)
    return _loss_of_logits(logits, symbols, None, termination_symbol, use_hat_loss, options)


def rnnt_loss_pruned(
    logits: Tensor,
    symbols: Tensor,
    ranges: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    reduction: str = "mean",
    use_hat_loss: bool = False,
    return_grad: bool = False,
) -> Tensor | LossAndGrads:
    """Loss of a joiner's logits over the kept columns of each frame.

    Args, Returns and Raises: as `rnnt_loss_simple`, and
        logits: (B, T, R, C), unnormalised.
        ranges: (B, T, R) integers from `get_rnnt_prune_ranges`.
        use_hat_loss: the blank is a Bernoulli variable, the symbols share the rest.
    """
    check_tensor("ranges", ranges)
    options = _Options(boundary, rnnt_type, delay_penalty, reduction, return_grad)
    return _loss_of_logits(logits, symbols, ranges, termination_symbol, use_hat_loss, options)


@in_names_of_k2
def _loss_of_logits(
    logits: Tensor, symbols: Tensor, ranges: Tensor | None, blank: int, hat: bool, options: _Options
) -> Tensor | LossAndGrads:
    """The loss over the whole lattice (ranges None), or over the kept columns."""
    options.check()
    boundary, rnnt_type, *_, return_grad = options
    check_floating("logits", logits, "(B, T, S + 1, C)", 4)
    check_symbols_and_boundary(symbols, boundary)
    if ranges is not None:
        check_ranges(ranges, logits, symbols)
    if ranges is not None and not return_grad and ranges.shape[2] == symbols.shape[1] + 1:
        # Nothing is cut; this also holds if all references are empty (R = 1).
        ranges = None
    # The native loss refuses one column where a symbol needs two ('constrained'); k2's is inf.
    by_log_probs = return_grad or (ranges is not None and ranges.shape[2] == 1)
    column = column_of(blank, logits)
    if by_log_probs or not _is_native(symbols, column, boundary):
        if ranges is None:
            scores = get_rnnt_logprobs_joint(logits, symbols, blank, rnnt_type, boundary, hat)
        else:
            scores = get_rnnt_logprobs_pruned(
                logits, symbols, ranges, blank, boundary, rnnt_type, hat
            )
        return _loss_of_log_probs(*scores, options)
    lengths = _lengths(boundary, logits, symbols)
    native = options.native(column)
    if ranges is None:
        return pruned_rnnt.rnnt_loss(logits, symbols, *lengths, hat=hat, **native)
    bounds = bounds_of_ranges(ranges)
    return pruned_rnnt.rnnt_loss_pruned(logits, symbols, bounds, *lengths, hat=hat, **native)


def _loss_of_log_probs(px: Tensor, py: Tensor, options: _Options) -> Tensor | LossAndGrads:
    """The loss from log-probabilities in k2's layout."""
    boundary, rnnt_type, delay_penalty, reduction, return_grad = options
    if rnnt_type != "regular":
        _check_frames(px, py, boundary, rnnt_type)
    if delay_penalty > 0.0:
        frame_count = py.shape[2]
        last = frame_count - 1 if boundary is None else boundary[:, 3, None, None].to(px) - 1
        time = torch.arange(px.shape[2], dtype=px.dtype, device=px.device)
        px = px + delay_penalty * (last / 2 - time)
    scores, grads = mutual_information_recursion(px, py, boundary, return_grad=True)
    loss = reduced(-scores, reduction)
    return (loss, grads) if return_grad else loss


def _check_frames(px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: str) -> None:
    """ValueError for more symbols than frames, where values may be read, as by the native losses.
    A box without frames has no native loss; its symbols score -inf."""
    if not readable(False, px, boundary):
        return
    if boundary is None:
        box = (0, 0, px.shape[1], py.shape[2])
        boundary = torch.tensor(box, device=px.device).expand(px.shape[0], 4)
    symbols, frames = (boundary[:, 2:] - boundary[:, :2]).unbind(1)
    n = first_bad((symbols > frames) & (frames > 0))
    if n is not None:
        raise ValueError(
            f"utterance {n} has no path: {int(symbols[n])} symbols need at least as many frames "
            f"with rnnt_type {rnnt_type!r}, but it has {int(frames[n])}"
        )


def _is_native(symbols: Tensor, blank: int, boundary: Tensor | None) -> bool:
    """True if the native losses take this batch, or refuse it with a message of their own."""
    check_symbols_and_boundary(symbols, boundary)
    is_blank = symbols == blank
    if boundary is None:
        return not bool(is_blank.any())
    boundary = boundary.to(symbols.device)
    inside = torch.arange(symbols.shape[1], device=symbols.device) < boundary[:, 2, None]
    other = (is_blank & inside).any() | (boundary[:, :2] != 0).any() | (boundary[:, 3] == 0).any()
    return not bool(other)


def _lengths(boundary: Tensor | None, am: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor]:
    """logit_lengths and target_lengths (B,) int32; am is anything (B, T, ...)."""
    if boundary is not None:
        return as_int32(boundary[:, 3]), as_int32(boundary[:, 2])
    batch = am.shape[0]
    frames = torch.full((batch,), am.shape[1], dtype=torch.int32, device=am.device)
    return frames, torch.full_like(frames, symbols.shape[1])
