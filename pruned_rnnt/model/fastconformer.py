"""FastConformer encoder (Rekesh et al. 2023, arXiv 2305.05084), as in NeMo's Parakeet models, and
cache-aware streaming of a causal one.

Axes: N batch or streams, T frames (after subsampling), F mel bins, E encoder width; of a stream:
T feature frames of a chunk, B cached feature frames, C encoder frames of a chunk.

Beside the Conformer of this package: subsampling by eight, relative positions, a LayerNorm after
each layer, and, if not causal, padding in time before subsampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.model.attention import RelativeAttention, may_be_padded, relative_positions
from pruned_rnnt.model.conformer_layer import Branch, ConformerLayer, ConvolutionModule
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.conformer_stack import ConformerStack
from pruned_rnnt.model.conformer_streaming import ConformerState, StreamingConformer
from pruned_rnnt.model.feature_norm import FeatureNorm, centre_features
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.subsampling import PAST_FRAMES, STRIDING_FACTOR, StridingSubsampling


@dataclass(frozen=True, kw_only=True)
class FastConformerConfig(ConformerSettings):
    """Sizes and behaviour of the encoder; its frames are 80 ms, after subsampling by eight.

    convolution_norm: normalisation in the convolution modules: `batch` over the frames of a
        training batch, or `layer` over the channels of a frame.
    bias: whether linear layers and convolutions of the layers have biases.
    scale_input: multiply the subsampled features by the square root of dim.
    window: for an encoder that is not causal: encoder frames before and after a frame that it
        attends to, for example [128, 128]; null for all.
    """

    kind: Literal["fastconformer"] = "fastconformer"
    layers: int = 17
    dim: int = 512
    heads: int = 8
    feedforward_dim: int = 2048
    kernel_size: int = 9
    subsampling_channels: int = 256
    features: Literal["fbank", "nemo"] = "nemo"
    feature_norm: FeatureNorm = "bins"
    chunk_size: int = 14
    left_chunks: int | None = 5
    convolution_norm: Literal["batch", "layer"] = "batch"
    bias: bool = True
    scale_input: bool = False
    window: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.encoder", self, window=0)
        if self.window is not None and (self.causal or len(self.window) != 2):
            raise ValueError(
                f"model.encoder.window is {list(self.window)}, needs two numbers, and "
                "model.encoder.causal=false (a causal encoder has chunk_size and left_chunks)"
            )


class FastConformer(ConformerStack):
    """Subsampling by eight, then Conformer layers with relative positions.

    `forward` returns (N, T', E) with T' = (T + 7) // 8; of a causal one, (T + 14) // 8.
    """

    config: FastConformerConfig
    subsampling: StridingSubsampling
    receptive_field = 1
    subsampling_factor = STRIDING_FACTOR

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__(config)
        self.subsampling = StridingSubsampling(
            config.num_mel_bins, config.subsampling_channels, config.dim, config.causal
        )
        self.layers = nn.ModuleList(FastConformerLayer(config) for _ in range(config.layers))
        if config.window is not None:
            before, after = config.window
            self.window = (before, after)

    def output_lengths(self, feature_lengths: Tensor) -> Tensor:
        return self.subsampling.output_lengths(feature_lengths)

    def embed(self, features_NTF: Tensor, feature_lengths: Tensor) -> Tensor:
        normed_NTF = centre_features(features_NTF, feature_lengths, self.config.feature_norm)
        padded = may_be_padded(features_NTF, feature_lengths)
        lengths = feature_lengths.to(features_NTF.device) if padded else None
        return self.scaled(self.subsampling(normed_NTF, lengths))

    def scaled(self, x_NTE: Tensor) -> Tensor:
        return x_NTE * math.sqrt(self.config.dim) if self.config.scale_input else x_NTE

    def positions(self, frames: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return relative_positions(frames, self.config.dim, device, dtype)


class FastConformerLayer(ConformerLayer):
    """A Conformer layer with relative positions, whose output is normalised."""

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__(config, config.bias)
        self.output_norm = LayerNorm(config.dim)

    def _new_attention(self, config: ConformerSettings) -> RelativeAttention:
        assert isinstance(config, FastConformerConfig)
        return RelativeAttention(config.dim, config.heads, config.bias)

    def _new_convolution(self, config: ConformerSettings) -> ConvolutionModule:
        assert isinstance(config, FastConformerConfig)
        return ConvolutionModule(
            config.dim,
            config.kernel_size,
            config.causal,
            norm=config.convolution_norm,
            bias=config.bias,
        )

    def run_branches(self, x_NTE: Tensor, attend: Branch, convolve: Branch) -> Tensor:
        normed: Tensor = self.output_norm(super().run_branches(x_NTE, attend, convolve))
        return normed


class StreamingFastConformer(StreamingConformer):
    """Runs a causal FastConformer chunk by chunk, as `StreamingConformer`.

    A chunk has 8 C feature frames. A whole utterance may end with a frame for padding; in a stream,
    that frame is left out where it would need another chunk.
    """

    encoder: FastConformer

    def start(self, streams: int) -> ConformerState:
        state = super().start(streams)
        shape = streams, PAST_FRAMES, self.encoder.config.num_mel_bins
        return state._replace(features_NBF=state.attention_LPNE.new_zeros(shape))

    def output_length(self, lengths: Tensor) -> Tensor:
        return super().output_length(lengths).clamp(max=self.chunk_size)

    def embed(self, features_NTF: Tensor, state: ConformerState, lengths: Tensor | None) -> Tensor:
        """The input of the first layer (N, C, E); arguments as for `forward`."""
        encoder = self.encoder
        assert state.features_NBF is not None
        seen_NTF = torch.cat((state.features_NBF, features_NTF), dim=1)
        normed_NTF = centre_features(seen_NTF, state.processed_N, encoder.config.feature_norm)
        ends_N = None
        if lengths is not None:
            ends_N = state.processed_N + lengths.to(features_NTF.device)
        return encoder.scaled(encoder.subsampling.chunk(normed_NTF, state.processed_N, ends_N))
