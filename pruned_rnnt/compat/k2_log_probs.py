"""k2's `get_rnnt_logprobs*`: log-probabilities of symbols and blanks in k2's layout.

All are differentiable in their logits by torch's own autograd. The losses of k2_losses.py use them
only for batches that the native losses do not take, and for return_grad.

Axes: B batch, S symbols, T frames, C vocabulary, R the kept columns of a pruned lattice. px is
(B, S, T + 1) for 'regular' with -inf at the frame after the last, (B, S, T) otherwise; py is
(B, S + 1, T). Both are float64 for float64 scores, else float32. For 'constrained' px includes the
blank that follows the symbol.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.compat.k2_arguments import (
    check_ends,
    check_ranges,
    check_symbols_and_boundary,
    checked_symbols,
)
from pruned_rnnt.loss.batch import check_am_lm
from pruned_rnnt.loss.checks import (
    check_flag,
    check_floating,
    check_last_axis,
    check_one_of,
)
from pruned_rnnt.loss.simple import check_smoothing
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.simple.simple_log_probs import safe_product

RNNT_TYPES = ("regular", "modified", "constrained")


def get_rnnt_logprobs(
    lm: Tensor,
    am: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    rnnt_type: str = "regular",
    boundary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """px, py of the trivial joiner am + lm.

    Args:
        lm: (B, S + 1, C) and am: (B, T, C), unnormalised.
        symbols: (B, S) integers.
        termination_symbol: the blank.
        rnnt_type: 'regular', 'modified' or 'constrained'.
        boundary: (B, 4) rows [s_begin, t_begin, s_end, t_end]; only t_end is used here.

    Returns:
        px, py. Unlike k2's, the normaliser has no floor, so that peaks of am and lm may be any
        distance apart; its float32 rounding is that of `pruned_rnnt.rnnt_loss_simple`.

    Raises:
        ValueError: shapes that do not fit, or an unknown rnnt_type.
    """
    return get_rnnt_logprobs_smoothed(
        lm, am, symbols, termination_symbol, 0.0, 0.0, boundary, rnnt_type
    )


def get_rnnt_logprobs_smoothed(
    lm: Tensor,
    am: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    lm_only_scale: float = 0.1,
    am_only_scale: float = 0.1,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
) -> tuple[Tensor, Tensor]:
    """px, py of the trivial joiner mixed with those of lm alone and of am alone.

    The am part is weighted by the mean of softmax(lm) over all (b, s), padding included: that is
    k2's convention. `pruned_rnnt.rnnt_loss_simple` averages over the real positions only.

    Args, Returns and Raises: as `get_rnnt_logprobs`, and
        lm_only_scale, am_only_scale: the weights of the two parts.
    """
    check_am_lm(am, lm, "C")
    lm_only_scale, am_only_scale = check_smoothing(lm_only_scale, am_only_scale)
    dtype = accumulator(torch.promote_types(lm.dtype, am.dtype))
    lm, am = lm.to(dtype), am.to(dtype)
    shape = (lm.shape[0], lm.shape[1] - 1)
    checked = checked_symbols(symbols, termination_symbol, boundary, shape, lm)
    symbols = checked.columns
    combined = 1.0 - lm_only_scale - am_only_scale
    log_z = _log_normaliser(lm, am)
    px = _symbol_scores(lm, symbols) + _symbol_scores_of_frames(am, symbols) - log_z[:, :-1]
    py = _blank_scores(lm, am, termination_symbol) - log_z
    px, py = combined * px, combined * py
    if lm_only_scale != 0.0:
        lm_alone = lm.log_softmax(dim=2)
        px = px + lm_only_scale * _symbol_scores(lm_alone, symbols)
        py = py + lm_only_scale * lm_alone[:, :, termination_symbol, None]
    if am_only_scale != 0.0:
        tiny = torch.finfo(lm.dtype).tiny
        unigram = (lm.softmax(dim=2).mean(dim=(0, 1)) + tiny).log()
        am_alone = (am + unigram).log_softmax(dim=2)
        px = px + am_only_scale * _symbol_scores_of_frames(am_alone, symbols)
        py = py + am_only_scale * am_alone[:, None, :, termination_symbol]
    return _finish(checked.without_others(px), py, boundary, rnnt_type)


def get_rnnt_logprobs_joint(
    logits: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    rnnt_type: str = "regular",
    boundary: Tensor | None = None,
    use_hat_loss: bool = False,
) -> tuple[Tensor, Tensor]:
    """px, py of a joiner's logits.

    Args:
        logits: (B, T, S + 1, C), unnormalised.
        symbols, termination_symbol, rnnt_type, boundary: as in `get_rnnt_logprobs`.
        use_hat_loss: the blank is a Bernoulli variable, the symbols share the rest.

    Returns:
        px, py.

    Raises:
        ValueError: shapes that do not fit, or an unknown rnnt_type.
    """
    check_floating("logits", logits, "(B, T, S + 1, C)", 4)
    check_last_axis("logits", logits)
    batch, frame_count, columns = logits.shape[:3]
    shape = (batch, columns - 1)
    checked = checked_symbols(symbols, termination_symbol, boundary, shape, logits)
    rows = checked.columns[:, None, :].expand(batch, frame_count, columns - 1)
    logits = logits.to(accumulator(logits.dtype))
    emit, blank = _emit_and_blank(logits, rows, termination_symbol, use_hat_loss)
    return _finish(
        checked.without_others(emit.transpose(1, 2)), blank.transpose(1, 2), boundary, rnnt_type
    )


def get_rnnt_logprobs_pruned(
    logits: Tensor,
    symbols: Tensor,
    ranges: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    use_hat_loss: bool = False,
) -> tuple[Tensor, Tensor]:
    """px, py of a pruned joiner's logits, -inf outside the kept columns.

    Args:
        logits: (B, T, R, C), unnormalised.
        symbols: (B, S) integers.
        ranges: (B, T, R) integers from `get_rnnt_prune_ranges`.
        termination_symbol, boundary, rnnt_type, use_hat_loss: as in `get_rnnt_logprobs_joint`.

    Returns:
        px, py of the whole lattice.

    Raises:
        ValueError: shapes that do not fit, or an unknown rnnt_type.
    """
    check_floating("logits", logits, "(B, T, s_range, C)", 4)
    check_last_axis("logits", logits)
    check_symbols_and_boundary(symbols, boundary)
    batch, frame_count = logits.shape[:2]
    check_ranges(ranges, logits, symbols)
    shape = (batch, symbols.shape[-1])
    checked = checked_symbols(symbols, termination_symbol, boundary, shape, logits)
    columns = shape[1] + 1
    # Where values are not read, columns outside of the lattice become one behind it, which is cut
    # off below, as the px of column S, which has no symbol.
    ranges = torch.where((ranges >= 0) & (ranges < columns), ranges.long(), columns)
    padded = torch.nn.functional.pad(checked.columns, (0, 2))
    rows = padded[:, None, :].expand(batch, frame_count, columns + 1).gather(2, ranges)
    logits = logits.to(accumulator(logits.dtype))
    emit, blank = _emit_and_blank(logits, rows, termination_symbol, use_hat_loss)
    outside = logits.new_full((batch, frame_count, columns + 1), -torch.inf)
    px = outside.scatter(2, ranges, emit)[:, :, : shape[1]]
    py = outside.scatter(2, ranges, blank)[:, :, :columns]
    return _finish(
        checked.without_others(px.transpose(1, 2)), py.transpose(1, 2), boundary, rnnt_type
    )


def get_hat_logprobs_pruned(
    logits: Tensor,
    symbols: Tensor,
    ranges: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
) -> tuple[Tensor, Tensor]:
    """`get_rnnt_logprobs_pruned` with use_hat_loss=True."""
    return get_rnnt_logprobs_pruned(
        logits, symbols, ranges, termination_symbol, boundary, rnnt_type, use_hat_loss=True
    )


def _finish(
    px_BST: Tensor, py_BST: Tensor, boundary: Tensor | None, rnnt_type: str
) -> tuple[Tensor, Tensor]:
    """px with the shape and the impossible arcs of its rnnt_type, and py."""
    check_one_of("rnnt_type", rnnt_type, RNNT_TYPES)
    if boundary is not None:
        check_ends(boundary, px_BST.shape[1], px_BST.shape[2])
    if rnnt_type == "modified":
        return px_BST.contiguous(), py_BST.contiguous()
    if rnnt_type == "constrained":
        return (px_BST + py_BST[:, 1:]).contiguous(), py_BST.contiguous()
    px = torch.nn.functional.pad(px_BST, (0, 1), value=-torch.inf)
    if boundary is not None:
        time = torch.arange(px.shape[2], device=px.device)
        after_last = time == boundary[:, 3].to(px.device)[:, None]
        px = torch.where(after_last[:, None, :], -torch.inf, px)
    return px.contiguous(), py_BST.contiguous()


def _emit_and_blank(
    logits: Tensor, rows: Tensor, blank: int, use_hat_loss: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the symbols in `rows` (of the first columns) and of the blank."""
    columns = rows.shape[2]
    symbol_logits = logits[:, :, :columns].gather(3, rows.unsqueeze(3)).squeeze(3)
    blank_logits = logits[..., blank]
    if not check_flag("use_hat_loss", use_hat_loss):
        log_z = logits.logsumexp(dim=3)
        return symbol_logits - log_z[:, :, :columns], blank_logits - log_z
    size = logits.shape[3]
    is_blank = torch.arange(size, device=logits.device) == blank % size
    log_z = logits[:, :, :columns].masked_fill(is_blank, -torch.inf).logsumexp(dim=3)
    log_symbol = torch.nn.functional.logsigmoid(-blank_logits[:, :, :columns])
    return log_symbol + symbol_logits - log_z, torch.nn.functional.logsigmoid(blank_logits)


