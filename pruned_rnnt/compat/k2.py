"""k2's transducer losses (also those of fast_rnnt) under their own names and argument order.

`from pruned_rnnt.compat import k2` runs a recipe's loss code unchanged:

    simple_loss, (px_grad, py_grad) = k2.rnnt_loss_smoothed(lm=lm, am=am, ..., return_grad=True)
    ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, s_range=5)
    am_pruned, lm_pruned = k2.do_rnnt_pruning(am=am, lm=lm, ranges=ranges)
    pruned_loss = k2.rnnt_loss_pruned(logits, symbols, ranges, blank, boundary)

Kept from k2: `delay_penalty` acts only when positive; bounds are searched up to the padded S; the
am smoothing averages over padding. Better than k2: the normaliser is right at any range of the
scores, empty references are legal, and the simple and pruned losses never build their
(B, S, T)-shaped log-probabilities where the boundary begins at [0, 0] (a boundary on the GPU is
looked at once a call, as k2 does).

Axes: B batch, S symbols, T frames, C vocabulary, R kept columns.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from pruned_rnnt import loss as losses
from pruned_rnnt.compat.k2_log_probs import (
    get_rnnt_logprobs,
    get_rnnt_logprobs_joint,
    get_rnnt_logprobs_pruned,
    get_rnnt_logprobs_smoothed,
)
from pruned_rnnt.compat.k2_recursion import (
    joint_mutual_information_recursion,
    mutual_information_recursion,
)
from pruned_rnnt.ops._library import MODIFIED, REGULAR
from pruned_rnnt.ops.prune_bounds import prune_bounds

__all__ = [
    "do_rnnt_pruning",
    "get_rnnt_logprobs",
    "get_rnnt_logprobs_joint",
    "get_rnnt_logprobs_pruned",
    "get_rnnt_logprobs_smoothed",
    "get_rnnt_prune_ranges",
    "joint_mutual_information_recursion",
    "mutual_information_recursion",
    "rnnt_loss",
    "rnnt_loss_pruned",
    "rnnt_loss_simple",
    "rnnt_loss_smoothed",
]

_LossAndGrads = tuple[Tensor, tuple[Tensor, Tensor]]
_REDUCTIONS = ("none", "mean", "sum")


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
) -> Tensor | _LossAndGrads:
    """Loss of the trivial joiner am + lm.

    Args:
        lm: (B, S + 1, C) and am: (B, T, C), unnormalised.
        symbols: (B, S) integers.
        termination_symbol: the blank.
        boundary: (B, 4) integers [s_begin, t_begin, s_end, t_end]; default [0, 0, S, T].
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
    return rnnt_loss_smoothed(
        lm,
        am,
        symbols,
        termination_symbol,
        lm_only_scale=0.0,
        am_only_scale=0.0,
        boundary=boundary,
        rnnt_type=rnnt_type,
        delay_penalty=delay_penalty,
        reduction=reduction,
        return_grad=return_grad,
    )


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
) -> Tensor | _LossAndGrads:
    """Loss of the trivial joiner mixed with those of lm alone and of am alone.

    Args, Returns and Raises: as `rnnt_loss_simple`, and
        lm_only_scale, am_only_scale: the weights of the two parts.
    """
    _check_reduction(reduction)
    # The native loss averages the am part over real positions; k2 over all of them.
    if am_only_scale != 0.0 or not _begins_at_zero(boundary):
        px, py = get_rnnt_logprobs_smoothed(
            lm,
            am,
            symbols,
            termination_symbol,
            lm_only_scale,
            am_only_scale,
            boundary,
            rnnt_type,
        )
        return _loss_of_rows(px, py, boundary, delay_penalty, reduction, return_grad)
    logit_lengths, target_lengths = _lengths(boundary, am, symbols)
    loss, occupancy = losses.rnnt_loss_simple(
        am,
        lm,
        symbols,
        logit_lengths,
        target_lengths,
        blank=termination_symbol,
        lm_only_scale=lm_only_scale,
        rnnt_type=rnnt_type,
        delay_penalty=max(delay_penalty, 0.0),
        reduction=reduction,
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
) -> Tensor | _LossAndGrads:
    """Loss of a joiner's logits over the whole lattice.

    Args, Returns and Raises: as `rnnt_loss_simple`, and
        logits: (B, T, S + 1, C), unnormalised.
        use_hat_loss: the blank is a Bernoulli variable, the symbols share the rest.
    """
    _check_reduction(reduction)
    if return_grad or not _begins_at_zero(boundary):
        px, py = get_rnnt_logprobs_joint(
            logits, symbols, termination_symbol, boundary, rnnt_type, use_hat_loss
        )
        return _loss_of_rows(px, py, boundary, delay_penalty, reduction, return_grad)
    logit_lengths, target_lengths = _lengths(boundary, logits, symbols)
    return losses.rnnt_loss(
        logits,
        symbols,
        logit_lengths,
        target_lengths,
        blank=termination_symbol,
        rnnt_type=rnnt_type,
        delay_penalty=max(delay_penalty, 0.0),
        hat=use_hat_loss,
        reduction=reduction,
    )


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
) -> Tensor | _LossAndGrads:
    """Loss of a joiner's logits over the kept columns of each frame.

    Args, Returns and Raises: as `rnnt_loss_simple`, and
        logits: (B, T, R, C), unnormalised.
        ranges: (B, T, R) integers from `get_rnnt_prune_ranges`.
        use_hat_loss: the blank is a Bernoulli variable, the symbols share the rest.
    """
    _check_reduction(reduction)
    columns = symbols.shape[1] + 1
    if return_grad or not _begins_at_zero(boundary):
        px, py = get_rnnt_logprobs_pruned(
            logits, symbols, ranges, termination_symbol, boundary, rnnt_type, use_hat_loss
        )
        return _loss_of_rows(px, py, boundary, delay_penalty, reduction, return_grad)
    if ranges.shape[2] == columns:
        # Nothing is cut; this also holds for references that are all empty, R = 1.
        return rnnt_loss(
            logits,
            symbols,
            termination_symbol,
            boundary,
            rnnt_type,
            delay_penalty,
            reduction,
            use_hat_loss,
        )
    logit_lengths, target_lengths = _lengths(boundary, logits, symbols)
    return losses.rnnt_loss_pruned(
        logits,
        symbols,
        _bounds(ranges),
        logit_lengths,
        target_lengths,
        blank=termination_symbol,
        rnnt_type=rnnt_type,
        delay_penalty=max(delay_penalty, 0.0),
        hat=use_hat_loss,
        reduction=reduction,
    )


