"""Layer normalisation (arXiv 1607.06450) that takes few kernels in training on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.kernels.available import train_with_kernels
from pruned_rnnt.model.side_branch import beside


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis, with fused kernels in training.

    Args:
        dim: E.
        before_product: only a linear layer uses the output: fused kernels return it in the dtype to
            which autocast would cast it there.
        silu: followed by SiLU.
    """

    def __init__(self, dim: int, *, before_product: bool = False, silu: bool = False) -> None:
        super().__init__(dim)
        self.before_product = before_product
        self.silu = silu

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E), in the promoted dtype of x and the weight, or that of products."""
        whole_rows = self.normalized_shape == (x.size(-1),)
        if not (whole_rows and train_with_kernels(x, self.weight)):
            normed = super().forward(x)
            return functional.silu(normed) if self.silu else normed
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        if self.before_product:
            dtype = compute_dtype(x, self.weight)
        fused: Tensor = _LayerNorm.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self.silu, dtype
        )
        return fused


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        silu: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        from pruned_rnnt.model.kernels.norms import layer_norm

        x = x.contiguous()
        output, statistics = layer_norm(x, weight, bias, epsilon=epsilon, silu=silu, dtype=dtype)
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.silu = silu
        ctx.beside = weight.is_leaf and bias.is_leaf
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from pruned_rnnt.model.kernels.norms import RowStatistics, layer_norm_backward
        from pruned_rnnt.model.kernels.rows import sums_of_parts

        x, weight, bias, *statistics = ctx.saved_tensors
        of_x, of_weight, of_bias = layer_norm_backward(
            x, weight, bias, RowStatistics(*statistics), grad.contiguous(), silu=ctx.silu
        )
        with beside(of_weight, of_bias, where=ctx.beside):
            found = [sums_of_parts(parts, weight.dtype) for parts in (of_weight, of_bias)]
        return of_x, found[0], found[1], None, None, None
