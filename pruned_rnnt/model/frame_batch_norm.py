"""Batch normalisation over the real frames of a batch.

Axes: N batch, T frames, E channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOMENTUM = 0.1
_EPSILON = 1e-5


class FrameBatchNorm(nn.Module):
    """nn.BatchNorm1d over (N, T, E), whose statistics in training ignore padding.

    In evaluation mode, with the running statistics, it equals nn.BatchNorm1d.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x_NTE: Tensor, padding_NT1: Tensor | None = None) -> Tensor:
        """(N, T, E) in the dtype of x.

        Args:
            padding_NT1: True for frames that are padding; None: all are real.
        """
        mean_E, variance_E = self.running_mean, self.running_var
        if self.training:
            mean_E, variance_E = self._statistics(x_NTE.float(), padding_NT1)
        scale_E = self.weight * torch.rsqrt(variance_E + _EPSILON)
        shift_E = self.bias - mean_E * scale_E
        return torch.addcmul(shift_E.to(x_NTE.dtype), x_NTE, scale_E.to(x_NTE.dtype))

    def _statistics(self, x_NTE: Tensor, padding_NT1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance; updates the running ones, with the unbiased variance."""
        if padding_NT1 is None:
            count = x_NTE.new_full((), x_NTE.size(0) * x_NTE.size(1))
            real_NT1 = x_NTE.new_ones(1)
        else:
            real_NT1 = (~padding_NT1).to(x_NTE.dtype)
            count = real_NT1.sum().clamp(min=1)
        mean_E = (x_NTE * real_NT1).sum((0, 1)) / count
        variance_E = ((x_NTE - mean_E).square() * real_NT1).sum((0, 1)) / count
        with torch.no_grad():
            unbiased_E = variance_E * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean_E.to(self.running_mean.dtype), _MOMENTUM)
            self.running_var.lerp_(unbiased_E.to(self.running_var.dtype), _MOMENTUM)
        return mean_E, variance_E
