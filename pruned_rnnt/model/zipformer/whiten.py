"""Whiten: keeps activations from collapsing to few directions by changing the gradient.

Axes: R rows (all frames of a batch), G groups of channels, C channels of a group.

The forward pass is the identity. For centred rows X_g of each group and S_g = X_g^T X_g,

    metric = mean of the diagonals of S_g S_g / (mean of the diagonals of S_g)^2  >= 1,

which is 1 if all directions have the same variance (arXiv 2310.11230, section 3.4). If it is over
the limit, the backward pass adds its gradient, scaled to `strength` times the norm of the incoming
gradient. Its direction is X_g (S_g - m I), where m is the mean of the diagonals of S_g S_g divided
by that of S_g.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.side_branch import beside, may_launch_early
from pruned_rnnt.model.zipformer.schedule import Clock, Recorder, Schedule
from pruned_rnnt.ops.common.library import accumulator

# Fraction of the batches on which the metric is computed: higher while it is over the limit.
_PROBABILITY_WITHIN, _PROBABILITY_OVER = 0.025, 0.25
_TINY = 1e-20


class Whiten(nn.Module):
    """Identity with the gradient described above, on some of the batches; channels come last.

    `over_limit` is the result of the last check, in a buffer so that checkpoints save it. The
    backward pass writes it on the device. In a captured pass the device reads it; otherwise
    `update_probabilities` does, once a step.

    Args:
        limit: the highest metric without a penalty.
        strength: norm of the added gradient relative to the incoming one.
        groups: G.
    """

    over_limit: Tensor

    def __init__(
        self, clock: Clock, limit: float | Schedule, strength: float = 0.01, groups: int = 1
    ) -> None:
        super().__init__()
        self.clock = clock
        self.limit = limit
        self.strength = strength
        self.groups = groups
        self.probability = _PROBABILITY_OVER
        self.register_buffer("over_limit", torch.ones((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and x.requires_grad):
            return x
        whitened: Tensor
        if self.clock.recorder is not None:
            whitened = _SwitchedWhiten.apply(  # type: ignore[no-untyped-call]
                x, self, self.record(self.clock.recorder)
            )
            return whitened
        if not self.clock.bernoulli(self.probability):
            return x
        limit = self.clock.value(self.limit)
        whitened = _Whiten.apply(  # type: ignore[no-untyped-call]
            x, self.over_limit, self.groups, limit, self.strength
        )
        return whitened

    def record(self, recorder: Recorder) -> Tensor:
        """(3,) on the device: the settings of `change_gradient` in a captured pass."""
        return recorder.add(self._settings, 3)

    def scatter(self, x: Tensor, settings: Tensor) -> Any:
        """What `change_gradient` needs to know of x."""
        from pruned_rnnt.model.kernels.whiten import whiten_scatter

        return whiten_scatter(x, settings, self.over_limit, groups=self.groups)

    def change_gradient(
        self, x: Tensor, grad: Tensor, settings: Tensor, scatter: Any = None
    ) -> None:
        """Change the gradient of x in place if the settings say so; by fused kernels.

        Args:
            grad: contiguous.
            scatter: if it was computed before.
        """
        from pruned_rnnt.model.kernels.whiten import whiten_gradient

        whiten_gradient(
            x,
            grad,
            settings,
            self.over_limit,
            groups=self.groups,
            strength=self.strength,
            scatter=scatter,
        )

    def _settings(self) -> Sequence[float]:
        """Whether to act on this batch (0 or 1): if within the limit, if over it; and the limit."""
        uniform = self.clock.uniform()
        within, over = uniform < _PROBABILITY_WITHIN, uniform < _PROBABILITY_OVER
        return (float(within), float(over), self.clock.value(self.limit))


def update_probabilities(whiteners: list[Whiten]) -> None:
    """Sets the probability of each module by its `over_limit`, with one copy from the device."""
    over = torch.stack([whitener.over_limit for whitener in whiteners]).tolist()
    for whitener, is_over in zip(whiteners, over, strict=True):
        whitener.probability = _PROBABILITY_OVER if is_over else _PROBABILITY_WITHIN


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, over_limit: Tensor, groups: int, limit: float, strength: float
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.over_limit, ctx.groups, ctx.limit, ctx.strength = over_limit, groups, limit, strength
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        dtype = accumulator(x.dtype)
        rows_RGC = x.reshape(-1, ctx.groups, x.size(-1) // ctx.groups)
        mean_1GC = rows_RGC.mean(dim=0, keepdim=True, dtype=dtype)
        # In half precision on a GPU, tensor cores multiply and accumulate in float32.
        in_half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
        if in_half:
            centred_RGC = torch.empty_like(rows_RGC)
            rows_GRC = torch.sub(rows_RGC, mean_1GC, out=centred_RGC).transpose(0, 1)
            scatter_GCC = torch.bmm(rows_GRC.mT, rows_GRC, out_dtype=torch.float32)
        else:
            rows_GRC = (rows_RGC - mean_1GC).transpose(0, 1)
            scatter_GCC = rows_GRC.mT @ rows_GRC
        diagonal_GC = scatter_GCC.diagonal(dim1=1, dim2=2)
        trace = diagonal_GC.sum().add_(_TINY)
        # m, which is also the metric times the mean of the diagonals of S_g.
        centre = torch.linalg.vector_norm(scatter_GCC).square_().div_(trace)
        torch.ge(centre, trace * (ctx.limit / x.size(-1)), out=ctx.over_limit)
        # Now X_g^T X_g - m I.
        diagonal_GC.sub_(centre)
        if in_half:
            # The scale of the push cancels below; this one keeps it within float16.
            scatter_GCC = (scatter_GCC / trace).to(x.dtype)
        push = (rows_GRC @ scatter_GCC).transpose(0, 1).reshape(x.shape)
        factor = torch.linalg.vector_norm(grad, dtype=dtype) / (
            torch.linalg.vector_norm(push, dtype=dtype).add_(_TINY)
        )
        pushed = torch.empty_like(grad)
        torch.addcmul(grad, push, factor.mul_(ctx.over_limit), value=ctx.strength, out=pushed)
        return pushed, None, None, None, None


class _SwitchedWhiten(torch.autograd.Function):
    """`_Whiten` if `settings` on the device switch it on. Changes the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whiten: Whiten, settings: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.whiten, ctx.settings = whiten, settings
        ctx.scatter = None
        if may_launch_early(x):
            with beside(x):
                ctx.scatter = whiten.scatter(x, settings)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        ctx.whiten.change_gradient(x, grad, ctx.settings, ctx.scatter)
        return grad, None, None
