"""Layer normalisation (arXiv 1607.06450) whose gradients take few kernels on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.kernels.available import train_with_kernels
from pruned_rnnt.model.side_branch import beside


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis, with a fused backward kernel in training.

    torch's kernel for the gradients of weight and bias takes longer than all the rest.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E), in the promoted dtype of x and the weight."""
        whole_rows = self.normalized_shape == (x.size(-1),)
        if not (whole_rows and train_with_kernels(x, self.weight)):
            return super().forward(x)
        x = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        normed: Tensor = _LayerNorm.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps
        )
        return normed


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed, mean, inverse_deviation = torch.native_layer_norm(
            x, (x.size(-1),), weight, bias, eps
        )
        ctx.save_for_backward(x, weight, mean, inverse_deviation)
        ctx.beside = weight.is_leaf and bias.is_leaf
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from pruned_rnnt.model.kernels.layer_norm import layer_norm_backward
        from pruned_rnnt.model.kernels.sums import sums_of_parts

        x, weight, mean, inverse_deviation = ctx.saved_tensors
        of_x, of_weight, of_bias = layer_norm_backward(
            x, weight, mean, inverse_deviation, grad.contiguous()
        )
        with beside(of_weight, of_bias, where=ctx.beside):
            found = [sums_of_parts(parts, weight.dtype) for parts in (of_weight, of_bias)]
        return of_x, found[0], found[1], None
