"""Convolutional subsampling: by four without padding in time, or by eight with it.

Axes: N batch, T frames, F mel bins, C channels, E encoder width.

By four, output frame j depends on exactly the input frames 4j .. 4j+6. Because there is no padding
in time, only output frames that are padding depend on padded input frames, and a stream of chunks
has the same output as the whole utterance.

By eight, three convolutions with 3 x 3 windows halve time and frequency. Frames outside the
utterance count as zero before each of them. Without padding on the right, a causal one sees no
future frames.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.joined_frames import JoinedFrames, should_avoid_cudnn_replanning
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.subsampling_convolutions import Conv2d, FirstConv2d, WideConv2d

SUBSAMPLING_FACTOR = 4
# Input frames that one output frame depends on: the minimum length of an utterance.
RECEPTIVE_FIELD = 7
STRIDING_FACTOR = 8
# Earlier frames that a causal encoder frame depends on.
PAST_FRAMES = 14
_LEVELS = 3


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


class StridingSubsampling(nn.Module):
    """(N, T, F) -> (N, T', E).

    T' is (T + 7) // 8; of a causal one, (T + 14) // 8.

    Args:
        num_mel_bins: F.
        channels: C.
        output_dim: E.
        causal: see only frames of the present and the past.
    """

    def __init__(self, num_mel_bins: int, channels: int, output_dim: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        # Zeros before and after the frames, and below and above the bins.
        self.padding = (2, 1) if causal else (1, 1)
        self.levels = nn.ModuleList(_level(index, channels) for index in range(_LEVELS))
        bins = num_mel_bins
        for _ in range(_LEVELS):
            bins = self._halved(bins)
        self.projection = Linear(channels * bins, output_dim)

    def _halved(self, size: int) -> int:
        return size // 2 + 1 if self.causal else (size + 1) // 2

    def halved_lengths(self, lengths: Tensor) -> Tensor:
        """Lengths (N,) after one level; 0 stays 0."""
        if self.causal:
            return torch.where(lengths > 0, lengths // 2 + 1, lengths)
        return (lengths + 1) // 2

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Lengths (N,) after all levels."""
        for _ in range(_LEVELS):
            lengths = self.halved_lengths(lengths)
        return lengths

    def forward(self, features_NTF: Tensor, lengths: Tensor | None) -> Tensor:
        """Subsample a batch.

        Args:
            lengths: (N,) valid frames, on the device of the features; None: all are valid.
        """
        x_NCTF = features_NTF.unsqueeze(1)
        for level in self.levels:
            if lengths is not None:
                frames = torch.arange(x_NCTF.size(2), device=x_NCTF.device)
                beyond_NT = frames >= lengths[:, None]
                x_NCTF = x_NCTF.masked_fill(beyond_NT[:, None, :, None], 0.0)
                lengths = self.halved_lengths(lengths)
            x_NCTF = level(functional.pad(x_NCTF, (*self.padding, *self.padding)))
        return self._project(x_NCTF)

    def chunk(self, features_NTF: Tensor, start_N: Tensor, lengths: Tensor | None) -> Tensor:
        """Subsample chunks of streams; the module is causal.

        Args:
            features_NTF: PAST_FRAMES frames before the chunk, and the chunk.
            start_N: (N,) the first frame of each chunk in its stream, a multiple of eight.
            lengths: (N,) valid frames of the whole streams; None: there is no end in the chunk.

        Returns:
            (N, C, E), the frames from start_N / 8 on.
        """
        x_NCTF = features_NTF.unsqueeze(1)
        begin_N = start_N - PAST_FRAMES
        for level in self.levels:
            frames_NT = begin_N[:, None] + torch.arange(x_NCTF.size(2), device=x_NCTF.device)
            outside_NT = frames_NT < 0
            if lengths is not None:
                outside_NT = outside_NT | (frames_NT >= lengths[:, None])
                lengths = self.halved_lengths(lengths)
            x_NCTF = x_NCTF.masked_fill(outside_NT[:, None, :, None], 0.0)
            x_NCTF = level(functional.pad(x_NCTF, self.padding))
            begin_N = torch.div(begin_N, 2, rounding_mode="floor") + 1
        return self._project(x_NCTF)

    def _project(self, x_NCTF: Tensor) -> Tensor:
        projected: Tensor = self.projection(x_NCTF.transpose(1, 2).flatten(2))
        return projected


def _level(index: int, channels: int) -> nn.Sequential:
    if index == 0:
        return nn.Sequential(FirstConv2d(1, channels, kernel_size=3, stride=2), nn.ReLU())
    return nn.Sequential(
        Conv2d(channels, channels, kernel_size=3, stride=2, groups=channels),
        Conv2d(channels, channels, kernel_size=1),
        nn.ReLU(),
    )