def get_rnnt_prune_ranges(
    px_grad: Tensor, py_grad: Tensor, boundary: Tensor, s_range: int
) -> Tensor:
    """The columns to keep in each frame, from occupation probabilities.

    s_range is raised to what the longest reference of the batch needs per frame ('regular'), with
    a warning the first time, and lowered to S + 1.

    Args:
        px_grad: (B, S, T + 1) or (B, S, T), py_grad: (B, S + 1, T), from return_grad.
        boundary: (B, 4) integers [s_begin, t_begin, s_end, t_end].
        s_range: columns to keep.

    Returns:
        (B, T, s_range) int64; ranges[b, t] counts up from the first kept column.

    Raises:
        ValueError: shapes that do not fit, or s_range below 2 ('regular') or 1.
    """
    batch, symbol_count, last = px_grad.shape
    frame_count = py_grad.shape[2]
    if py_grad.shape != (batch, symbol_count + 1, frame_count) or last - frame_count not in (0, 1):
        raise ValueError(
            f"px_grad has shape {tuple(px_grad.shape)} and py_grad {tuple(py_grad.shape)}; they "
            "must be (B, S, T + 1) or (B, S, T), and (B, S + 1, T)"
        )
    if boundary.shape != (batch, 4):
        raise ValueError(
            f"boundary has shape {tuple(boundary.shape)}; it must be (B, 4) = {(batch, 4)}"
        )
    is_regular = last == frame_count + 1
    smallest = 2 if is_regular else 1
    if is_regular:
        needed = _needed_s_range(boundary)
        if s_range < needed:
            _warn_of_small_s_range(s_range)
            s_range = needed
    if s_range < smallest:
        raise ValueError(
            f"s_range is {s_range}; it must be at least {smallest}, or no path is left"
        )
    s_range = min(s_range, symbol_count + 1)
    steps = torch.arange(s_range, device=px_grad.device)
    if s_range == symbol_count + 1:
        return steps.expand(batch, frame_count, s_range).contiguous()
    start = torch.empty(batch, frame_count, dtype=torch.int32, device=px_grad.device)
    prune_bounds(
        torch.nn.functional.pad(px_grad[:, :, :frame_count].transpose(1, 2), (0, 1)).contiguous(),
        py_grad.transpose(1, 2).contiguous(),
        boundary[:, 3].to(torch.int32).contiguous(),
        boundary[:, 2].to(torch.int32).contiguous(),
        s_range,
        REGULAR if is_regular else MODIFIED,
        True,  # k2 searches up to the padded S
        start,
    )
    return start.long().unsqueeze(2) + steps


