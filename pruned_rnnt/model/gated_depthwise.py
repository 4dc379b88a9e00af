"""A gate, and the depthwise convolution over time after it.

Axes: N batch, T frames, E channels, C = 2 E channels of values and of gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.cast_parameters import is_cast
from pruned_rnnt.model.depthwise import compute_dtype, depthwise
from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.side_branch import beside


def gate(x_NTC: Tensor, real_NT1: Tensor) -> Tensor:
    """The lower half of the channels times the sigmoid of the upper half; zero in padding."""
    if not use_kernels(x_NTC):
        return functional.glu(x_NTC) * real_NT1
    gated_NTE: Tensor = applied(_Gate, x_NTC, real_NT1)
    return gated_NTE


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, real: Tensor) -> Tensor:
        from pruned_rnnt.model.kernels.convolution import gate as fused_gate

        x, real = x.contiguous(), real.contiguous()
        ctx.save_for_backward(x, real)
        return fused_gate(x, real)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from pruned_rnnt.model.kernels.convolution import gate_backward

        x, real = ctx.saved_tensors
        return gate_backward(x, real, grad.contiguous()), None


def gated_depthwise(
    convolution: nn.Conv1d, x_NTC: Tensor, real_NT1: Tensor, padding: int | None = None
) -> Tensor:
    """The convolution of `gate`, (N, T, 2 E) -> (N, T, E), whose backward pass gates again.

    padding: of both ends, instead of that of the convolution.
    """
    weight, bias = convolution.weight, convolution.bias
    if bias is None or not use_kernels(x_NTC, weight):
        return depthwise(convolution, gate(x_NTC, real_NT1), padding)
    dtype = compute_dtype(x_NTC, weight)
    mixed_NTE: Tensor = applied(
        _GatedDepthwise,
        x_NTC.to(dtype),
        real_NT1,
        weight.to(dtype),
        bias.to(dtype),
        int(convolution.padding[0]) if padding is None else padding,
    )
    return mixed_NTE


class _GatedDepthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, real: Tensor, weight: Tensor, bias: Tensor, padding: int
    ) -> Tensor:
        from pruned_rnnt.model.kernels import convolution as fused

        x, real, weight = x.contiguous(), real.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, real, weight)
        ctx.padding = padding
        ctx.beside = is_cast(weight) and is_cast(bias)
        return fused.depthwise(fused.gate(x, real), weight, bias, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None, None]:
        from pruned_rnnt.model.kernels import convolution as fused

        x, real, weight = ctx.saved_tensors
        gated, grad = fused.gate(x, real), grad.contiguous()
        of_weight, of_bias = None, None
        if any(ctx.needs_input_grad[2:4]):
            with beside(gated, grad, where=ctx.beside):
                of_weight, of_bias = fused.depthwise_weight_gradients(
                    gated, weight, grad, ctx.padding
                )
        of_gated = fused.depthwise_backward(gated, weight, grad, ctx.padding)
        return fused.gate_backward(x, real, of_gated), None, of_weight, of_bias, None
