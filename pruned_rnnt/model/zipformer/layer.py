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

from typing import cast

from torch import Tensor, nn

from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.zipformer.activation import SwooshLinear
from pruned_rnnt.model.zipformer.attention import (
    AttentionWeights,
    NonlinAttention,
    SelfAttention,
    share_weights,
)
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.bypass import Bypass, end_of_layer
from pruned_rnnt.model.zipformer.config import StackConfig
from pruned_rnnt.model.zipformer.convolution import ConvolutionModule
from pruned_rnnt.model.zipformer.frames import Frames
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
        mask_N1E: Tensor | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """The output frames, and the state for the next chunk if `state` is given.

        `mask_N1E` multiplies the output.
        """
        with self._cast_parameters.cast(x_NTE):
            return self._forward(x_NTE, frames, state, masks, mask_N1E)

    def _forward(
        self,
        x_NTE: Tensor,
        frames: Frames,
        state: LayerState | None,
        masks: LayerMasks,
        mask_N1E: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        past: tuple[Tensor | None, ...] = (None,) * 6 if state is None else state
        # `in_NTE` is x in the dtype of autocast, as the modules use it.
        begin_NTE, in_NTE, in_copy_NTE = begin_stream(x_NTE, 2)
        weights_NHTS, keys = self.self_attn_weights(in_NTE, frames, past[0])
        first_NTS, weights1_NHTS, weights2_NHTS = share_weights(weights_NHTS)
        x_NTE, in_NTE = add_branch(begin_NTE, self.feed_forward1(in_copy_NTE, masks.hidden1))

        uniform = self.clock.choose(_UNIFORM_WEIGHTS) if self.training else False
        branch, nonlin = self.nonlin_attention(in_NTE, first_NTS, past[1], uniform)
        x_NTE, in_NTE = add_branch(x_NTE, self.balancer_na(branch), masks.attention)
        branch, values1 = self.self_attn1(in_NTE, weights1_NHTS, past[2])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.attention)
        branch, convolution1 = self.conv_module1(in_NTE, frames, past[4])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.convolution1)
        branch = self.balancer_ff2(self.feed_forward2(in_NTE, masks.hidden2))
        x_NTE, _ = add_branch(x_NTE, branch, masks.feed_forward2, read=False)

        x_NTE, in_NTE = begin_stream(self.bypass_mid(begin_NTE, x_NTE))
        branch, values2 = self.self_attn2(in_NTE, weights2_NHTS, past[3])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.attention)
        branch, convolution2 = self.conv_module2(in_NTE, frames, past[5])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.convolution2)
        branch = self.balancer_ff3(self.feed_forward3(in_NTE, masks.hidden3))
        x_NTE, _ = add_branch(x_NTE, branch, masks.feed_forward3, read=False)
        x_NTE = end_of_layer(
            begin_NTE,
            self.balancer1(x_NTE),
            masks.bypass,
            mask_N1E,
            norm=self.norm,
            bypass=self.bypass,
            balancer=self.balancer2,
            whiten=self.whiten,
        )
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
