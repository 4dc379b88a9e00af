"""A Conformer layer: feed-forward, attention, convolution and feed-forward modules.

Axes: N batch, T frames, E encoder width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.attention import Positions, RotaryAttention
from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.depthwise import depthwise
from pruned_rnnt.model.gated_depthwise import gated_depthwise
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear

# Of FrameBatchNorm.
_MOMENTUM = 0.1
_EPSILON = 1e-5
Branch = Callable[[Tensor], Tensor]


class FrameBatchNorm(nn.Module):
    """nn.BatchNorm1d over (N, T, E), whose statistics in training ignore padding.

    In evaluation mode, with the running statistics, it equals nn.BatchNorm1d. If its weight is
    frozen (`requires_grad` False), training, too, uses the running statistics and keeps them.
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
        # In half precision, a rounded mean would move all frames by a constant.
        exact_NTE = x_NTE.to(torch.promote_types(x_NTE.dtype, torch.float32))
        mean_E, variance_E = self.running_mean, self.running_var
        if self.training and self.weight.requires_grad:
            mean_E, variance_E = self._statistics(exact_NTE, padding_NT1)
        scale_E = self.weight * torch.rsqrt(variance_E + _EPSILON)
        shift_E = self.bias - mean_E * scale_E
        return torch.addcmul(shift_E, exact_NTE, scale_E).to(x_NTE.dtype)

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


class ConvolutionModule(nn.Module):
    """LayerNorm, gated layer, depthwise convolution over time, a norm, SiLU, linear layer.

    If causal, it uses kernel_size - 1 past frames and no future frames.

    Args:
        norm: `layer` or `batch`, the norm after the depthwise convolution.
        bias: whether the layers and the convolution have biases.
    """

    def __init__(
        self, dim: int, kernel_size: int, causal: bool, *, norm: str = "layer", bias: bool = True
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(dim, before_product=True)
        self.pointwise_in = Linear(dim, 2 * dim, bias)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, groups=dim, bias=bias)
        self.depthwise_norm = (
            LayerNorm(dim, before_product=True, silu=True)
            if norm == "layer"
            else FrameBatchNorm(dim)
        )
        self.pointwise_out = Linear(dim, dim, bias)
        past = kernel_size - 1 if causal else kernel_size // 2
        self.padding = (past, kernel_size - 1 - past)

    def forward(self, x_NTE: Tensor, padding_NT1: Tensor | None) -> Tensor:
        past, future = self.padding
        if padding_NT1 is not None and past == future and should_avoid_cudnn_replanning(x_NTE):
            projected_NTC = self.pointwise_in(self.norm(x_NTE))
            mixed_NTE = gated_depthwise(self.depthwise, projected_NTC, ~padding_NT1, past)
            return self._project(mixed_NTE, padding_NT1)
        gated_NTE = self.gate(x_NTE)
        if padding_NT1 is not None:
            gated_NTE = gated_NTE.masked_fill(padding_NT1, 0.0)
        return self.mix(functional.pad(gated_NTE, (0, 0, past, future)), padding_NT1)

    def gate(self, x_NTE: Tensor) -> Tensor:
        """The input of the convolution over time, computed frame by frame."""
        return functional.glu(self.pointwise_in(self.norm(x_NTE)), dim=-1)

    def mix(self, padded_NTE: Tensor, padding_NT1: Tensor | None = None) -> Tensor:
        """Gated frames, padded by kernel_size - 1 frames -> output of the inner frames."""
        if should_avoid_cudnn_replanning(padded_NTE):
            return self._project(depthwise(self.depthwise, padded_NTE), padding_NT1)
        # As a 2-D convolution over (N, E, 1, T), whose channels-last layout is that of the input:
        # without a transposed copy, and over (N, E, T, 1) a CPU takes up to six times as long.
        mixed_NE1T = functional.conv2d(
            padded_NTE.transpose(1, 2).unsqueeze(2),
            self.depthwise.weight.unsqueeze(2),
            self.depthwise.bias,
            groups=self.depthwise.groups,
        )
        return self._project(mixed_NE1T.squeeze(2).transpose(1, 2), padding_NT1)

    def _project(self, mixed_NTE: Tensor, padding_NT1: Tensor | None) -> Tensor:
        if isinstance(self.depthwise_norm, FrameBatchNorm):
            activated_NTE = functional.silu(self.depthwise_norm(mixed_NTE, padding_NT1))
        else:
            activated_NTE = self.depthwise_norm(mixed_NTE)
        output: Tensor = self.pointwise_out(activated_NTE)
        return output


class ConformerLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward; each on a residual branch.

    Args:
        config: sizes.
        bias: whether the linear layers of the feed-forward modules have biases.
    """

    def __init__(self, config: ConformerSettings, bias: bool = True) -> None:
        super().__init__()
        dim = config.dim
        self.feedforward_in = FeedForward(dim, config.feedforward_dim, bias)
        self.attention_norm = LayerNorm(dim, before_product=True)
        self.attention = self._new_attention(config)
        self.convolution = self._new_convolution(config)
        self.feedforward_out = FeedForward(dim, config.feedforward_dim, bias)
        self.dropout = nn.Dropout(config.dropout)
        self._cast_parameters = CastParameters(
            module for module in self.modules() if isinstance(module, (nn.Linear, nn.Conv1d))
        )

    def _new_attention(self, config: ConformerSettings) -> nn.Module:
        return RotaryAttention(config.dim, config.heads)

    def _new_convolution(self, config: ConformerSettings) -> ConvolutionModule:
        return ConvolutionModule(config.dim, config.kernel_size, config.causal)

    def forward(
        self,
        x_NTE: Tensor,
        padding_NT1: Tensor | None,
        mask: Tensor | None,
        positions: Positions,
    ) -> Tensor:
        with self._cast_parameters.cast(x_NTE):
            return self.run_branches(
                x_NTE,
                attend=lambda normed_NTE: self.attention(normed_NTE, mask, positions),
                convolve=lambda input_NTE: self.convolution(input_NTE, padding_NT1),
            )

    def run_branches(self, x_NTE: Tensor, attend: Branch, convolve: Branch) -> Tensor:
        """Run the layer's feed-forward branches around the two given branches.

        Only the given branches depend on other frames; a stream adds the past there.
        """
        x_NTE = torch.add(x_NTE, self._dropped(self.feedforward_in(x_NTE)), alpha=0.5)
        x_NTE = x_NTE + self._dropped(attend(self.attention_norm(x_NTE)))
        x_NTE = x_NTE + self._dropped(convolve(x_NTE))
        return torch.add(x_NTE, self._dropped(self.feedforward_out(x_NTE)), alpha=0.5)

    def _dropped(self, x_NTE: Tensor) -> Tensor:
        # In evaluation, calling the module would take a CPU longer than the addition after it.
        return self.dropout(x_NTE) if self.training else x_NTE


class FeedForward(nn.Sequential):
    """LayerNorm, wide layer with SiLU, back to E."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = True) -> None:
        super().__init__(
            LayerNorm(dim, before_product=True),
            Linear(dim, hidden_dim, bias),
            nn.SiLU(),
            Linear(hidden_dim, dim, bias),
        )
