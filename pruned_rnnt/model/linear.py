"""Linear layers whose bias gradient takes few kernels.

Axes: R rows (all frames of a batch), I and O channels of input and output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.cast_parameters import is_cast
from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.kernels.available import train_with_kernels, use_kernels
from pruned_rnnt.model.side_branch import beside


class Linear(nn.Linear):
    """nn.Linear, with fused kernels in training."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's function of the same name, with fused kernels in training."""
    if bias is None or not train_with_kernels(x, weight):
        return functional.linear(x, weight, bias)
    dtype = compute_dtype(x, weight)
    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x.to(dtype), weight.to(dtype), bias.to(dtype)
    )
    return output


def transpose_in_memory(encoder: nn.Module, *, keep_values: bool = True) -> None:
    """Store the matrices of an encoder on the CPU column by column; shapes and values stay.

    A CPU then multiplies the few rows of a short utterance, or of a chunk of a stream, in down to
    half the time; many rows take as long as before.

    Args:
        keep_values: false before values are loaded, so that none are copied; they are then
            undefined.
    """
    for parameter in encoder.parameters():
        if parameter.dim() == 2 and parameter.device.type == "cpu":
            with torch.inference_mode(parameter.is_inference()):  # a parameter keeps its kind
                by_columns = parameter.detach().t()
                parameter.data = (
                    by_columns.contiguous()
                    if keep_values
                    else torch.empty_like(by_columns, memory_format=torch.contiguous_format)
                ).t()


def linear_again(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """A function that repeats `linear` without gradients, also outside of autocast."""
    dtype = compute_dtype(x, weight)
    x, weight = x.detach(), weight.detach()
    bias = None if bias is None else bias.detach().to(dtype)
    return lambda: functional.linear(x.to(dtype), weight.to(dtype), bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # Frozen weights need no gradients, and so not the input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.beside = is_cast(weight) and is_cast(bias)
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = None, None, None
        with beside(grad, x, where=ctx.beside):
            if ctx.needs_input_grad[1]:
                of_weight = weight_gradient(grad, x)
            if ctx.needs_input_grad[2]:
                of_bias = bias_gradient(grad, weight.dtype)
        if ctx.needs_input_grad[0]:
            of_x = grad @ weight
        return of_x, of_weight, of_bias


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """(O, I), the sum over all rows of grad (..., O) times x (..., I)."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """(O,), the sum over all rows of grad (..., O), computed in float32."""
    if use_kernels(grad):
        from pruned_rnnt.model.kernels.rows import column_sums

        return column_sums(grad, dtype)
    return grad.flatten(0, -2).sum(dim=0, dtype=dtype)


def scaled_linear(
    input_dim: int, output_dim: int, initial_scale: float = 1.0, bias: bool = True
) -> Linear:
    """A linear layer with weights times `initial_scale`, biases within 0.1 * initial_scale."""
    linear = Linear(input_dim, output_dim, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(initial_scale)
        if bias:
            linear.bias.uniform_(-0.1 * initial_scale, 0.1 * initial_scale)
    return linear
