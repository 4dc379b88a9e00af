"""Attention in two parts: the weights, computed once per layer, and the modules that use them.

Axes: N batch, T frames, S frames attended to, E encoder width, H heads, K query width of a head,
P position width of a head, D width of a position encoding, R relative positions, C channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.linear import Linear, scaled_linear
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.recomputed import recomputed
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.frames import Frames, extend
from pruned_rnnt.model.zipformer.schedule import Clock, ramp
from pruned_rnnt.model.zipformer.scores import (
    ByPosition,
    SharedWeights,
    limit_scores,
    masked_softmax,
    split_heads,
)
from pruned_rnnt.model.zipformer.whiten import Whiten

# Fraction of the training batches on which the position term is left out.
_POSITION_SKIP = ramp(0.5, 0.0, 4000)


class AttentionWeights(nn.Module):
    """softmax(query . key + position query . position), with one projection of the input.

    The initial weights include the usual division by sqrt(K).

    Args:
        dim: E.
        heads: H.
        query_head_dim, position_head_dim, position_dim: K, P and D.
    """

    def __init__(
        self,
        clock: Clock,
        dim: int,
        heads: int,
        query_head_dim: int,
        position_head_dim: int,
        position_dim: int,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.heads = heads
        self.split = [query_head_dim * heads, query_head_dim * heads, position_head_dim * heads]
        self.in_proj = scaled_linear(dim, sum(self.split), query_head_dim**-0.25)
        self.linear_pos = scaled_linear(position_dim, position_head_dim * heads, 0.05, bias=False)
        # The softmax ignores a constant added to all keys, so only this balancer bounds their bias.
        self.balance_keys = Balancer(
            clock, min_positive=0.4, max_positive=0.6, min_abs=0.0, probability=0.025
        )
        self.whiten_keys = Whiten(clock, ramp(3.0, 6.0, 20000), strength=0.025, groups=heads)

    def forward(
        self, x_NTE: Tensor, frames: Frames, past_NSC: Tensor | None
    ) -> tuple[SharedWeights, Tensor | None]:
        """The weights, and the keys for the next chunk of a stream."""
        query, key, position_query = self.in_proj(x_NTE).split(self.split, dim=-1)
        key, past_NSC = extend(past_NSC, self.whiten_keys(self.balance_keys(key)))
        by_position, penalty_switch = None, None
        skip = self.clock.choose(_POSITION_SKIP) if self.training else False
        if skip is True:
            # Distributed training needs a gradient of every parameter, so linear_pos stays used.
            query = query + 0.0 * self.linear_pos.weight.sum()
        else:
            positions_RHP = self.linear_pos(frames.positions_RD).unflatten(-1, (self.heads, -1))
            if isinstance(skip, Tensor):
                positions_RHP = positions_RHP * (1.0 - skip).to(positions_RHP.dtype)
            by_position = ByPosition(position_query, positions_RHP.permute(1, 2, 0))
        scores = dot_products(query, key, self.heads)
        if self.training:
            scores, by_position, penalty_switch = limit_scores(scores, by_position, self.clock)
        weights = masked_softmax(scores, by_position, frames.blocked, penalty_switch)
        return weights, past_NSC


def dot_products(query_NTC: Tensor, key_NSC: Tensor, heads: int) -> Tensor:
    """(N, H, T, S): query . key of each head. The arguments are parts of one projection."""
    if not use_kernels(query_NTC, key_NSC):
        return split_heads(query_NTC, heads) @ split_heads(key_NSC, heads).mT
    scores_NHTS: Tensor = applied(_DotProducts, query_NTC, key_NSC, heads)
    return scores_NHTS


class _DotProducts(torch.autograd.Function):
    """Saves the projection, as other functions do; autograd would save copies of its parts."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, heads: int) -> Tensor:
        from pruned_rnnt.model.kernels.attention import to_heads

        ctx.save_for_backward(query, key)
        ctx.heads = heads
        return to_heads(query, heads) @ to_heads(key, heads).mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from pruned_rnnt.model.kernels.attention import from_heads, to_heads

        query, key = ctx.saved_tensors
        grad, width = grad.contiguous(), query.size(-1) // ctx.heads
        of_query = from_heads(grad @ to_heads(key, ctx.heads), width)
        return of_query, from_heads(grad.mT @ to_heads(query, ctx.heads), width), None


def weighted_sums(weights_NHTS: Tensor, value_NSC: Tensor) -> Tensor:
    """(N, T, C): sums of the values of each head with the weights of the head."""
    if not use_kernels(weights_NHTS, value_NSC) or weights_NHTS.dtype != value_NSC.dtype:
        value_NHSC = split_heads(value_NSC, weights_NHTS.size(1))
        return (weights_NHTS @ value_NHSC).transpose(1, 2).flatten(2)
    sums_NTC: Tensor = applied(_WeightedSums, weights_NHTS, value_NSC)
    return sums_NTC


