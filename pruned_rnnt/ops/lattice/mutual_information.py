"""log P of given emit and blank log-probabilities in k2's layout, differentiable.

Axes: N batch, T frames, U symbols. The recurrence is stated in lattice.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import opaque_to_compile
from pruned_rnnt.ops.common.scale import scale
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.lattice.lattice import cut_memory, lattice


class _MutualInformation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = px.new_empty(py.shape[:1])
        gx, gy = torch.empty_like(px), torch.empty_like(py)
        batch, rows, frames = py.shape
        work = cut_memory(px, batch, rows, frames)
        lattice(px, py, boundary, rnnt_type, work, total, gx, gy)
        ctx.save_for_backward(gx, gy)
        ctx.mark_non_differentiable(gx, gy)
        # Else autograd fills zeros as large as these.
        ctx.set_materialize_grads(False)
        return total, gx, gy

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_total: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_total is None:
            return None, None, None, None
        gx, gy = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (gx, gy)]
        scale([gx, gy], grad_total.contiguous(), grads)
        return grads[0], grads[1], None, None


@opaque_to_compile
def mutual_information_sums(
    px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: int
) -> tuple[Tensor, Tensor, Tensor]:
    """total (N,), gx, gy of contiguous acc px, py; total is differentiable, gx and gy are not."""
    total, gx, gy = _MutualInformation.apply(px, py, boundary, rnnt_type)  # type: ignore[no-untyped-call]
    return total, gx, gy
