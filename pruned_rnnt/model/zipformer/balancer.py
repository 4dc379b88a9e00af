"""Balancer: keeps the statistics of each channel within limits by changing the gradient.

The forward pass is the identity. With mean m, standard deviation s and root mean square r of a
channel over all other axes, the backward pass adds to each gradient element its own magnitude
times a small multiple of the gradient of

    |m/s - clamp(m/s, mean limits)| + |log(clamp(r, rms limits) / r)|

normalised to a root mean square of one per channel (arXiv 2310.11230, section 3.4). Limits are
given as the fraction of positive values and the mean absolute value of normal data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.joined_frames import channels_last
from pruned_rnnt.model.side_branch import beside, may_launch_early
from pruned_rnnt.model.zipformer.schedule import Clock, Recorder, Schedule, ramp
from pruned_rnnt.ops.common.library import accumulator

_ABS_TO_RMS = math.sqrt(math.pi / 2)
# Default fraction of the batches on which a balancer acts.
_PROBABILITY = ramp(0.5, 0.125, 8000)
_STRENGTH = 0.04
_TINY = 1e-20
_INACTIVE = (0.0,) * 5


class Balancer(nn.Module):
    """Identity with the gradient described above, on some of the batches.

    Args:
        channel_axis: axis of the input with the channels.
        upper_half: balance only the upper half of the channels.
        min_positive, max_positive: limits on the fraction of positive values, 0 to 1.
        min_abs, max_abs: limits on the mean absolute value.
        probability: fraction of the batches on which it acts.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        channel_axis: int = -1,
        upper_half: bool = False,
        min_positive: float | Schedule = 0.05,
        max_positive: float | Schedule = 0.95,
        min_abs: float | Schedule = 0.2,
        max_abs: float | Schedule = 100.0,
        probability: float | Schedule = _PROBABILITY,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.channel_axis = channel_axis
        self.upper_half = upper_half
        self.min_positive = min_positive
        self.max_positive = max_positive
        self.min_abs = min_abs
        self.max_abs = max_abs
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and x.requires_grad):
            return x
        axis = self.channel_axis % x.dim()
        balanced: Tensor
        if self.clock.recorder is not None:
            balanced = _SwitchedBalance.apply(  # type: ignore[no-untyped-call]
                x, axis, self, self.record(self.clock.recorder)
            )
            return balanced
        if not self.clock.bernoulli(self.clock.value(self.probability)):
            return x
        balanced = _Balance.apply(  # type: ignore[no-untyped-call]
            x, axis, self.upper_half, *self._limits()
        )
        return balanced

    def record(self, recorder: Recorder) -> Tensor:
        """(5,) on the device: the settings of `change_gradient` in a captured pass."""
        return recorder.add(self._settings, 5)

    def sums(self, x: Tensor, settings: Tensor) -> Tensor:
        """What `change_gradient` needs to know of x."""
        from pruned_rnnt.model.kernels.balance import balance_sums

        return balance_sums(self._balanced(x), settings)

    def change_gradient(
        self, x: Tensor, grad: Tensor, settings: Tensor, sums: Tensor | None = None
    ) -> None:
        """Change the gradient of x in place if the settings say so; by fused kernels.

        Args:
            x, grad: with the channels last; `grad` is contiguous.
            sums: if they were computed before.
        """
        from pruned_rnnt.model.kernels.balance import balance_gradient

        balance_gradient(self._balanced(x), self._balanced(grad), settings, _STRENGTH, sums)

    def _balanced(self, x: Tensor) -> Tensor:
        return x[..., x.size(-1) // 2 :] if self.upper_half else x

    def _limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Limits of mean / standard deviation, and of the root mean square."""
        value = self.clock.value
        return (
            (_mean_limit(value(self.min_positive)), _mean_limit(value(self.max_positive))),
            (_ABS_TO_RMS * value(self.min_abs), _ABS_TO_RMS * value(self.max_abs)),
        )

    def _settings(self) -> Sequence[float]:
        """Whether to act on this batch (0 or 1), and the limits."""
        if not self.clock.bernoulli(self.clock.value(self.probability)):
            return _INACTIVE
        mean_limits, rms_limits = self._limits()
        return (1.0, *mean_limits, *rms_limits)


def _mean_limit(positive: float) -> float:
    """Mean / standard deviation for a fraction of positive values: approximate, finite at 0 and 1.

    The constant, 1 / (sqrt(pi) ln 2), fits atanh to the inverse of the error function.
    """
    balance, margin = 2.0 * positive - 1.0, 1e-10
    return 0.8139535143 * 0.5 * math.log((1.0 + balance + margin) / (1.0 - balance + margin))


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        channel_axis: int,
        upper_half: bool,
        mean_limits: tuple[float, float],
        rms_limits: tuple[float, float],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.channel_axis, ctx.upper_half = channel_axis, upper_half
        ctx.mean_limits, ctx.rms_limits = mean_limits, rms_limits
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        balanced, part = torch.empty_like(grad), slice(None)
        if ctx.upper_half:
            balanced = grad.clone()
            part = slice(x.size(ctx.channel_axis) // 2, None)
        index = (slice(None),) * ctx.channel_axis + (part,)
        x, of_part = x[index], grad[index]
        push = _push(x, ctx.channel_axis, ctx.mean_limits, ctx.rms_limits)
        # One fused operation, because x can be one of the largest activations of the model.
        torch.addcmul(of_part, push, of_part.abs(), value=_STRENGTH, out=balanced[index])
        return balanced, None, None, None, None


class _SwitchedBalance(torch.autograd.Function):
    """`_Balance` if `settings` on the device switch it on. Changes the gradient in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, channel_axis: int, balancer: Balancer, settings: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.channel_axis, ctx.balancer, ctx.settings = channel_axis, balancer, settings
        ctx.sums = None
        if may_launch_early(x):
            with beside(x):
                ctx.sums = balancer.sums(x.movedim(channel_axis, -1), settings)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        x = x.movedim(ctx.channel_axis, -1)
        grad = grad.movedim(ctx.channel_axis, -1).contiguous()
        ctx.balancer.change_gradient(x, grad, ctx.settings, ctx.sums)
        grad = grad.movedim(-1, ctx.channel_axis)
        return channels_last(grad) if grad.dim() == 4 else grad, None, None, None


def _push(
    x: Tensor, channel_axis: int, mean_limits: tuple[float, float], rms_limits: tuple[float, float]
) -> Tensor:
    """The gradient of the penalty, normalised to a root mean square of one for each channel."""
    axes = [axis for axis in range(x.dim()) if axis != channel_axis]
    dtype = accumulator(x.dtype)
    mean = x.mean(dim=axes, keepdim=True, dtype=dtype)
    norm = torch.linalg.vector_norm(x, dim=axes, keepdim=True, dtype=dtype)
    rms = norm.mul_((mean.numel() / x.numel()) ** 0.5)
    to_unit = torch.addcmul(rms.square(), mean, mean, value=-1.0).clamp_(min=_TINY).rsqrt_()
    ratio = mean.mul_(to_unit)
    # +1 where a statistic is too large, -1 where it is too small, 0 within its limits.
    mean_side = ratio.sub(ratio.clamp(*mean_limits)).sign_()
    rms_side = rms.sub(rms.clamp(*rms_limits)).sign_()
    # The gradient is linear in x. For z = x times `to_unit`, of variance one, it is offset +
    # slope * z times a constant, where E[z] = ratio and E[z^2] = power, and so
    # E[(offset + slope * z)^2] = mean_side^2 * power + rms_side^2 / power.
    power = ratio.square().add_(1.0)
    offset = mean_side * power
    slope = rms_side / power
    to_size = (offset * mean_side).addcmul_(slope, rms_side).clamp_(min=_TINY).rsqrt_()
    slope = slope.addcmul_(mean_side, ratio, value=-1.0).mul_(to_unit).mul_(to_size)
    return torch.addcmul(offset.mul_(to_size), x, slope)
