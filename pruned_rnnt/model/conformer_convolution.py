"""The convolution module of a Conformer layer.

Axes: N batch, T frames, E encoder width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import depthwise
from pruned_rnnt.model.frame_batch_norm import FrameBatchNorm
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear


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
        self.norm = LayerNorm(dim)
        self.pointwise_in = Linear(dim, 2 * dim, bias)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, groups=dim, bias=bias)
        self.depthwise_norm = LayerNorm(dim) if norm == "layer" else FrameBatchNorm(dim)
        self.pointwise_out = Linear(dim, dim, bias)
        past = kernel_size - 1 if causal else kernel_size // 2
        self.padding = (past, kernel_size - 1 - past)

    def forward(self, x_NTE: Tensor, padding_NT1: Tensor | None) -> Tensor:
        gated_NTE = self.gate(x_NTE)
        if padding_NT1 is not None:
            gated_NTE = gated_NTE.masked_fill(padding_NT1, 0.0)
        past, future = self.padding
        if past == future and should_avoid_cudnn_replanning(gated_NTE):
            return self._project(depthwise(self.depthwise, gated_NTE, past), padding_NT1)
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
            normed_NTE = self.depthwise_norm(mixed_NTE, padding_NT1)
        else:
            normed_NTE = self.depthwise_norm(mixed_NTE)
        output: Tensor = self.pointwise_out(functional.silu(normed_NTE))
        return output