class _WeightedSums(torch.autograd.Function):
    """Saves its arguments; autograd would save a copy of the values."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        from pruned_rnnt.model.kernels.attention import from_heads, to_heads

        ctx.save_for_backward(weights, value)
        heads = weights.size(1)
        return from_heads(weights @ to_heads(value, heads), value.size(-1) // heads)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from pruned_rnnt.model.kernels.attention import from_heads, to_heads

        weights, value = ctx.saved_tensors
        heads = weights.size(1)
        grad_NHTP = to_heads(grad, heads)
        of_weights = grad_NHTP @ to_heads(value, heads).mT
        return of_weights, from_heads(weights.mT @ grad_NHTP, value.size(-1) // heads)


def uniform_weights(weights_NTS: Tensor) -> Tensor:
    """Equal weights for all frames whose weight is not zero."""
    attended = (weights_NTS > 0.0).to(weights_NTS.dtype)
    return attended / attended.sum(dim=-1, keepdim=True)


class SelfAttention(nn.Module):
    """Weighted sums of the values of each head, and a projection back to (N, T, E)."""

    def __init__(self, clock: Clock, dim: int, heads: int, value_head_dim: int) -> None:
        super().__init__()
        self.in_proj = Linear(dim, heads * value_head_dim)
        self.out_proj = scaled_linear(heads * value_head_dim, dim, 0.05)
        self.whiten = Whiten(clock, ramp(7.5, 22.5, 20000))

    def forward(
        self, x_NTE: Tensor, weights_NHTS: Tensor, past_NSC: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(N, T, E), and the values for the next chunk of a stream."""
        value_NSC, past_NSC = extend(past_NSC, self.in_proj(x_NTE))
        context_NTC = weighted_sums(weights_NHTS, value_NSC)
        return self.whiten(self.out_proj(context_NTC)), past_NSC


class NonlinAttention(nn.Module):
    """out(a * (W (tanh(b) * c))); one projection gives a, b, c, and W are one head's weights."""

    def __init__(self, clock: Clock, dim: int) -> None:
        super().__init__()
        hidden_dim = 3 * dim // 4
        self.in_proj = Linear(dim, 3 * hidden_dim)
        self.balancer = Balancer(
            clock,
            min_positive=ramp(0.25, 0.05, 20000),
            max_positive=ramp(0.75, 0.95, 20000),
            min_abs=0.5,
            max_abs=5.0,
        )
        self.whiten1 = Whiten(clock, ramp(5.0, 10.0, 20000))
        self.out_proj = scaled_linear(hidden_dim, dim, 0.05)
        self.whiten2 = Whiten(clock, ramp(5.0, 15.0, 20000))

    def forward(
        self,
        x_NTE: Tensor,
        weights_NTS: Tensor,
        past_NSC: Tensor | None,
        uniform: bool | Tensor = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(N, T, E), and the frames tanh(b) * c for the next chunk of a stream.

        `uniform` is as for `sums_of_squashed`.
        """
        squashed, value, gate = self.in_proj(x_NTE).chunk(3, dim=-1)
        value, squashed = self.whiten1(value), self.balancer(squashed)
        if past_NSC is None:
            summed_NTC = sums_of_squashed(weights_NTS, value, squashed, uniform)
        else:
            mixed_NSC, past_NSC = extend(past_NSC, value * torch.tanh(squashed))
            summed_NTC = weights_NTS @ mixed_NSC
        gated_NTC = gated(summed_NTC, gate)
        with recomputed(gated_NTC, partial(gated, summed_NTC.detach(), gate.detach())):
            out_NTE = self.out_proj(gated_NTC)
        return self.whiten2(out_NTE), past_NSC


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * gate."""
    if not use_kernels(x, gate) or x.dtype != gate.dtype:
        return x * gate
    product: Tensor = applied(_Gate, x, gate)
    return product


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        from pruned_rnnt.model.kernels.attention import product

        x = x.contiguous()
        ctx.save_for_backward(x, gate)
        return product(x, gate)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from pruned_rnnt.model.kernels.attention import product_backward

        x, gate = ctx.saved_tensors
        return product_backward(x, gate, grad.contiguous())


def sums_of_squashed(
    weights_NTS: Tensor, value_NSC: Tensor, squashed_NSC: Tensor, uniform: bool | Tensor
) -> Tensor:
    """(N, T, C): sums of value * tanh(squashed) with these weights.

    Args:
        uniform: (1,) float32 on the device; if it is 1, all frames whose weight is not zero get
            equal weights instead.
    """
    if uniform is True:
        weights_NTS = uniform_weights(weights_NTS)
    chosen = uniform if isinstance(uniform, Tensor) else None
    if not use_kernels(weights_NTS, value_NSC, squashed_NSC):
        if chosen is not None:
            weights_NTS = torch.where(chosen > 0.0, uniform_weights(weights_NTS), weights_NTS)
        return weights_NTS @ (value_NSC * torch.tanh(squashed_NSC))
    summed_NTC: Tensor = applied(_SumsOfSquashed, weights_NTS, value_NSC, squashed_NSC, chosen)
    return summed_NTC


class _SumsOfSquashed(torch.autograd.Function):
    """Saves only its arguments, which other functions save as well."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, value: Tensor, squashed: Tensor, uniform: Tensor | None
    ) -> Tensor:
        from pruned_rnnt.model.kernels.attention import squash

        ctx.save_for_backward(weights, value, squashed)
        ctx.uniform = uniform
        return _chosen_weights(weights, uniform) @ squash(value, squashed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from pruned_rnnt.model.kernels.attention import squash, squash_backward

        weights, value, squashed = ctx.saved_tensors
        uniform = ctx.uniform
        # Autocast casts the factors of the product in forward, but nothing in backward. Uniform
        # weights have no gradient.
        product = squash(value, squashed, off=uniform).to(grad.dtype)
        of_weights = (grad @ product.mT).to(weights.dtype)
        of_product = _chosen_weights(weights, uniform).to(grad.dtype).mT @ grad
        of_value, of_squashed = squash_backward(value, squashed, of_product.contiguous())
        return of_weights, of_value, of_squashed, None


def _chosen_weights(weights: Tensor, uniform: Tensor | None) -> Tensor:
    from pruned_rnnt.model.kernels.attention import uniform_if

    return weights if uniform is None else uniform_if(weights, uniform)
