"""Conformer encoder (Gulati et al. 2020, arXiv 2005.08100), small by default.

Axes: N batch, T frames (after subsampling), F mel bins, E encoder width.

Differences from the paper, and why:
- no LayerNorm after a layer: with it, a model of this size gives every frame the same output for
  hundreds of steps (measured on fsdd); without it, the model learns from the start;
- rotary instead of relative positions: fewer operations, and streams need no absolute position;
- LayerNorm instead of BatchNorm in the convolution module: the output of an utterance must not
  depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.model.attention import rotary_angles
from pruned_rnnt.model.conformer_layer import ConformerLayer
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.conformer_stack import ConformerStack
from pruned_rnnt.model.feature_norm import centre_features
from pruned_rnnt.model.subsampling import RECEPTIVE_FIELD, ConvSubsampling

_LOG_MEL_SCALE = 0.25


@dataclass(frozen=True, kw_only=True)
class ConformerConfig(ConformerSettings):
    """Sizes and behaviour of the encoder; its frames are 40 ms, after subsampling by four."""

    least_mel_bins: ClassVar[int] = 7

    kind: Literal["conformer"] = "conformer"


class Conformer(ConformerStack):
    """Subsampling by four, then Conformer layers.

    `forward` returns (N, T', E) with T' = (T - 7) // 4 + 1.
    """

    config: ConformerConfig
    receptive_field = RECEPTIVE_FIELD

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config)
        self.subsampling = ConvSubsampling(
            config.num_mel_bins, config.subsampling_channels, config.dim
        )
        self.layers = nn.ModuleList(ConformerLayer(config) for _ in range(config.layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def embed(self, features_NTF: Tensor, feature_lengths: Tensor) -> Tensor:
        centred_NTF = centre_features(features_NTF, feature_lengths, self.config.feature_norm)
        x_NTE: Tensor = self.subsampling(centred_NTF * _LOG_MEL_SCALE)
        return x_NTE

    def positions(
        self, frames: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return rotary_angles(frames, self.config.dim // self.config.heads, device, dtype)