def _symbol_scores(lm: Tensor, symbols: Tensor) -> Tensor:
    """lm's score of each next symbol, (B, S, 1)."""
    return lm[:, :-1].gather(2, symbols.long().unsqueeze(2))


def _symbol_scores_of_frames(am: Tensor, symbols: Tensor) -> Tensor:
    """am's score of each symbol in each frame, (B, S, T)."""
    index = symbols.long().unsqueeze(2).expand(-1, -1, am.shape[1])
    return am.transpose(1, 2).gather(1, index)


def _blank_scores(lm: Tensor, am: Tensor, blank: int) -> Tensor:
    """(B, S + 1, T)."""
    return lm[:, :, blank, None] + am[:, None, :, blank]


def _log_normaliser(lm: Tensor, am: Tensor) -> Tensor:
    """log sum_c exp(lm(s, c) + am(t, c)), (B, S + 1, T), by a matrix product of probabilities.

    An exact log-sum-exp replaces entries whose product underflows.
    """
    lm_max = lm.detach().amax(dim=2, keepdim=True)
    am_max = am.detach().amax(dim=2, keepdim=True)
    with torch.autocast(lm.device.type, enabled=False):
        # In float16 it would underflow.
        product = (lm - lm_max).exp() @ (am - am_max).exp().transpose(1, 2)
    safe = product.detach() >= safe_product(product.dtype)
    log_z = torch.where(safe, product, 1.0).log() + lm_max + am_max.transpose(1, 2)
    lost = (~safe).nonzero(as_tuple=True)
    if lost[0].numel() == 0:
        return log_z
    batch, symbol, frame = lost
    exact = (lm[batch, symbol] + am[batch, frame]).logsumexp(dim=1)
    return log_z.index_put(lost, exact)
