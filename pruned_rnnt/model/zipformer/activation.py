"""Swoosh activations, and a linear layer that recomputes its activation in the backward pass.

    SwooshL(x) = log(1 + exp(x - 4)) - 0.08 x - 0.035
    SwooshR(x) = log(1 + exp(x - 1)) - 0.08 x - 0.313261687         (arXiv 2310.11230, section 3.3)

Axes: N batch, T frames, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.cast_parameters import is_cast
from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.joined_frames import channels_last
from pruned_rnnt.model.kernels.available import use_kernels, use_own_function
from pruned_rnnt.model.linear import (
    bias_gradient,
    scaled_linear,
    weight_gradient,
)
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.side_branch import beside
from pruned_rnnt.ops.common.library import accumulator

Kind = Literal["L", "R"]
# The offsets make SwooshR(0) zero and SwooshL(0) nearly zero.
_SHIFT: dict[str, float] = {"L": 4.0, "R": 1.0}
_OFFSET: dict[str, float] = {"L": 0.035, "R": 0.313261687}
_SLOPE = 0.08


def swoosh(x: Tensor, kind: Kind) -> Tensor:
    """The activation, computed in at least float32 and returned in the dtype of x."""
    x_exact = x.to(accumulator(x.dtype))
    # In place: on a CPU, new memory takes longer than the sums.
    value = functional.softplus(x_exact - _SHIFT[kind])
    return value.sub_(x_exact, alpha=_SLOPE).sub_(_OFFSET[kind]).to(x.dtype)


class _LogSumSwoosh:
    """swoosh(x) = log(exp(y) + exp(a)) - 0.08 y with y = x + a - shift; `a` includes the offset.

    This form takes only three kernels, including casts; kernel launches cost time in training.
    """

    def __init__(self, x: Tensor, kind: Kind) -> None:
        dtype = accumulator(x.dtype)
        a = -(_SLOPE * _SHIFT[kind] + _OFFSET[kind]) / (1.0 - _SLOPE)
        self.x = x
        self.a = _constant(a, dtype, x.device)
        self.y = x + _constant(a - _SHIFT[kind], dtype, x.device)

    def forward(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """swoosh(x) * mask in `dtype`."""
        log, out = torch.logaddexp(self.y, self.a), torch.empty_like(self.x, dtype=dtype)
        if mask is None:
            return torch.add(log, self.y, alpha=-_SLOPE, out=out)
        return torch.mul(log.add_(self.y, alpha=-_SLOPE), mask, out=out)

    def backward(self, grad: Tensor) -> Tensor:
        """grad * swoosh'(x) in the dtype of x. Overwrites y: call this last."""
        through_softplus = torch.ops.aten.softplus_backward(grad, self.y.sub_(self.a), 1.0, 20.0)
        return torch.add(through_softplus, grad, alpha=-_SLOPE, out=torch.empty_like(self.x))


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(1,); its sum with a tensor of a narrower dtype has `dtype`, unlike a sum with a number.

    New for each call: a tensor kept for the process would be undefined if the first call belonged
    to the capture of a CUDA graph, and any write to its memory would spoil all later passes.
    """
    return torch.full((1,), value, dtype=dtype, device=device)


class Swoosh(nn.Module):
    """The activation as a module; saves only its input for the backward pass."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind: Kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not use_own_function(x, differentiable=x.requires_grad):
            return swoosh(x, self.kind)
        activated: Tensor = applied(_Swoosh, x, self.kind, None)
        return activated

    def of_maps(self, x_1CLF: Tensor, real_L: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The activation of joined maps, zero in frames that are not real, with channels last; and
        a function that repeats it without gradients. For fused kernels."""
        x_LFC = channels_last(x_1CLF).movedim(1, -1).squeeze(0)
        mask_L1C = real_L[:, None, None].float().expand(-1, 1, x_LFC.size(-1)).contiguous()

        def activated(x_LFC: Tensor) -> Tensor:
            out_LFC: Tensor = applied(_Swoosh, x_LFC, self.kind, mask_L1C)
            return channels_last(out_LFC.unsqueeze(0).movedim(-1, 1))

        constant_LFC = x_LFC.detach()
        return activated(x_LFC), lambda: activated(constant_LFC)

    def again(self, x: Tensor) -> Callable[[], Tensor]:
        """A function that repeats `forward` of training, without gradients."""
        x = x.detach()
        return lambda: _activated(_dense(x) if use_kernels(x) else x, self.kind)


class _Swoosh(torch.autograd.Function):
    """swoosh(x), times a mask (N, 1, C) if there is one; x is then contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Kind, mask: Tensor | None) -> Tensor:
        ctx.kind, ctx.fused = kind, use_kernels(x)
        x = _dense(x) if ctx.fused else x
        ctx.save_for_backward(x, mask)
        return _activated(x, kind, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, mask = ctx.saved_tensors
        if ctx.fused:
            from pruned_rnnt.model.kernels.swoosh import swoosh_backward

            grad = _ordered_like(grad, x)
            return swoosh_backward(x, mask, grad, _constants(ctx.kind))[0], None, None
        grad = grad if mask is None else grad * mask
        return _LogSumSwoosh(x, ctx.kind).backward(grad), None, None


def _activated(x: Tensor, kind: Kind, mask: Tensor | None = None) -> Tensor:
    """swoosh(x) * mask for dense x."""
    if use_kernels(x):
        from pruned_rnnt.model.kernels.swoosh import swoosh_forward

        return swoosh_forward(x, mask, _constants(kind), x.dtype)
    return _LogSumSwoosh(x, kind).forward(mask, x.dtype)


def _constants(kind: Kind) -> tuple[float, float, float]:
    """Shift, offset and slope."""
    return _SHIFT[kind], _OFFSET[kind], _SLOPE


def _dense(x: Tensor) -> Tensor:
    """x without gaps in memory: as it is if contiguous or channels last, else made contiguous."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return channels_last(x)
    return x.contiguous()


def _ordered_like(grad: Tensor, x: Tensor) -> Tensor:
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x, dtype=grad.dtype).copy_(grad)


class SwooshLinear(nn.Module):
    """Swoosh, dropout, linear layer: (N, T, C) -> (N, T, output_dim).

    Saves only its input for the backward pass.

    Args:
        initial_scale: factor on the initial weights of nn.Linear.
    """

    def __init__(self, input_dim: int, output_dim: int, kind: Kind, initial_scale: float) -> None:
        super().__init__()
        linear = scaled_linear(input_dim, output_dim, initial_scale)
        self.weight, self.bias = linear.weight, linear.bias
        self.kind: Kind = kind

    def forward(self, x_NTC: Tensor, mask_N1C: Tensor | None = None) -> Tensor:
        """`mask_N1C`, from `dropout_mask`, multiplies the activations."""
        return swoosh_linear(x_NTC, self.weight, self.bias, mask_N1C, self.kind)


def swoosh_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask_N1C: Tensor | None, kind: Kind
) -> Tensor:
    """As `SwooshLinear`, with these parameters; without a mask, x may be (..., C)."""
    assert bias is not None
    if not use_own_function(x):
        hidden = swoosh(x, kind)
        if mask_N1C is not None:
            hidden = (hidden * mask_N1C).to(hidden.dtype)
        return functional.linear(hidden, weight, bias)
    output: Tensor = applied(_SwooshLinear, x, weight, bias, mask_N1C, kind)
    return output


class _SwooshLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Kind
    ) -> Tensor:
        dtype = compute_dtype(x, weight)
        ctx.kind, ctx.dtype, ctx.fused = kind, dtype, use_kernels(x)
        ctx.beside = is_cast(weight) and is_cast(bias)
        if ctx.fused:
            from pruned_rnnt.model.kernels.swoosh import swoosh_forward

            x = x.contiguous()
            hidden = swoosh_forward(x, mask, _constants(kind), dtype)
        else:
            hidden = _LogSumSwoosh(x, kind).forward(mask, dtype)
        ctx.save_for_backward(x, weight, mask)
        return functional.linear(hidden, weight.to(dtype), bias.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight, mask = ctx.saved_tensors
        grad_hidden = grad @ weight.to(ctx.dtype)
        if ctx.fused:
            from pruned_rnnt.model.kernels.swoosh import swoosh_backward

            constants = _constants(ctx.kind)
            grad_x, hidden = swoosh_backward(x, mask, grad_hidden, constants, ctx.dtype)
            assert hidden is not None
        else:
            activation = _LogSumSwoosh(x, ctx.kind)
            hidden = activation.forward(mask, ctx.dtype)
            grad_x = activation.backward(grad_hidden if mask is None else grad_hidden * mask)
        of_weight, of_bias = None, None
        with beside(grad, hidden, where=ctx.beside):
            if ctx.needs_input_grad[1]:
                of_weight = weight_gradient(grad, hidden).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = bias_gradient(grad, weight.dtype)
        return grad_x, of_weight, of_bias, None, None
