"""A Conformer layer: feed-forward, attention, convolution and feed-forward modules.

Axes: N batch, T frames, E encoder width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pruned_rnnt.model.attention import Positions, RotaryAttention
from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.conformer_convolution import ConvolutionModule
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear

Branch = Callable[[Tensor], Tensor]


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
        self.attention_norm = LayerNorm(dim)
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
            LayerNorm(dim),
            Linear(dim, hidden_dim, bias),
            nn.SiLU(),
            Linear(hidden_dim, dim, bias),
        )
