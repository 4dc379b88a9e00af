"""Conformer encoder (Gulati et al. 2020, arXiv 2005.08100), small by default.

Axes: N batch, T frames (after subsampling), F mel bins, E encoder width.

Differences from the paper, and why:
- no LayerNorm after a layer: with it, a model of this size gives every frame the same output for
  hundreds of steps (measured on fsdd); without it, the model learns from the start;
- rotary instead of relative positions: fewer operations, and streams need no absolute position;
- LayerNorm instead of BatchNorm in the convolution module: the output of an utterance must not
  depend on the rest of the batch.

Padding never affects a real frame: it is masked in attention and zeroed before each convolution
over time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.config.checks import check_at_least, check_fractions
from pruned_rnnt.model.attention import (
    RotaryAttention,
    attention_bias,
    attention_kernels,
    attention_mask,
    may_be_padded,
    rotary_angles,
)
from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.conformer_convolution import ConvolutionModule
from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.encoder import Encoder, EncoderConfig
from pruned_rnnt.model.feature_norm import centre_features, check_feature_norm
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.subsampling import (
    RECEPTIVE_FIELD,
    ConvSubsampling,
    subsampled_length,
)

_LOG_MEL_SCALE = 0.25
# Left context of a stream, in chunks, for models trained with unlimited left context.
_LEFT_CHUNKS = 4


@dataclass(frozen=True, kw_only=True)
class ConformerConfig(EncoderConfig):
    """Sizes and behaviour of the encoder; its frames are 40 ms, after subsampling by four.

    layers: number of Conformer layers.
    dim: width of every layer, a multiple of twice the heads.
    heads: attention heads of every layer.
    feedforward_dim: inner width of the feed-forward modules.
    kernel_size: kernel size of the convolution modules, in frames of 40 ms; an odd number.
    subsampling_channels: channels of the convolutions that subsample by four.
    dropout: probability of dropping a value in training.
    feature_norm: value that is subtracted from the features first: a constant (`fixed`), the mean
        of the utterance (`utterance`), or a mean in which loud frames count most, so that silence
        around the speech changes nothing (`speech`).
    chunk_size: for a causal encoder: frames of 40 ms in a chunk, which attend to each other.
    left_chunks: for a causal encoder: earlier chunks that a chunk attends to; null for all.
    chunk_sizes: for a causal encoder: training samples the chunk size of each batch from these; if
        empty, it is always chunk_size.
    """

    kind: Literal["conformer"] = "conformer"
    layers: int = 4
    dim: int = 128
    heads: int = 4
    feedforward_dim: int = 384
    kernel_size: int = 15
    subsampling_channels: int = 16
    dropout: float = 0.1
    feature_norm: Literal["fixed", "utterance", "speech"] = "fixed"
    chunk_size: int = 16
    left_chunks: int | None = None
    chunk_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("layers", "dim", "heads", "feedforward_dim", "kernel_size", "subsampling_channels")
        check_at_least("model.encoder", self, num_mel_bins=7, **dict.fromkeys(sizes, 1))
        check_at_least("model.encoder", self, chunk_size=1, chunk_sizes=1, left_chunks=0)
        check_fractions("model.encoder", self, "dropout", below_one=True)
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"model.encoder.dim is {self.dim}, needs a multiple of 2 * heads = {2 * self.heads}"
            )
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"model.encoder.kernel_size is {self.kernel_size}, needs an odd number"
            )
        check_feature_norm(self.feature_norm, self.causal)

    @property
    def stream_sizes(self) -> tuple[int, int]:
        chunks = _LEFT_CHUNKS if self.left_chunks is None else self.left_chunks
        return self.chunk_size, chunks * self.chunk_size


class Conformer(Encoder):
    """Subsampling by four, then Conformer layers."""

    config: ConformerConfig
    receptive_field = RECEPTIVE_FIELD
    can_be_captured = True

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config, chunking=(config.chunk_size, config.left_chunks))
        self.subsampling = ConvSubsampling(
            config.num_mel_bins, config.subsampling_channels, config.dim
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(ConformerLayer(config) for _ in range(config.layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    @property
    def output_dim(self) -> int:
        return self.config.dim

    def set_chunks(self, chunk: int, left: int) -> None:
        super().set_chunks(chunk, left)
        self.chunking = (chunk, left // chunk)

    def draw_choices(self) -> dict[str, Any]:
        config = self.config
        if not (config.causal and config.chunk_sizes):
            return {}
        drawn = int(torch.randint(len(config.chunk_sizes), (), device="cpu"))
        return {"chunk_size": config.chunk_sizes[drawn]}

    def forward(
        self, features_NTF: Tensor, feature_lengths: Tensor, *, chunk_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode a batch.

        Args:
            features_NTF: (N, T, F) log-mel energies; frames beyond the length are ignored.
            feature_lengths: (N,) integer, on any device; if on the CPU, the output lengths are
                too, and can be read without synchronising with the GPU.
            chunk_size: of a causal encoder, in encoder frames. None: in training, sampled from the
                sizes in the configuration if it has some; otherwise the value of `set_chunks` or of
                the configuration.

        Returns:
            (N, T', E) with T' = (T - 7) // 4 + 1, and the (N,) lengths in encoder frames, on the
            device of feature_lengths.

        Raises:
            ValueError: fewer than 7 frames, or a number of bins other than configured.
        """
        config = self.config
        if features_NTF.dim() != 3 or features_NTF.size(2) != config.num_mel_bins:
            raise ValueError(
                f"features has shape {tuple(features_NTF.shape)}, "
                f"needs (N, T, {config.num_mel_bins})"
            )
        device = features_NTF.device
        x_NTE = self.embed(features_NTF, feature_lengths)
        lengths = subsampled_length(feature_lengths)
        frames = x_NTE.size(1)
        lengths_here = lengths.to(device)
        chunking = self._chunking(chunk_size)
        dtype = compute_dtype(x_NTE, self.subsampling.projection.weight)
        padding_NT1 = mask = None
        if may_be_padded(x_NTE, lengths):
            beyond_NT = torch.arange(frames, device=device) >= lengths_here[:, None]
            padding_NT1 = beyond_NT.unsqueeze(-1)
            # Attention gives padding the weight 0, but 0 times NaN is NaN: padding must be finite.
            x_NTE = x_NTE.masked_fill(padding_NT1, 0.0)
        if padding_NT1 is not None or chunking != (None, None):
            mask = attention_mask(lengths_here, frames, *chunking)
            if should_avoid_cudnn_replanning(x_NTE):
                mask = attention_bias(mask, dtype)
        x_NTE = self.dropout(x_NTE)
        angles = rotary_angles(frames, config.dim // config.heads, device, dtype)
        with attention_kernels(x_NTE):
            for layer in self.layers:
                x_NTE = layer(x_NTE, padding_NT1, mask, angles)
        return x_NTE, lengths

    def _chunking(self, chunk_size: int | None) -> tuple[int | None, int | None]:
        """The chunk size and the number of left chunks for this batch."""
        config = self.config
        if not config.causal:
            return None, None
        if chunk_size is None and self.training:
            chunk_size = self.draw_choices().get("chunk_size")
        return self.chunking if chunk_size is None else (chunk_size, config.left_chunks)

    def embed(self, features_NTF: Tensor, feature_lengths: Tensor) -> Tensor:
        """The input of the first layer (N, T', E): normalised, subsampled features."""
        centred_NTF = centre_features(features_NTF, feature_lengths, self.config.feature_norm)
        x_NTE: Tensor = self.subsampling(centred_NTF * _LOG_MEL_SCALE)
        return x_NTE


class ConformerLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward; each on a residual branch."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        dim = config.dim
        self.feedforward_in = FeedForward(dim, config.feedforward_dim)
        self.attention_norm = LayerNorm(dim)
        self.attention = RotaryAttention(dim, config.heads)
        self.convolution = ConvolutionModule(dim, config.kernel_size, config.causal)
        self.feedforward_out = FeedForward(dim, config.feedforward_dim)
        self.dropout = nn.Dropout(config.dropout)
        self._cast_parameters = CastParameters(
            module for module in self.modules() if isinstance(module, (nn.Linear, nn.Conv1d))
        )

    def forward(
        self,
        x_NTE: Tensor,
        padding_NT1: Tensor | None,
        mask: Tensor | None,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        with self._cast_parameters.cast(x_NTE):
            return self.run_branches(
                x_NTE,
                attend=lambda normed_NTE: self.attention(normed_NTE, mask, angles),
                convolve=lambda input_NTE: self.convolution(input_NTE, padding_NT1),
            )

    def run_branches(
        self,
        x_NTE: Tensor,
        attend: Callable[[Tensor], Tensor],
        convolve: Callable[[Tensor], Tensor],
    ) -> Tensor:
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

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(
            LayerNorm(dim), Linear(dim, hidden_dim), nn.SiLU(), Linear(hidden_dim, dim)
        )
