"""One Zipformer layer (arXiv 2310.11230, figure 2), its state, and its random masks of training.

Axes: N batch or streams, T frames, S frames attended to, E encoder width, H heads, K masks,
W channels of all masks together.

    weights  computed once, from the layer's input
    x += feedforward1;  x += nonlinear attention;  x += self-attention 1;  x += convolution 1
    x += feedforward2;  x = bypass from the input
    x += self-attention 2;  x += convolution 2;  x += feedforward3
    x = norm(x);  x = bypass from the input

Training skips branches and whole layers for some of the sequences, often at first and rarely later,
and drops channels. The masks of all layers are sampled together; one by one they would take more
kernel launches than attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.zipformer.activation import SwooshLinear
from pruned_rnnt.model.zipformer.attention import (
    AttentionWeights,
    NonlinAttention,
    SelfAttention,
)
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.config import StackConfig
from pruned_rnnt.model.zipformer.convolution import ConvolutionModule
from pruned_rnnt.model.zipformer.frames import Frames
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.residual import Bypass, add_branch, begin_stream, end_of_layer
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule, ramp
from pruned_rnnt.model.zipformer.whiten import Whiten

DROPOUT = ramp(0.3, 0.1, 20000)
# Fractions of the sequences that skip a branch, and of the batches with uniform attention weights.
_SKIP_ATTENTION = Schedule(((0, 0.2), (4000, 0.05), (16000, 0.0)))
_SKIP_CONVOLUTION = _SKIP_ATTENTION
_SKIP_FEEDFORWARD = Schedule(((0, 0.1), (4000, 0.01), (50000, 0.0)))
_UNIFORM_WEIGHTS = ramp(0.25, 0.025, 4000)


class LayerState(NamedTuple):
    """State of the streams of a layer between chunks, at the rate of its stack.

    Axis 0 of every tensor is the stream; P cached frames of attention, K kernel size.

    keys: (N, P, heads * query_head_dim).
    nonlin: (N, P, 3 E / 4), input of the weighted sum in the nonlinear attention.
    values1, values2: (N, P, heads * value_head_dim).
    convolution1, convolution2: (N, K // 2, E), gated frames.
    """

    keys: Tensor
    nonlin: Tensor
    values1: Tensor
    values2: Tensor
    convolution1: Tensor
    convolution2: Tensor


class LayerMasks(NamedTuple):
    """Masks of one layer; None means that nothing is left out.

    The first six, for branches and the whole layer, are (N, 1, 1) of 0 and 1. The last three, for
    the hidden layers of the feed-forward modules, are (N, 1, channels) of 0 and 1 / (1 - dropout).
    """

    attention: Tensor | None = None
    convolution1: Tensor | None = None
    convolution2: Tensor | None = None
    feed_forward2: Tensor | None = None
    feed_forward3: Tensor | None = None
    bypass: Tensor | None = None
    hidden1: Tensor | None = None
    hidden2: Tensor | None = None
    hidden3: Tensor | None = None


NO_MASKS = LayerMasks()


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
        x_NTE, of_middle_NTE, of_end_NTE, in_NTE, in_copy_NTE = begin_stream(
            x_NTE, streams=3, readers=2
        )
        weights, keys = self.self_attn_weights(in_NTE, frames, past[0])
        x_NTE, in_NTE = add_branch(x_NTE, self.feed_forward1(in_copy_NTE, masks.hidden1))

        uniform = self.clock.choose(_UNIFORM_WEIGHTS) if self.training else False
        branch, nonlin = self.nonlin_attention(in_NTE, weights.first_NTS, past[1], uniform)
        x_NTE, in_NTE = add_branch(x_NTE, self.balancer_na(branch), masks.attention)
        branch, values1 = self.self_attn1(in_NTE, weights.one_NHTS, past[2])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.attention)
        branch, convolution1 = self.conv_module1(in_NTE, frames, past[4])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.convolution1)
        branch = self.balancer_ff2(self.feed_forward2(in_NTE, masks.hidden2))
        x_NTE, _ = add_branch(x_NTE, branch, masks.feed_forward2, read=False)

        x_NTE, in_NTE = begin_stream(self.bypass_mid(of_middle_NTE, x_NTE))
        branch, values2 = self.self_attn2(in_NTE, weights.other_NHTS, past[3])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.attention)
        branch, convolution2 = self.conv_module2(in_NTE, frames, past[5])
        x_NTE, in_NTE = add_branch(x_NTE, branch, masks.convolution2)
        branch = self.balancer_ff3(self.feed_forward3(in_NTE, masks.hidden3))
        x_NTE, _ = add_branch(x_NTE, branch, masks.feed_forward3, read=False)
        x_NTE = end_of_layer(
            of_end_NTE,
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


def sample_layer_masks(
    clock: Clock,
    skips: Sequence[Sequence[float | Schedule]],
    widths: Sequence[Sequence[int]],
    dropout: float | Schedule,
    like: Tensor,
) -> list[LayerMasks]:
    """Masks of all layers.

    Args:
        clock: evaluates skip and dropout rates.
        skips: for each layer, the skip rates in the order of the masks.
        widths: for each layer, the channels of its hidden layers.
        dropout: dropout rate of the hidden layers.
        like: (N, ...) tensor whose dtype and device the masks of branches have.
    """
    rates = [rate for of_layer in skips for rate in of_layer]
    active = [index for index, rate in enumerate(rates) if clock.drops(rate)]
    keeps: list[Tensor | None] = [None] * len(rates)
    if active:
        rates_K = clock.numbers(
            lambda: [clock.dropout_rate(rates[index]) for index in active], like.device
        )
        uniform_KN11 = torch.rand((len(active), like.size(0), 1, 1), device=like.device)
        keep_KN11 = (uniform_KN11 >= rates_K[:, None, None, None]).to(like.dtype)
        for index, keep_N11 in zip(active, keep_KN11.unbind(), strict=True):
            keeps[index] = keep_N11
    flat_widths = [width for of_layer in widths for width in of_layer]
    hidden: Sequence[Tensor | None] = [None] * len(flat_widths)
    rate = clock.dropout_rate_on(dropout, like.device)
    mask_N1W = dropout_mask(like.size(0), sum(flat_widths), rate, like.device)
    if mask_N1W is not None:
        hidden = mask_N1W.split(flat_widths, dim=-1)
    return [
        LayerMasks(*of_keeps, *of_hidden)
        for of_keeps, of_hidden in zip(
            _split_evenly(keeps, len(skips)), _split_evenly(hidden, len(skips)), strict=True
        )
    ]


def _split_evenly(masks: Sequence[Tensor | None], parts: int) -> list[Sequence[Tensor | None]]:
    each = len(masks) // parts
    return [masks[each * part : each * (part + 1)] for part in range(parts)]


def dropout_mask(
    count: int, width: int, rate: float | Tensor | None, device: torch.device
) -> Tensor | None:
    """(N, 1, W) float32 of 0 and 1 / (1 - rate), the same for all frames of a sequence.

    None if the rate, of `Clock.dropout_rate_on`, is None.
    """
    if rate is None:
        return None
    kept_N1W = torch.rand((count, 1, width), device=device) >= rate
    return kept_N1W / (1.0 - rate)


def keep_mask(x: Tensor, skip: float | Tensor | None) -> Tensor | None:
    """(N, 1, ..) of 0 (with probability `skip`) and 1, in the dtype of x.

    None if the rate, of `Clock.dropout_rate_on`, is None.
    """
    if skip is None:
        return None
    shape = (x.size(0),) + (1,) * (x.dim() - 1)
    return (torch.rand(shape, device=x.device) >= skip).to(x.dtype)
