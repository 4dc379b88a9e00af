"""k2's `mutual_information_recursion` and `joint_mutual_information_recursion`.

Axes: B batch, S symbols, T frames. px is (B, S, T + 1), or (B, S, T) where a symbol takes a frame;
py is (B, S + 1, T).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.k2_arguments import check_boundary
from pruned_rnnt.loss.checks import check_flag, check_floating
from pruned_rnnt.ops.common.autograd import refuses_second_derivative

_Grads = tuple[Tensor, Tensor]


@overload
def mutual_information_recursion(
    px: Tensor, py: Tensor, boundary: Tensor | None = ..., return_grad: Literal[False] = ...
) -> Tensor: ...
@overload
def mutual_information_recursion(
    px: Tensor, py: Tensor, boundary: Tensor | None, return_grad: Literal[True]
) -> tuple[Tensor, _Grads]: ...
@overload
def mutual_information_recursion(
    px: Tensor, py: Tensor, boundary: Tensor | None = ..., *, return_grad: Literal[True]
) -> tuple[Tensor, _Grads]: ...
def mutual_information_recursion(
    px: Tensor, py: Tensor, boundary: Tensor | None = None, return_grad: bool = False
) -> Tensor | tuple[Tensor, _Grads]:
    """Log of the summed probability of all monotonic paths through px and py.

    Args:
        px: (B, S, T + 1), or (B, S, T) for the recursion in which a symbol takes a frame.
        py: (B, S + 1, T), of the same type.
        boundary: (B, 4) integers [s_begin, t_begin, s_end, t_end]; default [0, 0, S, T].
        return_grad: also return the occupation probabilities, which carry no gradient.

    Returns:
        scores (B,), differentiable in px and py; with return_grad (scores, (px_grad, py_grad)).
        A box without frames (t_begin = t_end) has at most one path, of its symbols alone, and
        none if symbols take frames. A box without frames and symbols scores 0.

    Raises:
        ValueError: as `pruned_rnnt.mutual_information`.
    """
    check_floating("px", px, "(B, S, T + 1) or (B, S, T)", 3)
    check_floating("py", py, "(B, S + 1, T)", 3)
    if boundary is not None:
        check_boundary(boundary, "px", px)
    symbol_takes_frame = px.shape[-1] == py.shape[-1]
    rnnt_type = "modified" if symbol_takes_frame else "regular"
    is_frameless = _frameless(px, py, boundary)
    if is_frameless is None:
        scores, (emit, blank) = pruned_rnnt.mutual_information(
            px, py, boundary, rnnt_type=rnnt_type
        )
    else:
        assert boundary is not None
        # One frame and no symbol replace those boxes, whose results are filled in afterwards.
        one_frame = torch.tensor([0, 0, 0, 1], dtype=boundary.dtype, device=boundary.device)
        boxes = torch.where(is_frameless[:, None], one_frame, boundary)
        scores, (emit, blank) = pruned_rnnt.mutual_information(px, py, boxes, rnnt_type=rnnt_type)
        box_scores, box_emit = _frameless_scores(px.to(scores), boundary, symbol_takes_frame)
        rows = is_frameless.to(px.device)
        scores = torch.where(rows, box_scores, scores)
        emit = torch.where(rows[:, None, None], box_emit, emit)
        blank = blank.masked_fill(rows[:, None, None], 0.0)
    if not check_flag("return_grad", return_grad):
        return scores
    return scores, (emit.detach(), blank.detach())


def _frameless(px: Tensor, py: Tensor, boundary: Tensor | None) -> Tensor | None:
    """(B,) bool: the boxes inside the lattice that have no frames; None if there are none."""
    if boundary is None or boundary.shape != (px.shape[0], 4):
        return None
    s_begin, t_begin, s_end, t_end = boundary.unbind(1)
    inside = (s_begin >= 0) & (s_begin <= s_end) & (s_end <= px.shape[1]) & (t_begin >= 0)
    is_frameless = inside & (t_begin == t_end) & (t_end <= py.shape[2])
    return is_frameless if bool(is_frameless.any()) else None


def _frameless_scores(
    px: Tensor, boundary: Tensor, symbol_takes_frame: bool
) -> tuple[Tensor, Tensor]:
    """Scores (B,) of boxes as if all were without frames, and the occupancy of px."""
    s_begin, frame, s_end, _ = boundary.to(px.device).long().unbind(1)
    symbol = torch.arange(px.shape[1], device=px.device)
    is_used = (symbol >= s_begin[:, None]) & (symbol < s_end[:, None])
    if symbol_takes_frame:
        scores = px.new_zeros(px.shape[0])
        return scores.masked_fill(is_used.any(1), -torch.inf), torch.zeros_like(px)
    time = torch.arange(px.shape[2], device=px.device)
    is_used = is_used[:, :, None] & (time == frame[:, None, None])
    scores = px.masked_fill(~is_used, 0.0).sum((1, 2))
    return scores, (is_used & scores.isfinite()[:, None, None]).to(px)


def joint_mutual_information_recursion(
    px: Sequence[Tensor], py: Sequence[Tensor], boundary: Tensor | None = None
) -> Tensor:
    """Scores of the recursion over sum(px), sum(py), split among the terms of these sums.

    Each part is sum of occupancy * term; the first also carries the (constant) difference between
    the log of a sum and the sum of logs, so that the parts add up to the score.

    Args:
        px, py: sequences of equally many tensors, shaped as in `mutual_information_recursion`.
        boundary: (B, 4) as there.

    Returns:
        (len(px), B), differentiable in every px and py.

    Raises:
        TypeError: px or py is no sequence.
        ValueError: no terms, or not as many px as py.
    """
    for name, terms in (("px", px), ("py", py)):
        if not isinstance(terms, Sequence):
            raise TypeError(
                f"{name} is a {type(terms).__name__}; it must be a list or tuple of tensors"
            )
    if not px or len(px) != len(py):
        raise ValueError(
            f"px has {len(px)} terms and py {len(py)}; they must have the same number, at least one"
        )
    px_terms, py_terms = torch.stack(tuple(px)), torch.stack(tuple(py))
    total, (px_grad, py_grad) = mutual_information_recursion(
        px_terms.detach().sum(dim=0), py_terms.detach().sum(dim=0), boundary, return_grad=True
    )
    parts: Tensor = _Weighted.apply(px_grad, px_terms)  # type: ignore[no-untyped-call]
    parts = parts + _Weighted.apply(py_grad, py_terms)  # type: ignore[no-untyped-call]
    offset = total - parts.detach().sum(dim=0)
    return torch.cat((parts[:1] + offset, parts[1:]))


class _Weighted(torch.autograd.Function):
    """(terms, B): sum of occupancy * term; a term of -inf is never occupied and counts 0. A
    function of its own, because the occupancy is a constant to torch."""

    @staticmethod
    def forward(ctx: Any, occupancy: Tensor, terms: Tensor) -> Tensor:
        ctx.save_for_backward(occupancy, terms)
        return (occupancy * terms.masked_fill(terms == -torch.inf, 0.0)).sum(dim=(2, 3))

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        occupancy, terms = ctx.saved_tensors
        return None, (grad[:, :, None, None] * occupancy).to(terms.dtype)
