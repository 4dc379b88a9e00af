"""Zipformer encoder (Yao et al. 2023, arXiv 2310.11230).

Axes: N batch, T feature frames, T' frames after the embedding (20 ms), T'' encoder frames (40 ms),
F mel bins, E encoder width.

Parameters are named and shaped as in icefall's Zipformer recipe, whose models can be imported
(`icefall_import`): a model which holds this encoder as `encoder` has that recipe's
`encoder_embed.*` and `encoder.*` as `encoder.encoder_embed.*` and `encoder.encoder.*`.

What an utterance gives does not depend on what else is in the batch. For whole utterances alone in
their batch the result is that of the recipe, but for utterances shorter than a chunk: these count
as a chunk that is not full, as in a stream.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.feature_norm import centre_features
from pruned_rnnt.model.zipformer.config import (
    OUTPUT_RATE,
    REFERENCE_WARM_UP,
    WHOLE,
    ZipformerConfig,
)
from pruned_rnnt.model.zipformer.embedding import (
    CONTEXT,
    EMBEDDING_RATE,
    RECEPTIVE_FIELD,
    Embedding,
    embedding_length,
)
from pruned_rnnt.model.zipformer.frames import (
    Chunking,
    frames_at_rate,
    relative_positions,
    stream_frames_at_rate,
)
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.model.zipformer.stack import Stacks
from pruned_rnnt.model.zipformer.state import LayerState, ZipformerState
from pruned_rnnt.model.zipformer.whiten import Whiten, refresh


def subsampled_length(lengths: Tensor) -> Tensor:
    """Encoder frames of utterances with `lengths` feature frames; 0 where there are too few."""
    return (embedding_length(lengths) + 1) // OUTPUT_RATE


class Zipformer(Encoder):
    """Features to encoder frames."""

    config: ZipformerConfig
    receptive_field = RECEPTIVE_FIELD

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__()
        self.config = config
        self.chunking = (config.chunk_size, config.left_context)
        self.clock = Clock(
            speed=REFERENCE_WARM_UP / config.warm_up_steps, dropout_scale=config.dropout_scale
        )
        self.encoder_embed = Embedding(self.clock, config.num_mel_bins, config.dims[0])
        self.encoder = Stacks(self.clock, config)
        # Listed once: to look through all modules takes milliseconds.
        self._whiteners = [module for module in self.modules() if isinstance(module, Whiten)]

    @property
    def output_dim(self) -> int:
        return self.config.output_dim

    def set_chunks(self, chunk: int, left: int) -> None:
        super().set_chunks(chunk, left)
        if left == 0:
            raise ValueError(f"left is 0, needs at least the chunk of {chunk} frames")
        step = self.config.common_rate // OUTPUT_RATE
        if chunk % step:
            raise ValueError(
                f"chunk is {chunk}, this Zipformer needs a multiple of {step} frames of 40 ms"
            )
        self.chunking = (OUTPUT_RATE * chunk, OUTPUT_RATE * left)

    def set_step(self, step: float) -> None:
        """As `Encoder.set_step`; may wait for the device.

        The state of training is this step, the buffers in the state dict and torch's generators.
        """
        self.clock.set_step(step)
        refresh(self._whiteners)

    def forward(
        self,
        features_NTF: Tensor,
        feature_lengths: Tensor,
        *,
        chunk_size: int | None = None,
        left_context: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Encode a batch.

        Args:
            features_NTF: (N, T, F) log-mel energies; what lies beyond the length is ignored.
            feature_lengths: (N,) integer, on any device.
            chunk_size, left_context: of a causal encoder, in 20 ms frames (-1: all); None: drawn
                from the configuration in training, else its chunk_size and left_context, or what
                `set_chunks` said.

        Returns:
            (N, T'', E) with T'' = ((T - 7) // 2 + 1) // 2, and the (N,) lengths in such frames,
            where feature_lengths was.

        Raises:
            ValueError: fewer than 9 frames, another number of bins than configured, a chunk size
                which does not fit the stacks, or one for an encoder which is not causal.
        """
        self._check_features(features_NTF)
        self.clock.start_batch()
        chunking = self._chunking(chunk_size, left_context)
        lengths_N = feature_lengths.to(features_NTF.device)
        centred_NTF = centre_features(features_NTF, lengths_N, self.config.feature_norm)
        lengths_N = embedding_length(lengths_N)
        x_NTE, _ = self.encoder_embed(centred_NTF, lengths_N)
        num_frames = x_NTE.size(1)
        whole = self.config.common_rate
        count = (num_frames + whole - 1) // whole * whole
        x_NTE = functional.pad(x_NTE, (0, 0, 0, count - num_frames))
        positions_RD = relative_positions(0, count, self.config.position_dim, x_NTE)
        frames = {
            rate: frames_at_rate(lengths_N, count, rate, chunking, positions_RD)
            for rate in {1, *self.config.downsampling}
        }
        encoded_NTE, _ = self.encoder(x_NTE, frames, None)
        # Cut by a copy: a view would keep the padding, and bind an exported graph to this length.
        frame_T = torch.arange((num_frames + 1) // OUTPUT_RATE, device=x_NTE.device)
        encoded_NTE = encoded_NTE.index_select(1, frame_T)
        return encoded_NTE, subsampled_length(feature_lengths)

    def streaming_init_states(
        self, streams: int, left_context: int | None = None
    ) -> ZipformerState:
        """The state of streams which have heard nothing yet.

        Args:
            left_context: frames of 20 ms before a chunk that attention sees, a multiple of the
                largest downsampling; None: that of the configuration.

        Raises:
            ValueError: an encoder which is not causal, or such a left_context.
        """
        config = self.config
        self.check_causal()
        past = config.left_context if left_context is None else left_context
        if past < 0 or past % config.common_rate:
            raise ValueError(
                f"left_context is {past}, needs a multiple of {config.common_rate} for a stream"
            )
        like = next(self.parameters())
        layers = []
        for index, rate in enumerate(config.downsampling):
            stack, frames = config.stack(index), past // rate
            layers += [
                LayerState(
                    keys=like.new_zeros(streams, frames, stack.heads * stack.query_head_dim),
                    nonlin=like.new_zeros(streams, frames, 3 * stack.dim // 4),
                    values1=like.new_zeros(streams, frames, stack.heads * stack.value_head_dim),
                    values2=like.new_zeros(streams, frames, stack.heads * stack.value_head_dim),
                    convolution1=like.new_zeros(streams, stack.kernel_size // 2, stack.dim),
                    convolution2=like.new_zeros(streams, stack.kernel_size // 2, stack.dim),
                )
                for _ in range(config.layers[index])
            ]
        return ZipformerState(
            embedding=like.new_zeros(streams, *self.encoder_embed.state_shape),
            layers=tuple(layers),
            processed=torch.zeros(streams, dtype=torch.int64, device=like.device),
        )

    def streaming_forward(
        self, features_NTF: Tensor, state: ZipformerState, lengths: Tensor | None = None
    ) -> tuple[Tensor, ZipformerState]:
        """Encode the next chunk of every stream.

        With a chunk of C frames of 20 ms the result is that of `forward` with chunk_size = C and
        the same left_context, where that is a multiple of C.

        Args:
            features_NTF: (N, 2 C + 13, F), beginning state.processed frames into each stream; the
                next chunk begins 2 C frames later.
            state: from `streaming_init_states`, or from the chunk before.
            lengths: (N,) feature frames that are real, where streams end within this chunk; None:
                all are. Of the C / 2 encoder frames those beyond `subsampled_length(lengths)` mean
                nothing.

        Returns:
            (N, C / 2, E), and the state for the next chunk.

        Raises:
            ValueError: a number of feature frames that makes no chunk, or of bins.
        """
        config = self.config
        self._check_features(features_NTF)
        chunk_size = embedded_chunk(features_NTF.size(1))
        config.check_chunk_size(max(chunk_size, 0))
        device = features_NTF.device
        if lengths is None:
            lengths = torch.full_like(state.processed, features_NTF.size(1))
        lengths_N = lengths.to(device)
        centred_NTF = centre_features(features_NTF, lengths_N, config.feature_norm)
        lengths_N = embedding_length(lengths_N)
        x_NTE, embedding = self.encoder_embed(centred_NTF, lengths_N, state.embedding)
        rate_of_first = config.downsampling[0]
        left_context = state.layers[0].keys.size(1) * rate_of_first
        positions_RD = relative_positions(left_context, chunk_size, config.position_dim, x_NTE)
        frames = {
            rate: stream_frames_at_rate(
                lengths_N.clamp(max=chunk_size),
                state.processed // EMBEDDING_RATE,
                chunk_size,
                left_context,
                rate,
                positions_RD,
            )
            for rate in {1, *config.downsampling}
        }
        encoded_NTE, layers = self.encoder(x_NTE, frames, state.layers)
        processed = state.processed + EMBEDDING_RATE * chunk_size
        return encoded_NTE, ZipformerState(embedding, tuple(layers), processed)

    def _check_features(self, features_NTF: Tensor) -> None:
        bins = self.config.num_mel_bins
        if features_NTF.dim() != 3 or features_NTF.size(2) != bins:
            raise ValueError(
                f"features has shape {tuple(features_NTF.shape)}, needs (N, T, {bins})"
            )
        if features_NTF.size(1) < RECEPTIVE_FIELD:
            raise ValueError(
                f"features has {features_NTF.size(1)} frames, the encoder needs at least "
                f"{RECEPTIVE_FIELD}: pad shorter audio with silence"
            )

    def _chunking(self, chunk_size: int | None, left_context: int | None) -> Chunking:
        config = self.config
        if not config.causal:
            if chunk_size not in (None, WHOLE) or left_context not in (None, WHOLE):
                raise ValueError(
                    f"chunk_size is {chunk_size} and left_context is {left_context}, but the "
                    "encoder is not causal and sees whole utterances"
                )
            return Chunking()
        if chunk_size is None:
            chunk_size = _draw(config.chunk_sizes) if self.training else self.chunking[0]
        if left_context is None:
            left_context = _draw(config.left_contexts) if self.training else self.chunking[1]
        config.check_chunk_size(chunk_size)
        if chunk_size == WHOLE:
            return Chunking()
        left_chunks = None if left_context == WHOLE else max(left_context // chunk_size, 1)
        return Chunking(chunk_size=chunk_size, left_chunks=left_chunks)


def embedded_chunk(num_features: int) -> int:
    """Frames of 20 ms which a chunk of a stream with so many feature frames gives."""
    return (num_features - RECEPTIVE_FIELD) // EMBEDDING_RATE + 1 - CONTEXT


def _draw(choices: tuple[int, ...]) -> int:
    return choices[int(torch.randint(len(choices), (), device="cpu"))]
