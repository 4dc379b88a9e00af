"""The embedding: convolutions from features to frames of 20 ms (arXiv 2310.11230, section 3.1).

Axes: N batch, T feature frames, T' frames after subsampling by two, F mel bins, F' bins of a
feature map, C channels, E encoder width, L frames of joined utterances.

Three convolutions over time and frequency, without padding in time, then a ConvNeXt block and a
projection. Frame j of the feature maps depends on features 2j .. 2j+8; the block adds three frames
of the maps on both sides, with zeros beyond the utterance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.joined_frames import (
    JoinedFrames,
    channels_last,
    should_avoid_cudnn_replanning,
)
from pruned_rnnt.model.zipformer.activation import Swoosh, swoosh_linear
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.gradient import ScaleGradient, own_gradient
from pruned_rnnt.model.zipformer.layer import DROPOUT
from pruned_rnnt.model.zipformer.linear import Linear, bias_gradient, linear, weight_gradient
from pruned_rnnt.model.zipformer.masks import dropout_mask, keep_mask
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.schedule import Clock, ramp
from pruned_rnnt.model.zipformer.whiten import Whiten

EMBEDDING_RATE = 2
# Feature frames that one frame of the maps depends on; shorter utterances have no frame.
RECEPTIVE_FIELD = 9
# Frames of the maps on either side of a frame that the ConvNeXt block uses.
CONTEXT = 3
_CHANNELS = (8, 32, 128)
_SKIP_BLOCK = ramp(0.2, 0.015, 20000)


def embedding_length(lengths: Tensor) -> Tensor:
    """Frames of 20 ms of utterances with `lengths` feature frames; 0 if too short."""
    return ((lengths - (RECEPTIVE_FIELD - EMBEDDING_RATE)) // EMBEDDING_RATE).clamp(min=0)


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
        height, width = weight.shape[2:]
        windows = x.movedim(1, -1).unfold(1, height, ctx.stride[0]).unfold(2, width, ctx.stride[1])
        # (N, T', F', height, width, C), whose innermost pieces are contiguous in x.
        windows = windows.movedim(3, -1).flatten(3)
        grad_NTFC = grad.movedim(1, -1)
        of_weight = weight_gradient(grad_NTFC, windows)
        of_weight = of_weight.unflatten(1, (height, width, -1)).movedim(-1, 1)
        return of_x, of_weight, bias_gradient(grad_NTFC, weight.dtype), None


class FirstConv2d(nn.Conv2d):
    """nn.Conv2d of one channel with 3 x 3 weights; on a GPU, a matrix product of all windows.

    cuDNN's kernels for one input channel take longer than the rest of the embedding.
    """

    def forward(self, x_N1TF: Tensor) -> Tensor:
        if x_N1TF.requires_grad or not should_avoid_cudnn_replanning(x_N1TF):
            return super().forward(x_N1TF)
        assert self.bias is not None
        dtype = compute_dtype(x_N1TF, self.weight)
        maps_NTFC: Tensor = _FirstConvolution.apply(  # type: ignore[no-untyped-call]
            x_N1TF.squeeze(1),
            self.weight.flatten(1).to(dtype),
            self.bias.to(dtype),
            int(self.padding[1]),
        )
        return channels_last(maps_NTFC.permute(0, 3, 1, 2))


class _FirstConvolution(torch.autograd.Function):
    """(N, T, F) -> (N, T - 2, F, C). Saves no windows, which are many times as large as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_CK: Tensor, bias: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.padding, ctx.dtype = padding, weight_CK.dtype
        # Matrix products need aligned rows: 16 numbers instead of 9.
        weight_CK = functional.pad(weight_CK, (0, 7))
        return functional.linear(_windows(x, padding, weight_CK.dtype), weight_CK, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        of_weight = weight_gradient(grad, _windows(x, ctx.padding, ctx.dtype))[:, :9]
        return None, of_weight, bias_gradient(grad, ctx.dtype), None


def _windows(x_NTF: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """(N, T - 2, F, 16): the 3 x 3 values around each bin, and zeros."""
    x_NTF = functional.pad(x_NTF.to(dtype), (padding, padding))
    return functional.pad(x_NTF.unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2), (0, 7))


class Embedding(nn.Module):
    """(N, T, F) -> (N, T', E).

    Args:
        num_mel_bins: F.
        output_dim: E.
    """

    def __init__(self, clock: Clock, num_mel_bins: int, output_dim: int) -> None:
        super().__init__()
        self.clock = clock
        first, second, third = _CHANNELS
        self.conv = nn.Sequential(
            FirstConv2d(1, first, 3, padding=(0, 1)),
            # The weight gradients sum over all frames and bins, which could overflow float16.
            ScaleGradient(0.2),
            Balancer(clock, channel_axis=1, max_abs=1.0),
            Swoosh("R"),
            Conv2d(first, second, 3, stride=2),
            Balancer(clock, channel_axis=1, max_abs=4.0),
            Swoosh("R"),
            WideConv2d(second, third, 3, stride=(1, 2)),
            Balancer(clock, channel_axis=1, max_abs=4.0),
            Swoosh("R"),
        )
        self.convnext = ConvNeXt(clock, third)
        self.state_shape = (third, CONTEXT, ((num_mel_bins - 1) // 2 - 1) // 2)
        self.out = Linear(third * self.state_shape[2], output_dim)
        self.out_whiten = Whiten(clock, ramp(4.0, 8.0, 20000), strength=0.02)
        self.out_norm = BiasNorm(clock, output_dim)

    def forward(
        self, features_NTF: Tensor, lengths_N: Tensor, past_NCTF: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Frames, and `past_NCTF` for the next chunk of a stream.

        Args:
            lengths_N: real frames of the maps.
            past_NCTF: (N, C, 3, F') frames of the maps before a chunk of a stream, whose last three
                frames only give context to those before them; None for whole utterances.
        """
        if past_NCTF is None and should_avoid_cudnn_replanning(features_NTF):
            batch, frames, _ = features_NTF.shape
            count = (frames - RECEPTIVE_FIELD) // EMBEDDING_RATE + 1
            joined = JoinedFrames(batch, frames, EMBEDDING_RATE, RECEPTIVE_FIELD)
            maps_1CLF = self.conv(joined.join(features_NTF))
            real = joined.spread(_real_frames(lengths_N, count), maps_1CLF.size(2))
            maps_1CLF, _ = self.convnext(_masked(maps_1CLF, real), None, joined)
            maps_NCTF = joined.part(maps_1CLF, count)
        else:
            maps_NCTF = self.conv(features_NTF.unsqueeze(1))
            real_NT = _real_frames(lengths_N, maps_NCTF.size(2))
            maps_NCTF = _masked(maps_NCTF, real_NT[:, None, :, None])
            maps_NCTF, past_NCTF = self.convnext(maps_NCTF, past_NCTF)
        x_NTE = self.out_norm(self.out_whiten(self.out(maps_NCTF.transpose(1, 2).flatten(2))))
        if self.training:
            rate = self.clock.dropout_rate_on(DROPOUT, x_NTE.device)
            mask_N1E = dropout_mask(x_NTE.size(0), x_NTE.size(-1), rate, x_NTE.device)
            x_NTE = x_NTE if mask_N1E is None else x_NTE * mask_N1E
        return x_NTE, past_NCTF


def _real_frames(lengths_N: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=lengths_N.device) < lengths_N[:, None]


def _masked(maps_NCTF: Tensor, real: Tensor) -> Tensor:
    maps_NCTF = torch.where(real, maps_NCTF, 0.0)
    # The wide depthwise convolution is several times faster with channels last.
    return channels_last(maps_NCTF)


class ConvNeXt(nn.Module):
    """x + pointwise(SwooshL(pointwise(depthwise(x)))), after Liu et al., arXiv 2201.03545."""

    def __init__(self, clock: Clock, channels: int) -> None:
        super().__init__()
        self.clock = clock
        self.depthwise_conv = nn.Conv2d(channels, channels, 2 * CONTEXT + 1, groups=channels)
        self.pointwise_conv1 = nn.Conv2d(channels, 3 * channels, 1)
        self.hidden_balancer = Balancer(
            clock, channel_axis=1, min_positive=0.3, max_positive=1.0, min_abs=0.75, max_abs=5.0
        )
        self.activation = Swoosh("L")
        self.pointwise_conv2 = nn.Conv2d(3 * channels, channels, 1)
        with torch.no_grad():
            self.pointwise_conv2.weight.mul_(0.01)
            assert self.pointwise_conv2.bias is not None
            self.pointwise_conv2.bias.uniform_(-0.001, 0.001)
        self.out_balancer = Balancer(
            clock, channel_axis=1, min_positive=0.4, max_positive=0.6, min_abs=1.0, max_abs=6.0
        )
        self.out_whiten = Whiten(clock, 5.0)

    def forward(
        self, x_NCTF: Tensor, past_NCTF: Tensor | None, joined: JoinedFrames | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(N, C, T', F') -> the same shape, or three frames fewer if there is a past.

        Joined utterances (1, C, L, F') have at least three frames of zeros between them.
        """
        if past_NCTF is None:
            padded_NCTF = functional.pad(x_NCTF, (CONTEXT, CONTEXT, CONTEXT, CONTEXT))
        else:
            joined_NCTF = torch.cat((past_NCTF, x_NCTF), dim=2)
            x_NCTF = x_NCTF[:, :, :-CONTEXT]
            past_NCTF = joined_NCTF[:, :, x_NCTF.size(2) : -CONTEXT]
            padded_NCTF = functional.pad(joined_NCTF, (CONTEXT, CONTEXT))
        branch = self._pointwise(self.depthwise_conv(padded_NCTF))
        if self.training:
            skip = self.clock.dropout_rate_on(_SKIP_BLOCK, branch.device)
            keep = None
            if joined is None:
                keep = keep_mask(branch, skip)
            else:
                of_each = branch.new_empty((joined.batch, joined.each // joined.rate))
                keep_N1 = keep_mask(of_each, skip)
                if keep_N1 is not None:
                    keep = joined.spread(keep_N1.expand_as(of_each), branch.size(2))
            branch = branch if keep is None else branch * keep
        out_NCTF = self.out_balancer(x_NCTF + branch)
        out_NCTF = self.out_whiten(out_NCTF.movedim(1, -1)).movedim(-1, 1)
        if self.clock.recorder is not None:
            # Others may hold the gradient of the output, which both of these change in place.
            out_NCTF = own_gradient(out_NCTF)
        return out_NCTF, past_NCTF

    def _pointwise(self, x_NCTF: Tensor) -> Tensor:
        """pointwise(SwooshL(pointwise(x)))."""
        first, second = self.pointwise_conv1, self.pointwise_conv2
        if not (torch.is_grad_enabled() and should_avoid_cudnn_replanning(x_NCTF)):
            return second(self.activation(self.hidden_balancer(first(x_NCTF))))  # type: ignore[no-any-return]
        # As linear layers over frames and bins, which do not store the activation for backward.
        x_NTFC = channels_last(x_NCTF).movedim(1, -1)
        hidden_NTFC = linear(x_NTFC, first.weight.flatten(1), first.bias)
        hidden_NTFC = self.hidden_balancer(hidden_NTFC.movedim(-1, 1)).movedim(1, -1)
        branch_NTFC = swoosh_linear(hidden_NTFC, second.weight.flatten(1), second.bias, None, "L")
        return channels_last(branch_NTFC.movedim(-1, 1))
