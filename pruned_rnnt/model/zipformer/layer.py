"""One Zipformer layer (arXiv 2310.11230, figure 2).

Axes: N batch, T frames, S frames attended to, E encoder width, H heads.

    weights  computed once, from the layer's input
    x += feedforward1;  x += nonlinear attention;  x += self-attention 1;  x += convolution 1
    x += feedforward2;  x = bypass from the input
    x += self-attention 2;  x += convolution 2;  x += feedforward3
    x = norm(x);  x = bypass from the input

Training skips branches and whole layers for some of the sequences, often at first and rarely later.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.zipformer.activation import SwooshLinear
from pruned_rnnt.model.zipformer.attention import (
    AttentionWeights,
    NonlinAttention,
    SelfAttention,
    uniform_weights,
)
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.config import StackConfig
from pruned_rnnt.model.zipformer.convolution import ConvolutionModule
from pruned_rnnt.model.zipformer.frames import Frames
from pruned_rnnt.model.zipformer.gradient import (
    Limits,
    grad_towards_limits,
    own_gradient,
    sample_limits,
)
from pruned_rnnt.model.zipformer.linear import Linear
from pruned_rnnt.model.zipformer.masks import NO_MASKS, LayerMasks
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.residual import add_branch, begin_stream
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule, ramp
from pruned_rnnt.model.zipformer.state import LayerState
from pruned_rnnt.model.zipformer.whiten import Whiten

DROPOUT = ramp(0.3, 0.1, 20000)
# Fractions of the sequences that skip a branch, and of the batches with uniform attention weights.
_SKIP_ATTENTION = Schedule(((0, 0.2), (4000, 0.05), (16000, 0.0)))
_SKIP_CONVOLUTION = _SKIP_ATTENTION
_SKIP_FEEDFORWARD = Schedule(((0, 0.1), (4000, 0.01), (50000, 0.0)))
_UNIFORM_WEIGHTS = ramp(0.25, 0.025, 4000)
# A bypass starts close to the new value, so that every module has to learn something.
_BYPASS_LOW = ramp(0.9, 0.2, 20000)


class ZipformerLayer(nn.Module):
    """(N, T, E) -> (N, T, E).

    Args:
        skip: fraction of the sequences that skip the layer in training.
    """

    def __init__(
        self, clock: Clock, config: StackConfig, causal: bool, skip: float | Schedule
    ) -> None:
        super().__init__()
        dim, heads, hidden_dim = config.dim, config.heads, config.feedforward_dim
        self.clock = clock
        self.self_attn_weights = AttentionWeights(
            clock,
            dim,
            heads,
            config.query_head_dim,
            config.position_head_dim,
            config.position_dim,
        )
        self.self_attn1 = SelfAttention(clock, dim, heads, config.value_head_dim)
        self.self_attn2 = SelfAttention(clock, dim, heads, config.value_head_dim)
        self.feed_forward1 = FeedForward(clock, dim, hidden_dim * 3 // 4)
        self.feed_forward2 = FeedForward(clock, dim, hidden_dim)
        self.feed_forward3 = FeedForward(clock, dim, hidden_dim * 5 // 4)
        self.nonlin_attention = NonlinAttention(clock, dim)
        self.conv_module1 = ConvolutionModule(clock, dim, config.kernel_size, causal)
        self.conv_module2 = ConvolutionModule(clock, dim, config.kernel_size, causal)
        self.bypass_mid = Bypass(clock, dim)
        self.norm = BiasNorm(clock, dim)
        self.bypass = Bypass(clock, dim, skip)
        self.balancer_na = _branch_balancer(clock, min_abs=ramp(0.004, 0.02, 4000), max_abs=100.0)
        self.balancer_ff2 = _branch_balancer(clock, min_abs=ramp(0.0, 0.1, 4000), max_abs=2.0)
        self.balancer_ff3 = _branch_balancer(clock, min_abs=ramp(0.0, 0.2, 4000), max_abs=4.0)
        self.balancer1 = Balancer(
            clock, min_positive=0.45, max_positive=0.55, min_abs=0.2, max_abs=4.0
        )
        self.balancer2 = Balancer(
            clock, min_positive=0.45, max_positive=0.55, min_abs=0.1, max_abs=4.0
        )
        self.whiten = Whiten(clock, ramp(4.0, 12.0, 20000))
        self.hidden_dims = (hidden_dim * 3 // 4, hidden_dim, hidden_dim * 5 // 4)
        self._cast_parameters = CastParameters(
            module
            for module in self.modules()
            if isinstance(module, (nn.Linear, nn.Conv1d, SwooshLinear))
        )

    def skips(self) -> tuple[float | Schedule, ...]:
        """Skip probabilities of the branches and the layer, in the order of `LayerMasks`."""
        return (
            _SKIP_ATTENTION,
            *(_SKIP_CONVOLUTION, _SKIP_CONVOLUTION),
            *(_SKIP_FEEDFORWARD, _SKIP_FEEDFORWARD),
            self.bypass.skip,
        )

    def forward(
        self,
        x_NTE: Tensor,
        frames: Frames,
        state: LayerState | None,
        masks: LayerMasks = NO_MASKS,
    ) -> tuple[Tensor, LayerState | None]:
        """The output frames, and the state for the next chunk if `state` is given."""
        with self._cast_parameters.cast(x_NTE):
            return self._forward(x_NTE, frames, state, masks)

    def _forward(
        self, x_NTE: Tensor, frames: Frames, state: LayerState | None, masks: LayerMasks
    ) -> tuple[Tensor, LayerState | None]:
        past: tuple[Tensor | None, ...] = (None,) * 6 if state is None else state
        # `in_NTE` is x in the dtype of autocast, as the modules use it.
        begin_NTE, in_NTE, in_copy_NTE = begin_stream(x_NTE, 2)
        weights_NHTS, keys = self.self_attn_weights(in_NTE, frames, past[0])
        x_NTE, in_NTE = add_branch(begin_NTE, self.feed_forward1(in_copy_NTE, masks.hidden1))

        first_NTS = weights_NHTS[:, 0]
        if self.training:
            first_NTS = uniform_weights(first_NTS, self.clock.choose(_UNIFORM_WEIGHTS))
        branch, nonlin = self.nonlin_attention(in_NTE, first_NTS, past[1])
        x_NTE, in_NTE = add_branch(x_NTE, self.balancer_na(branch), masks.attention)
        branch, values1 = self.self_attn1(in_NTE, weights_NHTS, past[2])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.attention)
        branch, convolution1 = self.conv_module1(in_NTE, frames, past[4])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.convolution1)
        branch = self.balancer_ff2(self.feed_forward2(in_NTE, masks.hidden2))
        x_NTE, _ = add_branch(x_NTE, branch, masks.feed_forward2, read=False)

        x_NTE, in_NTE = begin_stream(self.bypass_mid(begin_NTE, x_NTE))
        branch, values2 = self.self_attn2(in_NTE, weights_NHTS, past[3])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.attention)
        branch, convolution2 = self.conv_module2(in_NTE, frames, past[5])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.convolution2)
        branch = self.balancer_ff3(self.feed_forward3(in_NTE, masks.hidden3))
        x_NTE, _ = add_branch(x_NTE, branch, masks.feed_forward3, read=False)
        x_NTE = self.bypass(begin_NTE, self.norm(self.balancer1(x_NTE)), masks.bypass)
        x_NTE = self.whiten(self.balancer2(x_NTE))
        if self.clock.recorder is not None:
            # Others may hold the gradient of the output, which both of these change in place.
            x_NTE = own_gradient(x_NTE)
        if state is None:
            return x_NTE, None
        new = (keys, nonlin, values1, values2, convolution1, convolution2)
        return x_NTE, LayerState(*cast(tuple[Tensor, ...], new))


class FeedForward(nn.Module):
    """Projection to the hidden width, SwooshL, dropout, projection back to E."""

    def __init__(self, clock: Clock, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.in_proj = Linear(dim, hidden_dim)
        self.hidden_balancer = Balancer(
            clock, min_positive=0.3, max_positive=1.0, min_abs=0.75, max_abs=5.0
        )
        self.out_proj = SwooshLinear(hidden_dim, dim, "L", initial_scale=0.1)
        self.out_whiten = Whiten(clock, ramp(7.5, 15.0, 20000))

    def forward(self, x_NTE: Tensor, mask_N1E: Tensor | None) -> Tensor:
        hidden_NTE = self.hidden_balancer(self.in_proj(x_NTE))
        out_NTE: Tensor = self.out_whiten(self.out_proj(hidden_NTE, mask_N1E))
        return out_NTE


class Bypass(nn.Module):
    """before + (after - before) * scale, with a learned scale for each channel.

    Args:
        skip: fraction of the sequences for which the scale is zero in training.
    """

    def __init__(self, clock: Clock, dim: int, skip: float | Schedule = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.skip = skip
        self.bypass_scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(
        self,
        before_NTE: Tensor,
        after_NTE: Tensor,
        keep_N11: Tensor | None = None,
        *,
        rate: int = 1,
    ) -> Tensor:
        """(N, T, E) -> (N, T, E).

        Args:
            after_NTE: (N, T / rate, E); each of its frames is repeated `rate` times.
            keep_N11: multiplies the scale.
        """
        if not torch.is_grad_enabled():
            after_NTE = _repeated(after_NTE, rate)
            scale = self.bypass_scale if keep_N11 is None else self.bypass_scale * keep_N11
            return torch.lerp(before_NTE, after_NTE, scale)
        limits = None
        if self.training:
            limits = sample_limits(self.clock, _BYPASS_LOW, 1.0)
        mixed_NTE: Tensor = _Bypass.apply(  # type: ignore[no-untyped-call]
            before_NTE, after_NTE, self.bypass_scale, keep_N11, limits, rate
        )
        return mixed_NTE


def _repeated(x_NTE: Tensor, rate: int) -> Tensor:
    """Each frame `rate` times in a row."""
    if rate == 1:
        return x_NTE
    return x_NTE.unsqueeze(2).expand(-1, -1, rate, -1).flatten(1, 2)


class _Bypass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        before: Tensor,
        after: Tensor,
        scale: Tensor,
        keep: Tensor | None,
        limits: Limits | None,
        rate: int,
    ) -> Tensor:
        ctx.limits, ctx.rate = limits, rate
        ctx.fused = use_kernels(before, after) and before.dtype == after.dtype
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import bypass

            before, after = before.contiguous(), after.contiguous()
            ctx.save_for_backward(before, after, scale, keep)
            return bypass(before, after, scale, keep, rate=rate)
        ctx.save_for_backward(before, after, scale, keep)
        after = _repeated(after, rate)
        return torch.lerp(before, after, scale if keep is None else scale * keep)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        before, after, scale, keep = ctx.saved_tensors
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import bypass_backward

            of_before, of_after, of_scale = bypass_backward(
                before, after, scale, keep, grad.contiguous(), rate=ctx.rate
            )
            of_scale = grad_towards_limits(of_scale.to(scale.dtype), scale, ctx.limits)
            return of_before, of_after, of_scale, None, None, None
        after = _repeated(after, ctx.rate)
        of_after = grad * (scale if keep is None else scale * keep)
        of_scale = (after - before).mul_(grad)
        if keep is not None:
            of_scale = of_scale.sum(dim=1, keepdim=True).mul_(keep)
        of_scale = grad_towards_limits(of_scale.sum(dim=(0, 1)), scale, ctx.limits)
        of_before = grad - of_after
        if ctx.rate > 1:
            of_after = of_after.unflatten(1, (-1, ctx.rate)).sum(dim=2)
        return of_before, of_after, of_scale, None, None, None


def _branch_balancer(clock: Clock, min_abs: Schedule, max_abs: float) -> Balancer:
    """Acts on few batches: it prevents a rare problem, and its saved input takes memory."""
    return Balancer(
        clock,
        min_positive=0.3,
        max_positive=0.7,
        min_abs=min_abs,
        max_abs=max_abs,
        probability=0.05,
    )