def do_rnnt_pruning(am: Tensor, lm: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """The joiner's inputs at the kept columns.

    Args:
        am: (B, T, C) and lm: (B, S + 1, C).
        ranges: (B, T, R) integers from `get_rnnt_prune_ranges`.

    Returns:
        am and lm, each (B, T, R, C); am is a view.

    Raises:
        ValueError: what `pruned_rnnt.prune` refuses.
    """
    am_pruned, lm_pruned = losses.prune(am, lm, _bounds(ranges))
    return am_pruned, lm_pruned


def _loss_of_rows(
    px: Tensor,
    py: Tensor,
    boundary: Tensor | None,
    delay_penalty: float,
    reduction: str,
    return_grad: bool,
) -> Tensor | _LossAndGrads:
    """The loss from log-probabilities in k2's layout."""
    if delay_penalty > 0.0:
        frame_count = py.shape[2]
        last = frame_count - 1 if boundary is None else boundary[:, 3, None, None].to(px) - 1
        time = torch.arange(px.shape[2], dtype=px.dtype, device=px.device)
        px = px + delay_penalty * (last / 2 - time)
    scores, grads = mutual_information_recursion(px, py, boundary, return_grad=True)
    loss = _reduce(-scores, reduction)
    return (loss, grads) if return_grad else loss


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction should be ('none' | 'mean' | 'sum'), given {reduction}")


def _begins_at_zero(boundary: Tensor | None) -> bool:
    return boundary is None or not bool((boundary[:, :2] != 0).any())


def _lengths(boundary: Tensor | None, am: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor]:
    """logit_lengths and target_lengths (B,) int32; am is anything (B, T, ...)."""
    if boundary is not None:
        ends = boundary[:, 2:].to(torch.int32)
        return ends[:, 1].contiguous(), ends[:, 0].contiguous()
    batch = am.shape[0]
    frames = torch.full((batch,), am.shape[1], dtype=torch.int32, device=am.device)
    return frames, torch.full_like(frames, symbols.shape[1])


def _bounds(ranges: Tensor) -> losses.Bounds:
    return losses.Bounds(ranges[:, :, 0].to(torch.int32), ranges.shape[2])


def _needed_s_range(boundary: Tensor) -> int:
    """Columns a frame that let the longest reference of the batch pass: max ceil(S_n / T_n) + 1."""
    symbols, frames = boundary[:, 2], boundary[:, 3]
    return int(((symbols + frames - 1) // frames).max().clamp_min(1)) + 1


@functools.cache
def _warn_of_small_s_range(s_range: int) -> None:
    """Cached: it warns once, not once a batch."""
    warnings.warn(
        f"s_range={s_range} cannot reach the last symbol of every reference of this batch; "
        "such batches use the smallest s_range that can",
        stacklevel=3,
    )
