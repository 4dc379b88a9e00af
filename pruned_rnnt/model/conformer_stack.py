"""What encoders of Conformer layers have in common: chunks, masks and the passes over the layers.

Axes: N batch, T frames (after subsampling), F mel bins, E encoder width.

Padding never affects a real frame: it is masked in attention and zeroed before each convolution
over time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruned_rnnt.model.attention import (
    Positions,
    attention_bias,
    attention_kernels,
    attention_mask,
    may_be_padded,
)
from pruned_rnnt.model.chunks import Chunks, drawn_chunks
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.encoder import WHOLE, Encoder
from pruned_rnnt.model.feature_norm import finite_padding
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.linear import Linear


class ConformerStack(Encoder):
    """Base class: subsampling by `embed`, then the layers.

    Subclasses set `subsampling`, a module with a `projection` to E, and `layers`.

    Attributes:
        window: frames before and after each frame that it attends to, without chunks; None: all.
    """

    config: ConformerSettings
    subsampling: nn.Module
    layers: nn.ModuleList
    only_smallest: Tensor | None
    window: tuple[int, int] | None = None
    can_be_captured = True

    def __init__(self, config: ConformerSettings) -> None:
        super().__init__(config, chunking=(config.chunk_size, config.left_chunks))
        self.dropout = nn.Dropout(config.dropout)
        # On the device, so that the CUDA graphs of later steps are those of the first ones.
        only_smallest = torch.ones((), dtype=torch.bool) if config.smallest_chunk_steps else None
        self.register_buffer("only_smallest", only_smallest, persistent=False)

    def embed(self, features_NTF: Tensor, feature_lengths: Tensor) -> Tensor:
        """The input of the first layer (N, T', E): normalised, subsampled features."""
        raise NotImplementedError

    def positions(self, frames: int, device: torch.device, dtype: torch.dtype) -> Positions:
        """The positions that the layers' attention takes for so many frames."""
        raise NotImplementedError

    def layer_dtype(self, x_NTE: Tensor) -> torch.dtype:
        """The dtype of the layers' matrix products."""
        projection = self.subsampling.projection
        assert isinstance(projection, Linear)
        return compute_dtype(x_NTE, projection.weight)

    @property
    def output_dim(self) -> int:
        return self.config.dim

    def set_step(self, step: float, optimiser_step: float | None = None) -> None:
        if self.only_smallest is not None:
            steps = step if optimiser_step is None else optimiser_step
            self.only_smallest.fill_(steps < self.config.smallest_chunk_steps)

    def set_chunks(self, chunk: int, left: int) -> None:
        super().set_chunks(chunk, left)
        self.chunking = (chunk, 0 if chunk == WHOLE else left // chunk)

    def forward(
        self, features_NTF: Tensor, feature_lengths: Tensor, *, chunk_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode a batch.

        Args:
            features_NTF: (N, T, F) log-mel energies; frames beyond the length are ignored.
            feature_lengths: (N,) integer, on any device; if on the CPU, the output lengths are
                too, and can be read without synchronising with the GPU.
            chunk_size: of a causal encoder, in encoder frames (-1: the whole utterance). None: in
                training, as configured: one size, or sampled for each utterance from `chunk_sizes`;
                in evaluation mode, that of `set_chunks`, or else the configured size.

        Returns:
            (N, T', E), where T' is `output_lengths` of T, and the (N,) lengths in encoder frames,
            on the device of feature_lengths.

        Raises:
            ValueError: fewer frames than the receptive field, or a number of bins other than
                configured.
        """
        self._check_features(features_NTF)
        device = features_NTF.device
        features_NTF = finite_padding(features_NTF, feature_lengths)
        x_NTE = self.embed(features_NTF, feature_lengths)
        lengths = self.output_lengths(feature_lengths)
        frames = x_NTE.size(1)
        lengths_here = lengths.to(device)
        chunks = self._chunks(chunk_size, lengths_here, frames)
        dtype = self.layer_dtype(x_NTE)
        padding_NT1 = mask = None
        if may_be_padded(x_NTE, lengths):
            beyond_NT = torch.arange(frames, device=device) >= lengths_here[:, None]
            padding_NT1 = beyond_NT.unsqueeze(-1)
            # Attention gives padding the weight 0, but 0 times NaN is NaN: padding must be finite.
            x_NTE = x_NTE.masked_fill(padding_NT1, 0.0)
        if padding_NT1 is not None or chunks is not None or self.window is not None:
            mask = attention_mask(lengths_here, frames, chunks, window=self.window)
            if should_avoid_cudnn_replanning(x_NTE):
                mask = attention_bias(mask, dtype)
        x_NTE = self.dropout(x_NTE)
        positions = self.positions(frames, device, dtype)
        with attention_kernels(x_NTE):
            for layer in self.layers:
                x_NTE = layer(x_NTE, padding_NT1, mask, positions)
        return x_NTE, lengths

    def _chunks(self, chunk_size: int | None, lengths_N: Tensor, frames: int) -> Chunks | None:
        """The chunks of this batch; None: the whole utterance."""
        config = self.config
        if not config.causal:
            return None
        sizes: tuple[int, ...] = config.chunk_sizes or (config.chunk_size,)
        left = config.left_chunks
        if chunk_size is not None:
            sizes = (chunk_size,)
        elif not self.training:
            size, left = self.chunking
            sizes = (size,)
        if sizes == (WHOLE,):
            return None
        if not self.training or (len(sizes) == 1 and not config.random_first_chunk):
            return Chunks(sizes[0], left)
        return drawn_chunks(
            sizes,
            left,
            lengths_N,
            frames,
            cut=config.random_first_chunk,
            only_smallest=self.only_smallest,
        )
