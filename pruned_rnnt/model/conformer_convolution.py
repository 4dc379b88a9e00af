"""The convolution module of a Conformer layer.

Axes: N batch, T frames, E encoder width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import depthwise
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear


class ConvolutionModule(nn.Module):
    """LayerNorm, gated layer, depthwise convolution over time, LayerNorm, SiLU, linear layer.

    If causal, it uses kernel_size - 1 past frames and no future frames.
    """

    def __init__(self, dim: int, kernel_size: int, causal: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(dim)
        self.pointwise_in = Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, groups=dim)
        self.depthwise_norm = LayerNorm(dim)
        self.pointwise_out = Linear(dim, dim)
        past = kernel_size - 1 if causal else kernel_size // 2
        self.padding = (past, kernel_size - 1 - past)

    def forward(self, x_NTE: Tensor, padding_NT1: Tensor | None) -> Tensor:
        gated_NTE = self.gate(x_NTE)
        if padding_NT1 is not None:
            gated_NTE = gated_NTE.masked_fill(padding_NT1, 0.0)
        past, future = self.padding
        if past == future and should_avoid_cudnn_replanning(gated_NTE):
            return self._project(depthwise(self.depthwise, gated_NTE, past))
        return self.mix(functional.pad(gated_NTE, (0, 0, past, future)))

    def gate(self, x_NTE: Tensor) -> Tensor:
        """The input of the convolution over time, computed frame by frame."""
        return functional.glu(self.pointwise_in(self.norm(x_NTE)), dim=-1)

    def mix(self, padded_NTE: Tensor) -> Tensor:
        """Gated frames, padded by kernel_size - 1 frames -> output of the inner frames."""
        if should_avoid_cudnn_replanning(padded_NTE):
            return self._project(depthwise(self.depthwise, padded_NTE))
        # As a 2-D convolution over (N, E, 1, T), whose channels-last layout is that of the input:
        # without a transposed copy, and over (N, E, T, 1) a CPU takes up to six times as long.
        mixed_NE1T = functional.conv2d(
            padded_NTE.transpose(1, 2).unsqueeze(2),
            self.depthwise.weight.unsqueeze(2),
            self.depthwise.bias,
            groups=self.depthwise.groups,
        )
        return self._project(mixed_NE1T.squeeze(2).transpose(1, 2))

    def _project(self, mixed_NTE: Tensor) -> Tensor:
        output: Tensor = self.pointwise_out(functional.silu(self.depthwise_norm(mixed_NTE)))
        return output
