"""The embedding: convolutions from features to frames of 20 ms (arXiv 2310.11230, section 3.1).

Axes: N batch, T feature frames, T' frames after subsampling by two, F mel bins, F' bins of a
feature map, C channels, E encoder width, L frames of joined utterances.

Three convolutions over time and frequency, without padding in time, then a ConvNeXt block and a
projection. Frame j of the feature maps depends on features 2j .. 2j+8; the block adds three frames
of the maps on both sides, with zeros beyond the utterance.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.joined_frames import (
    JoinedFrames,
    channels_last,
    should_avoid_cudnn_replanning,
)
from pruned_rnnt.model.kernels.available import use_kernels, use_own_function
from pruned_rnnt.model.kernels.target import on_gpu
from pruned_rnnt.model.linear import Linear, linear, linear_again
from pruned_rnnt.model.recomputed import recomputed
from pruned_rnnt.model.subsampling_convolutions import (
    Conv2d,
    FirstConv2d,
    WideConv2d,
    depthwise_maps,
)
from pruned_rnnt.model.zipformer.activation import Swoosh, swoosh_linear
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.gradient import ScaleGradient, own_gradient
from pruned_rnnt.model.zipformer.layer import DROPOUT, dropout_mask, keep_mask
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.residual import add_branch
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
            real_NT = _real_frames(lengths_N, count)
            maps_1CLF, maps_again = self._convolve(
                joined.join(features_NTF), partial(joined.spread, real_NT)
            )
            maps_1CLF, _ = self.convnext(maps_1CLF, None, joined, maps_again)
            x_NTE = self._project_joined(maps_1CLF, joined, count)
        else:
            maps_NCTF, _ = self._convolve(
                features_NTF.unsqueeze(1),
                lambda frames: _real_frames(lengths_N, frames)[:, None, :, None],
            )
            maps_NCTF, past_NCTF = self.convnext(maps_NCTF, past_NCTF)
            x_NTE = self.out(maps_NCTF.transpose(1, 2).flatten(2))
        x_NTE = self.out_norm(self.out_whiten(x_NTE))
        if self.training:
            rate = self.clock.dropout_rate_on(DROPOUT, x_NTE.device)
            mask_N1E = dropout_mask(x_NTE.size(0), x_NTE.size(-1), rate, x_NTE.device)
            x_NTE = x_NTE if mask_N1E is None else x_NTE * mask_N1E
        return x_NTE, past_NCTF

    def _convolve(
        self, x_N1TF: Tensor, real_of: Callable[[int], Tensor]
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """The convolutions, zero where the frames are not real; and a function that computes them
        again from the input of the last activation.

        The activations between the convolutions are not kept for backward.

        Args:
            real_of: (N, 1, T', 1) bool for the number of frames T'.
        """
        x, again = x_N1TF, None
        *modules, last = self.conv
        assert isinstance(last, Swoosh)
        for module in modules:
            before = x
            with nullcontext() if again is None else recomputed(before, again):
                x = module(before)
            again = module.again(before) if isinstance(module, Swoosh) else None
        real = real_of(x.size(2))
        if x.size(0) == 1 and use_kernels(x):
            return last.of_maps(x, real.flatten())
        repeat = last.again(x)
        return _masked(last(x), real), lambda: _masked(repeat(), real)

    def _project_joined(self, maps_1CLF: Tensor, joined: JoinedFrames, count: int) -> Tensor:
        """(N, `count`, E): `out` with its weights in the memory order of the maps, not copied."""
        channels, bins = maps_1CLF.size(1), maps_1CLF.size(3)
        weight = self.out.weight.unflatten(1, (channels, bins)).transpose(1, 2).flatten(1)
        x_RE = linear(joined.rows(maps_1CLF), weight, self.out.bias)
        x_NTE: Tensor = x_RE.unflatten(0, (joined.batch, joined.each // joined.rate))
        return x_NTE[:, :count].contiguous()


def _real_frames(lengths_N: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=lengths_N.device) < lengths_N[:, None]


def _masked(maps_NCTF: Tensor, real: Tensor) -> Tensor:
    maps_NCTF = torch.where(real, maps_NCTF, 0.0)
    # The wide depthwise convolution is several times faster with channels last.
    return channels_last(maps_NCTF)


def with_branch(x_NCTF: Tensor, branch_NCTF: Tensor, keep: Tensor | None) -> Tensor:
    """x + branch * keep, where keep is (N, 1, 1, 1) or (1, 1, T, 1)."""
    in_one_pass = keep is not None or not torch.is_grad_enabled()
    if not (in_one_pass and use_kernels(x_NCTF, branch_NCTF)):
        return x_NCTF + (branch_NCTF if keep is None else branch_NCTF * keep)
    x_NTFC, branch_NTFC = (channels_last(x).movedim(1, -1) for x in (x_NCTF, branch_NCTF))
    if keep is not None and keep.size(2) > 1:
        # A frame of joined utterances is a sequence for `add_branch`.
        keep, shape = keep.view(-1, 1, 1), x_NTFC.shape
        x_TFC, branch_TFC = x_NTFC.flatten(0, 1), branch_NTFC.flatten(0, 1)
        sum_NTFC = add_branch(x_TFC, branch_TFC, keep, read=False)[0].view(shape)
    else:
        sum_NTFC, _ = add_branch(x_NTFC, branch_NTFC, keep, read=False)
    return channels_last(sum_NTFC.movedim(-1, 1))


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
        self,
        x_NCTF: Tensor,
        past_NCTF: Tensor | None,
        joined: JoinedFrames | None = None,
        x_again: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(N, C, T', F') -> the same shape, or three frames fewer if there is a past.

        Joined utterances (1, C, L, F') have at least three frames of zeros between them. With
        `x_again`, which computes x, x is not kept for backward.
        """
        kept: AbstractContextManager[None] = nullcontext()
        convolve: Callable[[Tensor], Tensor] = self.depthwise_conv
        weight = self.depthwise_conv.weight
        if past_NCTF is None and use_kernels(x_NCTF, weight):
            # The kernel takes what is beyond the maps as zeros.
            read_NCTF, convolve = x_NCTF, partial(depthwise_maps, self.depthwise_conv)
            if x_again is not None:
                kept = recomputed(x_NCTF, x_again)
        elif past_NCTF is None:
            read_NCTF = functional.pad(x_NCTF, (CONTEXT, CONTEXT, CONTEXT, CONTEXT))
        else:
            joined_NCTF = torch.cat((past_NCTF, x_NCTF), dim=2)
            x_NCTF = x_NCTF[:, :, :-CONTEXT]
            past_NCTF = joined_NCTF[:, :, x_NCTF.size(2) : -CONTEXT]
            read_NCTF = functional.pad(joined_NCTF, (CONTEXT, CONTEXT))
        with kept:
            mixed_NCTF = convolve(read_NCTF)
        branch = self._pointwise(mixed_NCTF)
        keep = None
        if self.training:
            skip = self.clock.dropout_rate_on(_SKIP_BLOCK, branch.device)
            if joined is None:
                keep = keep_mask(branch, skip)
            else:
                of_each = branch.new_empty((joined.batch, joined.each // joined.rate))
                keep_N1 = keep_mask(of_each, skip)
                if keep_N1 is not None:
                    keep = joined.spread(keep_N1.expand_as(of_each), branch.size(2))
        out_NCTF = self.out_balancer(with_branch(x_NCTF, branch, keep))
        out_NCTF = self.out_whiten(out_NCTF.movedim(1, -1)).movedim(-1, 1)
        if self.clock.recorder is not None:
            # Balancer and whitener change the gradient in place, and it may be in use elsewhere.
            out_NCTF = own_gradient(out_NCTF)
        return out_NCTF, past_NCTF

    def _pointwise(self, x_NCTF: Tensor) -> Tensor:
        """pointwise(SwooshL(pointwise(x)))."""
        first, second = self.pointwise_conv1, self.pointwise_conv2
        # The CPU's convolutions of one frame and bin copy all maps.
        as_linear = use_own_function(x_NCTF) if on_gpu(x_NCTF) else not torch.is_grad_enabled()
        if not as_linear or torch.compiler.is_compiling():
            return second(self.activation(self.hidden_balancer(first(x_NCTF))))  # type: ignore[no-any-return]
        # As linear layers over frames and bins: the activation is one pass, and is not stored for
        # backward.
        x_NTFC = channels_last(x_NCTF).movedim(1, -1)
        weight, bias = first.weight.flatten(1), first.bias
        hidden_NTFC = linear(x_NTFC, weight, bias)
        # The widest tensor of the encoder; one matrix product computes it again.
        with recomputed(hidden_NTFC, linear_again(x_NTFC, weight, bias)):
            hidden_NTFC = self.hidden_balancer(hidden_NTFC.movedim(-1, 1)).movedim(1, -1)
            weight, bias = second.weight.flatten(1), second.bias
            branch_NTFC = swoosh_linear(hidden_NTFC, weight, bias, None, "L")
        return channels_last(branch_NTFC.movedim(-1, 1))
