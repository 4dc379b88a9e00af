"""log P of given emit and blank log-probabilities in k2's layout, differentiable.

The recurrence is stated in lattice.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import opaque_to_compile
from pruned_rnnt.ops.common.scale import scale
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.lattice.lattice import LatticeSums, lattice, split_workspace


class _MutualInformation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: int
    ) -> tuple[Tensor, ...]:
        gx, gy = torch.empty_like(px), torch.empty_like(py)
        sums = LatticeSums(px.new_empty(py.shape[:1]), gx, gy)
        lattice(px, py, boundary, rnnt_type, split_workspace(px, *py.shape), sums)
        ctx.save_for_backward(gx, gy)
        ctx.mark_non_differentiable(gx, gy)
        # Otherwise autograd allocates gradients of zeros as large as these.
        ctx.set_materialize_grads(False)
        return tuple(sums)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_total: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_total is None:
            return None, None, None, None
        occupancies = list(ctx.saved_tensors)
        grads = [torch.empty_like(x) for x in occupancies]
        scale(occupancies, grad_total.contiguous(), grads)
        return *grads, None, None


@opaque_to_compile
def mutual_information_sums(
    px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: int
) -> LatticeSums:
    """total (N,), gx, gy of contiguous acc px, py; total is differentiable, gx and gy are not."""
    return LatticeSums(*_MutualInformation.apply(px, py, boundary, rnnt_type))  # type: ignore[no-untyped-call]
