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


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of autocast on x's device; without autocast, that of the weight."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def depthwise(convolution: nn.Conv1d, x_NTE: Tensor, padding: int | None = None) -> Tensor:
    """(N, T, E) -> (N, T', E): apply the convolution with its padding, or with another padding.

    Computed as a 2-D convolution over (N, E, 1, T), whose channels-last layout is that of x; CPU
    kernels for it are several times as fast as those for one dimension.
    """
    dtype = compute_dtype(x_NTE, convolution.weight)
    assert convolution.bias is not None
    if torch.is_grad_enabled() and use_kernels(x_NTE, convolution.weight):
        mixed_NTE: Tensor = _FusedDepthwise.apply(  # type: ignore[no-untyped-call]
            x_NTE.to(dtype),
            convolution.weight.to(dtype),
            convolution.bias.to(dtype),
            int(convolution.padding[0]) if padding is None else padding,
        )
        return mixed_NTE
    mixed_NE1T: Tensor = _Depthwise.apply(  # type: ignore[no-untyped-call]
        x_NTE.to(dtype).transpose(1, 2).unsqueeze(2),
        convolution.weight.to(dtype).unsqueeze(2),
        convolution.bias.to(dtype),
        int(convolution.padding[0]) if padding is None else padding,
    )
    return mixed_NE1T.squeeze(2).transpose(1, 2)


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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
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
                [True, True, True],
            )
        return grad_x, grad_weight, grad_bias, None


class _FusedDepthwise(torch.autograd.Function):
    """By our kernels, which read frames as the other modules store them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        from pruned_rnnt.model.kernels.convolution import depthwise as fused_depthwise

        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return fused_depthwise(x, weight, bias, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from pruned_rnnt.model.kernels.convolution import depthwise_backward

        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = depthwise_backward(x, weight, grad.contiguous(), ctx.padding)
        return of_x, of_weight, of_bias, None
