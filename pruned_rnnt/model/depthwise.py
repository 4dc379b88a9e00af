"""Depthwise convolution over time, without cuDNN.

Axes: N batch, T frames, E channels, K kernel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.own_function import applied


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of autocast on x's device; without autocast, that of the weight."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def depthwise(
    convolution: nn.Conv1d,
    x_NTE: Tensor,
    padding: int | None = None,
    chunk: Tensor | None = None,
) -> Tensor:
    """(N, T, E) -> (N, T', E): apply the convolution with its padding, or with another padding.

    With `chunk`, (1,) int64 on the device, frames of other chunks of that size count as zero.

    Computed as a 2-D convolution over (N, E, 1, T), whose channels-last layout is that of x; CPU
    kernels for it are several times as fast as those for one dimension.
    """
    dtype = compute_dtype(x_NTE, convolution.weight)
    bias_E = convolution.bias
    if bias_E is None:
        bias_E = convolution.weight.new_zeros(convolution.out_channels)
    if use_kernels(x_NTE, convolution.weight):
        mixed_NTE: Tensor = applied(
            _FusedDepthwise,
            x_NTE.to(dtype),
            convolution.weight.to(dtype),
            bias_E.to(dtype),
            int(convolution.padding[0]) if padding is None else padding,
            chunk,
        )
        return mixed_NTE
    if chunk is not None:
        return _by_taps(convolution, x_NTE.to(dtype), chunk)
    mixed_NE1T: Tensor = applied(
        _Depthwise,
        x_NTE.to(dtype).transpose(1, 2).unsqueeze(2),
        convolution.weight.to(dtype).unsqueeze(2),
        bias_E.to(dtype),
        int(convolution.padding[0]) if padding is None else padding,
    )
    return mixed_NE1T.squeeze(2).transpose(1, 2)


def _by_taps(convolution: nn.Conv1d, x_NTE: Tensor, chunk: Tensor) -> Tensor:
    """The convolution within chunks, tap by tap: for passes captured without fused kernels."""
    size, past = convolution.kernel_size[0], int(convolution.padding[0])
    assert convolution.bias is not None
    frame_T = torch.arange(x_NTE.size(1), device=x_NTE.device)
    padded_NTE = functional.pad(x_NTE, (0, 0, past, size - 1 - past))
    total_NTE = convolution.bias.to(x_NTE.dtype).expand_as(x_NTE)
    for k in range(size):
        same_T = torch.div(frame_T + k - past, chunk, rounding_mode="floor") == frame_T // chunk
        source_NTE = padded_NTE[:, k : k + len(frame_T)] * same_T[:, None]
        total_NTE = total_NTE + source_NTE * convolution.weight[:, 0, k].to(x_NTE.dtype)
    return total_NTE


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Like torch.backends.cudnn.flags(enabled=False), but ten times as fast."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


class _Depthwise(torch.autograd.Function):
    """Without cuDNN, which would re-plan for every new length: two seconds per batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        if x.is_cuda:
            # The CUDA kernels need frames contiguous in memory: copied once, also for backward.
            x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        with _without_cudnn():
            return functional.conv2d(x, weight, bias, padding=(0, padding), groups=bias.size(0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        channels = weight.size(0)
        if grad.is_cuda:
            grad = grad.contiguous()
        with _without_cudnn():
            grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
                grad,
                x,
                weight,
                [channels],
                [1, 1],
                [0, ctx.padding],
                [1, 1],
                False,
                [0, 0],
                channels,
                ctx.needs_input_grad[:3],
            )
        return grad_x, grad_weight, grad_bias, None


class _FusedDepthwise(torch.autograd.Function):
    """By the fused kernels, which read the memory order (N, T, E) of the other modules."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int, chunk: Tensor | None
    ) -> Tensor:
        from pruned_rnnt.model.kernels.convolution import depthwise as fused_depthwise

        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.chunk = padding, chunk
        return fused_depthwise(x, weight, bias, padding, chunk)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        from pruned_rnnt.model.kernels import convolution as fused

        x, weight = ctx.saved_tensors
        arguments = (x, weight, grad.contiguous(), ctx.padding, ctx.chunk)
        of_weight, of_bias = None, None
        if any(ctx.needs_input_grad[1:3]):
            of_weight, of_bias = fused.depthwise_weight_gradients(*arguments)
        return fused.depthwise_backward(*arguments), of_weight, of_bias, None, None
