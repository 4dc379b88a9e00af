"""The residual stream of a layer: branches that are added to it, bypasses, and its end.

The stream has the dtype of the parameters; under autocast, modules read a copy in its lower
precision. One autograd function makes both, with half the kernels of separate casts and sums. At
the end of a layer come a norm, a bypass, a balancer and a whitener.

Axes: N batch, T frames, E encoder width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.kernels.available import use_kernels, use_own_function
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.gradient import (
    Limits,
    grad_towards_limits,
    sample_limits,
    sum_towards_limits,
)
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule, ramp
from pruned_rnnt.model.zipformer.whiten import Whiten

# Lower limit of the scale of a bypass. A high one at first forces every module to contribute.
_BYPASS_LOW = ramp(0.9, 0.2, 20000)


def begin_stream(x_NTE: Tensor, streams: int = 1, readers: int = 1) -> tuple[Tensor, ...]:
    """x for each of `streams` uses, and a copy of x for each of `readers` modules.

    One kernel then adds up the gradients of all of them.
    """
    dtype = _readers_dtype(x_NTE)
    if dtype is None:
        return (x_NTE,) * (streams + readers)
    several: tuple[Tensor, ...] = applied(_Begin, x_NTE, dtype, streams, readers)
    return several


def add_branch(
    x_NTE: Tensor, branch_NTE: Tensor, keep_N11: Tensor | None = None, *, read: bool = True
) -> tuple[Tensor, Tensor]:
    """x + branch * keep in the dtype of x, and, if `read`, the copy for the next module."""
    dtype = _readers_dtype(x_NTE) if read else None
    if dtype is None and keep_N11 is None and not use_kernels(x_NTE, branch_NTE):
        total_NTE = x_NTE + branch_NTE
        return total_NTE, total_NTE
    both: tuple[Tensor, Tensor] = applied(_Add, x_NTE, branch_NTE, keep_N11, dtype)
    return both if dtype is not None else (both[0], both[0])


def _readers_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast, or None if modules read x itself.

    They do without autocast, and in inference without fused kernels.
    """
    device = x.device.type
    if not (torch.is_autocast_enabled(device) and use_own_function(x)):
        return None
    return torch.get_autocast_dtype(device)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, streams: int, readers: int
    ) -> tuple[Tensor, ...]:
        ctx.fused = use_kernels(x)
        low = x.to(dtype)
        return (
            *(x.view_as(x) for _ in range(streams)),
            *(low.view_as(low) for _ in range(readers)),
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import begin_backward

            of_others = [other.contiguous() for other in grads]
            return begin_backward(grad.contiguous(), of_others), None, None, None
        total = grad + grads[0]
        for more in grads[1:]:
            total = total.add_(more)
        return total, None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, keep: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(keep)
        ctx.dtype, ctx.fused = branch.dtype, use_kernels(x, branch)
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import add

            return add(x.contiguous(), branch.contiguous(), keep, dtype)
        total = x + branch if keep is None else torch.addcmul(x, branch, keep)
        return total, None if dtype is None else total.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor, of_reader: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import add_backward

            if of_reader is not None:
                of_reader = of_reader.contiguous()
            return *add_backward(grad.contiguous(), of_reader, keep, ctx.dtype), None, None
        if of_reader is not None:
            grad = grad + of_reader
        if keep is None:
            return grad, grad.to(ctx.dtype), None, None
        of_branch = torch.empty_like(grad, dtype=ctx.dtype)
        return grad, torch.mul(grad, keep, out=of_branch), None, None


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
        if not use_own_function(before_NTE, after_NTE):
            after_NTE = _repeated(after_NTE, rate)
            scale = self.bypass_scale if keep_N11 is None else self.bypass_scale * keep_N11
            return torch.lerp(before_NTE, after_NTE, scale)
        limits = self.sample_limits() if self.training else None
        mixed_NTE: Tensor = applied(
            _Bypass, before_NTE, after_NTE, self.bypass_scale, keep_N11, limits, rate
        )
        return mixed_NTE

    def sample_limits(self) -> Limits | None:
        """Limits of the scale on this batch."""
        return sample_limits(self.clock, _BYPASS_LOW, 1.0)


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
            of_scale = sum_towards_limits(of_scale, scale, ctx.limits)
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


def end_of_layer(
    begin_NTE: Tensor,
    x_NTE: Tensor,
    keep_N11: Tensor | None,
    mask_N1E: Tensor | None,
    *,
    norm: BiasNorm,
    bypass: Bypass,
    balancer: Balancer,
    whiten: Whiten,
) -> Tensor:
    """whiten(balancer(bypass(begin, norm(x), keep))) * mask."""
    recorder = bypass.clock.recorder
    if recorder is None or not (bypass.training and use_kernels(begin_NTE, x_NTE)):
        plain_NTE: Tensor = whiten(balancer(bypass(begin_NTE, norm(x_NTE), keep_N11)))
        return plain_NTE if mask_N1E is None else plain_NTE * mask_N1E
    norm_limits, bypass_limits = norm.sample_limits(), bypass.sample_limits()
    out_NTE: Tensor = _EndOfLayer.apply(  # type: ignore[no-untyped-call]
        begin_NTE,
        x_NTE,
        norm.bias,
        norm.log_scale,
        bypass.bypass_scale,
        (keep_N11, mask_N1E),
        (norm_limits, bypass_limits),
        (balancer, balancer.record(recorder)),
        (whiten, whiten.record(recorder)),
    )
    return out_NTE


class _EndOfLayer(torch.autograd.Function):
    """For captured passes, which must save the inputs of balancer and whitener for every batch.

    Saves only x and the layer's input. The backward pass computes the norm again, and also the
    output if the device decides that balancer or whitener act on this batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        begin: Tensor,
        x: Tensor,
        bias: Tensor,
        log_scale: Tensor,
        scale: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        limits: tuple[Limits | None, Limits | None],
        balancer: tuple[Balancer, Tensor],
        whiten: tuple[Whiten, Tensor],
    ) -> Tensor:
        from pruned_rnnt.model.kernels.norms import bias_norm
        from pruned_rnnt.model.kernels.stream import bypass

        begin, x, (keep, mask) = begin.contiguous(), x.contiguous(), masks
        normed, factor = bias_norm(x, bias, log_scale)
        ctx.save_for_backward(begin, x, bias, log_scale, factor, scale, keep, mask)
        ctx.limits, ctx.balancer, ctx.whiten = limits, balancer, whiten
        return bypass(begin, normed, scale, keep, mask_N1E=mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from pruned_rnnt.model.kernels.norms import bias_norm_backward
        from pruned_rnnt.model.kernels.stream import bypass, bypass_backward

        begin, x, bias, log_scale, factor, scale, keep, mask = ctx.saved_tensors
        (balancer, of_balancer), (whiten, of_whiten) = ctx.balancer, ctx.whiten
        # The second number of the whitener is its switch if it was over its limit; if that is 0,
        # so is the first.
        switches = (of_balancer[:1], of_whiten[1:2])
        out = bypass(begin, x, scale, keep, factor=factor, switches=switches)
        grad = grad.contiguous()
        # Changed in place below, and the gradient given may be in use elsewhere.
        grad = grad.clone() if mask is None else grad * mask
        whiten.change_gradient(out, grad, of_whiten)
        balancer.change_gradient(out, grad, of_balancer)
        del out
        of_begin, of_normed, of_scale = bypass_backward(begin, x, scale, keep, grad, factor=factor)
        of_x, of_bias, of_log_scale = bias_norm_backward(x, bias, log_scale, factor, of_normed)
        norm_limits, bypass_limits = ctx.limits
        return (
            of_begin,
            of_x,
            sum_towards_limits(of_bias, bias, None),
            sum_towards_limits(of_log_scale, log_scale, norm_limits),
            sum_towards_limits(of_scale, scale, bypass_limits),
            *(None,) * 4,
        )
