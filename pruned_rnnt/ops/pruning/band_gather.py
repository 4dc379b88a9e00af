"""Predictor rows of the band: out(n,t,j) = lm(n, start(n,t) + j), and the gradient of that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.library import Out, accumulator, op


def _columns(start: Tensor, s_range: int, rows: int) -> tuple[Tensor, Tensor]:
    """u (N,T,S) int64 within 0..U, and a mask of the columns that were inside."""
    u = start.long()[:, :, None] + torch.arange(s_range, device=start.device)
    inside = (u >= 0) & (u < rows)
    return u.clamp(0, rows - 1), inside


@op
def band_gather(lm: Tensor, start: Tensor, s_range: int, out: Out[Tensor]) -> None:
    """lm (N,U+1,D), start (N,T) int32 -> out (N,T,S,D) of lm's dtype; 0 where start + j > U."""
    u, inside = _columns(start, s_range, lm.shape[1])
    n = torch.arange(lm.shape[0], device=lm.device)[:, None, None]
    out.copy_(lm[n, u].masked_fill_(~inside[..., None], 0))


@op
def band_gather_backward(grad: Tensor, start: Tensor, grad_lm: Out[Tensor]) -> None:
    """grad (N,T,S,D), start (N,T) -> grad_lm (N,U+1,D) of the dtype of grad, summed in acc and in a
    fixed order (the fallback on CUDA: only under torch.use_deterministic_algorithms)."""
    batch, rows, width = grad_lm.shape
    u, inside = _columns(start, grad.shape[2], rows)
    n = torch.arange(batch, device=grad.device)[:, None, None]
    # Columns outside are added to an extra row, which is dropped.
    row = torch.where(inside, n * rows + u, batch * rows).reshape(-1)
    total = grad.new_zeros((batch * rows + 1, width), dtype=accumulator(grad.dtype))
    total.index_add_(0, row, grad.reshape(-1, width).to(total.dtype))
    grad_lm.copy_(total[:-1].view(batch, rows, width))


class _BandGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lm: Tensor, start: Tensor, s_range: int) -> Tensor:
        out = lm.new_empty((*start.shape, s_range, lm.shape[2]))
        band_gather(lm, start, s_range, out)
        ctx.save_for_backward(start)
        ctx.rows = lm.shape[1]
        return out

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (start,) = ctx.saved_tensors
        grad_lm = grad.new_empty((grad.shape[0], ctx.rows, grad.shape[3]))
        band_gather_backward(grad.contiguous(), start, grad_lm)
        return grad_lm, None, None


def gathered_band(lm_NUD: Tensor, start_NT: Tensor, s_range: int) -> Tensor:
    """lm (N,U+1,D), start (N,T) int32, both contiguous -> (N,T,S,D); differentiable in lm."""
    out: Tensor = _BandGather.apply(lm_NUD, start_NT, s_range)  # type: ignore[no-untyped-call]
    return out
