"""Convolutional subsampling by four, without padding in time.

Axes: N batch, T frames, F mel bins, C channels, E encoder width.

Output frame j depends on exactly the input frames 4j .. 4j+6. Because there is no padding in time,
only output frames that are padding depend on padded input frames, and a stream of chunks has the
same output as the whole utterance.
"""

from __future__ import annotations

from torch import Tensor, nn

from pruned_rnnt.model.joined_frames import JoinedFrames, should_avoid_cudnn_replanning
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.subsampling_convolutions import FirstConv2d, WideConv2d

SUBSAMPLING_FACTOR = 4
# Input frames that one output frame depends on: the minimum length of an utterance.
RECEPTIVE_FIELD = 7


def subsampled_length(lengths: Tensor) -> Tensor:
    """Encoder frames of utterances with `lengths` feature frames; 0 if too short."""
    return ((lengths - RECEPTIVE_FIELD) // SUBSAMPLING_FACTOR + 1).clamp(min=0)


class ConvSubsampling(nn.Module):
    """Two 3x3 convolutions of stride 2 over time and frequency, a projection and a LayerNorm.

    The norm and the initialisation (He et al. 2015) matter: with torch's defaults, each layer
    halves the differences between frames, which then vanish beside the constant biases.

    Args:
        num_mel_bins: F, at least 7.
        channels: C of both convolutions.
        output_dim: E.
    """

    def __init__(self, num_mel_bins: int, channels: int, output_dim: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            FirstConv2d(1, channels, kernel_size=3, stride=2),
            nn.SiLU(),
            WideConv2d(channels, channels, kernel_size=3, stride=2),
            nn.SiLU(),
        )
        remaining_bins = ((num_mel_bins - 1) // 2 - 1) // 2
        self.projection = Linear(channels * remaining_bins, output_dim)
        self.norm = LayerNorm(output_dim)
        for layer in self.convolutions:
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, features_NTF: Tensor) -> Tensor:
        """(N, T, F) -> (N, (T - 7) // 4 + 1, E).

        Raises:
            ValueError: T < 7.
        """
        if features_NTF.size(1) < RECEPTIVE_FIELD:
            raise ValueError(
                f"features has {features_NTF.size(1)} frames, the encoder needs at least "
                f"{RECEPTIVE_FIELD}: pad shorter audio with silence"
            )
        batch, frames, _ = features_NTF.shape
        if should_avoid_cudnn_replanning(features_NTF):
            joined = JoinedFrames(batch, frames, SUBSAMPLING_FACTOR, RECEPTIVE_FIELD)
            maps_1CLF = self.convolutions(joined.join(features_NTF))
            count = (frames - RECEPTIVE_FIELD) // SUBSAMPLING_FACTOR + 1
            maps_NCTF = joined.part(maps_1CLF, count)
        else:
            maps_NCTF = self.convolutions(features_NTF.unsqueeze(1))
        stacked = maps_NCTF.transpose(1, 2).flatten(2)
        normed: Tensor = self.norm(self.projection(stacked))
        return normed
