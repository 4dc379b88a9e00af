"""Swoosh activations, and a linear layer which recomputes its activation in the backward pass.

    SwooshL(x) = log(1 + exp(x - 4)) - 0.08 x - 0.035
    SwooshR(x) = log(1 + exp(x - 1)) - 0.08 x - 0.313261687         (arXiv 2310.11230, section 3.3)

Axes: N batch, T frames, C channels.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule

Kind = Literal["L", "R"]
# Where each bends, and what makes SwooshR(0) zero and SwooshL nearly so.
_SHIFT: dict[str, float] = {"L": 4.0, "R": 1.0}
_OFFSET: dict[str, float] = {"L": 0.035, "R": 0.313261687}
_SLOPE = 0.08


def swoosh(x: Tensor, kind: Kind) -> Tensor:
    """The activation, computed in float32 at least, returned in the dtype of x."""
    shifted = _widen(x) - _SHIFT[kind]
    value = functional.softplus(shifted) - (_OFFSET[kind] + _SLOPE * _SHIFT[kind])
    return value.add(shifted, alpha=-_SLOPE).to(x.dtype)


def _times_slope(grad: Tensor, x: Tensor, kind: Kind) -> Tensor:
    """grad * swoosh'(x), in the dtype of x; for backward passes alone."""
    slope = (_widen(x) - _SHIFT[kind]).sigmoid_().sub_(_SLOPE)
    return slope.mul_(grad).to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Swoosh(nn.Module):
    """The activation as a module; keeps its input alone for the backward pass."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind: Kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return swoosh(x, self.kind)
        activated: Tensor = _Swoosh.apply(x, self.kind)  # type: ignore[no-untyped-call]
        return activated


class _Swoosh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Kind) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return swoosh(x, kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _times_slope(grad, x, ctx.kind), None


class SwooshLinear(nn.Module):
    """Swoosh, dropout, linear layer: (N, T, C) -> (N, T, output_dim).

    Only the input is kept for the backward pass. A channel is dropped for all frames of a sequence.

    Args:
        initial_scale: of the initial weights, against those of nn.Linear.
    """

    def __init__(
        self,
        clock: Clock,
        input_dim: int,
        output_dim: int,
        kind: Kind,
        dropout: float | Schedule,
        initial_scale: float,
    ) -> None:
        super().__init__()
        linear = scaled_linear(input_dim, output_dim, initial_scale)
        self.weight, self.bias = linear.weight, linear.bias
        self.clock = clock
        self.kind: Kind = kind
        self.dropout = dropout

    def forward(self, x_NTC: Tensor) -> Tensor:
        mask_N1C = sequence_dropout_mask(x_NTC, self.clock.share(self.dropout), self.training)
        if not torch.is_grad_enabled():
            hidden = swoosh(x_NTC, self.kind)
            if mask_N1C is not None:
                hidden = hidden * mask_N1C
            return functional.linear(hidden, self.weight, self.bias)
        output: Tensor = _SwooshLinear.apply(  # type: ignore[no-untyped-call]
            x_NTC, self.weight, self.bias, mask_N1C, self.kind
        )
        return output


class _SwooshLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Kind
    ) -> Tensor:
        dtype = compute_dtype(x, weight)
        ctx.save_for_backward(x, weight, mask)
        ctx.kind, ctx.dtype = kind, dtype
        hidden = _dropped(x, mask, kind, dtype)
        return functional.linear(hidden, weight.to(dtype), bias.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mask = ctx.saved_tensors
        hidden = _dropped(x, mask, ctx.kind, ctx.dtype)
        rows = grad.flatten(0, -2)
        grad_hidden = grad @ weight.to(ctx.dtype)
        if mask is not None:
            grad_hidden = grad_hidden * mask
        return (
            _times_slope(grad_hidden, x, ctx.kind),
            (rows.t() @ hidden.flatten(0, -2)).to(weight.dtype),
            rows.sum(dim=0, dtype=weight.dtype),
            None,
            None,
        )


def _dropped(x: Tensor, mask: Tensor | None, kind: Kind, dtype: torch.dtype) -> Tensor:
    hidden = swoosh(x, kind)
    return (hidden if mask is None else hidden * mask).to(dtype)


def sequence_dropout_mask(x_NTC: Tensor, rate: float, training: bool) -> Tensor | None:
    """(N, 1, C) of 0 and 1 / (1 - rate); None where nothing is dropped."""
    if not training or rate <= 0.0:
        return None
    kept_N1C = torch.rand_like(x_NTC[:, :1], dtype=torch.float32) >= rate
    return kept_N1C.to(x_NTC.dtype) / (1.0 - rate)


def scaled_linear(
    input_dim: int, output_dim: int, initial_scale: float = 1.0, bias: bool = True
) -> nn.Linear:
    """nn.Linear with initial weights times `initial_scale` and biases within a tenth of it."""
    linear = nn.Linear(input_dim, output_dim, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(initial_scale)
        if bias:
            linear.bias.uniform_(-0.1 * initial_scale, 0.1 * initial_scale)
    return linear
