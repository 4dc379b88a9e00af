"""Convolutions of the encoders' front ends over time and frequency, in forms fast on a GPU.

Axes: N batch, T feature frames, T' frames of a feature map, F mel bins, F' bins of a feature map,
C channels, K values of a window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.joined_frames import channels_last, should_avoid_cudnn_replanning
from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.linear import bias_gradient, weight_gradient
from pruned_rnnt.model.own_function import applied


class Conv2d(nn.Conv2d):
    """nn.Conv2d that runs in the memory order (N, T, F, C) on a GPU, as tensor cores need."""

    def forward(self, x_NCTF: Tensor) -> Tensor:
        weight = self.weight
        if should_avoid_cudnn_replanning(x_NCTF):
            weight = weight.contiguous(memory_format=torch.channels_last)
        maps_NCTF: Tensor = self._conv_forward(x_NCTF, weight, self.bias)
        return maps_NCTF


class WideConv2d(Conv2d):
    """Conv2d with its weight gradient as a matrix product of all windows, on a GPU.

    cuDNN's weight gradient of the last strided convolution takes ten times as long.
    """

    def forward(self, x_NCTF: Tensor) -> Tensor:
        if not (should_avoid_cudnn_replanning(x_NCTF) and torch.is_grad_enabled()):
            return super().forward(x_NCTF)
        dtype = compute_dtype(x_NCTF, self.weight)
        maps_NCTF: Tensor = _WideConvolution.apply(  # type: ignore[no-untyped-call]
            channels_last(x_NCTF.to(dtype)),
            self.weight.to(dtype, memory_format=torch.channels_last),
            self.bias if self.bias is None else self.bias.to(dtype),
            self.stride,
        )
        return maps_NCTF


class _WideConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return functional.conv2d(x, weight, bias, stride)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = channels_last(grad)
        of_x, _, _ = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            [weight.size(0)],
            ctx.stride,
            [0, 0],
            [1, 1],
            False,
            [0, 0],
            1,
            [True, False, False],
        )
        x_NTFC, grad_NTFC = x.movedim(1, -1), grad.movedim(1, -1)
        of_weight = _window_weight_gradient(x_NTFC, grad_NTFC, weight, ctx.stride)
        return of_x, of_weight.movedim(-1, 1), bias_gradient(grad_NTFC, weight.dtype), None


def _window_weight_gradient(
    x_NTFC: Tensor, grad_NTFC: Tensor, weight: Tensor, stride: tuple[int, int]
) -> Tensor:
    """(C', height, width, C) of a convolution with these weights."""
    height, width = weight.shape[2:]
    if use_kernels(x_NTFC, grad_NTFC) and (height, width) == (3, 3):
        from pruned_rnnt.model.kernels.windows import window_weight_gradient

        return window_weight_gradient(x_NTFC, grad_NTFC, stride)
    windows = x_NTFC.unfold(1, height, stride[0]).unfold(2, width, stride[1])
    # (N, T', F', height, width, C), of which runs of width * C elements are contiguous in x.
    windows = windows.movedim(3, -1).flatten(3)
    of_weight: Tensor = weight_gradient(grad_NTFC, windows).unflatten(1, (height, width, -1))
    return of_weight


def depthwise_maps(convolution: nn.Conv2d, x_NCTF: Tensor) -> Tensor:
    """A depthwise convolution with zeros around the maps, by fused kernels.

    Returns maps of the shape of x, in the memory order (N, T, F, C).

    Args:
        convolution: without padding; its weights are square, of odd size.
    """
    assert convolution.bias is not None
    dtype = compute_dtype(x_NCTF, convolution.weight)
    mixed_NTFC: Tensor = applied(
        _DepthwiseMaps,
        x_NCTF.to(dtype).movedim(1, -1),
        convolution.weight.squeeze(1).movedim(0, -1).to(dtype),
        convolution.bias.to(dtype),
    )
    return channels_last(mixed_NTFC.movedim(-1, 1))


class _DepthwiseMaps(torch.autograd.Function):
    """(N, T, F, C) with weights (K, K, C) -> (N, T, F, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from pruned_rnnt.model.kernels.maps import depthwise_maps as fused_maps

        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return fused_maps(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from pruned_rnnt.model.kernels.maps import depthwise_maps as fused_maps
        from pruned_rnnt.model.kernels.maps import depthwise_maps_gradients

        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = fused_maps(grad, weight.flip(0, 1).contiguous(), None)
        found = depthwise_maps_gradients(x, grad, weight.size(0))
        return of_x, found.weight_KKC, found.bias_C


class FirstConv2d(nn.Conv2d):
    """nn.Conv2d of one channel with 3 x 3 weights; on a GPU, a matrix product of all windows.

    cuDNN's kernels for one input channel take longer than the rest of the embedding. There is no
    padding in time.
    """

    def forward(self, x_N1TF: Tensor) -> Tensor:
        if x_N1TF.requires_grad or not should_avoid_cudnn_replanning(x_N1TF):
            return super().forward(x_N1TF)
        assert self.bias is not None
        dtype = compute_dtype(x_N1TF, self.weight)
        maps_NTFC: Tensor = applied(
            _FirstConvolution,
            x_N1TF.squeeze(1),
            self.weight.flatten(1).to(dtype),
            self.bias.to(dtype),
            _Window(self.stride[0], self.stride[1], int(self.padding[1])),
        )
        return channels_last(maps_NTFC.permute(0, 3, 1, 2))


class _Window(NamedTuple):
    """Where 3 x 3 windows lie: steps in time and frequency, and zeros beyond the outer bins."""

    time_stride: int
    bin_stride: int
    bin_padding: int

    def cut(self, x_NTF: Tensor, dtype: torch.dtype) -> Tensor:
        """(N, T', F', 16): the nine values of each window, and zeros."""
        x_NTF = functional.pad(x_NTF.to(dtype), (self.bin_padding, self.bin_padding))
        windows = x_NTF.unfold(1, 3, self.time_stride).unfold(2, 3, self.bin_stride)
        return functional.pad(windows.flatten(-2), (0, 7))


class _FirstConvolution(torch.autograd.Function):
    """(N, T, F) -> (N, T', F', C). Saves no windows, which are many times as large as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_CK: Tensor, bias: Tensor, window: _Window) -> Tensor:
        ctx.fused = use_kernels(x, weight_CK)
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.window, ctx.dtype = window, weight_CK.dtype
        if ctx.fused:
            from pruned_rnnt.model.kernels.windows import convolve_first

            return convolve_first(x, weight_CK.t().contiguous(), bias, window)
        # Matrix products need aligned rows: 16 numbers instead of 9.
        weight_CK = functional.pad(weight_CK, (0, 7))
        return functional.linear(window.cut(x, weight_CK.dtype), weight_CK, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.fused:
            from pruned_rnnt.model.kernels.windows import first_weight_gradient

            of_weight = first_weight_gradient(x, grad, ctx.window).t()
        else:
            of_weight = weight_gradient(grad, ctx.window.cut(x, ctx.dtype))[:, :9]
        return None, of_weight, bias_gradient(grad, ctx.dtype), None
