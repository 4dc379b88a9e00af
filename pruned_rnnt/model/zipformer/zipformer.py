"""Zipformer encoder (Yao et al. 2023, arXiv 2310.11230), for whole utterances and for streams.

Axes: N batch or streams, T feature frames, T' frames after the embedding (20 ms), T'' encoder
frames (40 ms), F mel bins, C encoder frames of a chunk, E encoder width.

Parameters are named and shaped as in icefall's Zipformer recipe, whose models can be imported
(`pruned_rnnt.interop.icefall_model`): in a model whose attribute `encoder` is this encoder, the
recipe's `encoder_embed.*` and `encoder.*` are `encoder.encoder_embed.*` and `encoder.encoder.*`.

The output of an utterance does not depend on the rest of the batch. A whole utterance alone in its
batch has the same output as in that recipe, except if it is shorter than a chunk: it then counts as
an incomplete chunk, as in a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.model.encoder import WHOLE, Encoder, StreamingEncoder
from pruned_rnnt.model.feature_norm import centre_features, finite_padding
from pruned_rnnt.model.zipformer.config import OUTPUT_RATE, REFERENCE_WARM_UP, ZipformerConfig
from pruned_rnnt.model.zipformer.embedding import (
    CONTEXT,
    EMBEDDING_RATE,
    RECEPTIVE_FIELD,
    Embedding,
    embedding_length,
)
from pruned_rnnt.model.zipformer.frames import (
    UNLIMITED,
    Chunking,
    frames_at_rate,
    relative_positions,
    stream_frames_at_rate,
)
from pruned_rnnt.model.zipformer.layer import LayerState
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.model.zipformer.stack import Stacks
from pruned_rnnt.model.zipformer.whiten import Whiten, update_probabilities


def subsampled_length(lengths: Tensor) -> Tensor:
    """Encoder frames of utterances with `lengths` feature frames; 0 if too short."""
    return (embedding_length(lengths) + 1) // OUTPUT_RATE


class ZipformerState(NamedTuple):
    """State of streams of the whole encoder between chunks; axis 0 of every tensor is the stream.

    embedding: (N, channels, 3, bins), maps before the convolution of the embedding.
    layers: one entry per layer, in the order in which they run.
    processed: (N,) int64, feature frames before the next chunk.
    """

    embedding: Tensor
    layers: tuple[LayerState, ...]
    processed: Tensor


class Zipformer(Encoder):
    """Encodes log-mel features."""

    config: ZipformerConfig
    clock: Clock
    receptive_field = RECEPTIVE_FIELD
    can_be_captured = True

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__(config, chunking=(config.chunk_size, config.left_context))
        self.clock = Clock(
            speed=REFERENCE_WARM_UP / config.warm_up_steps, dropout_scale=config.dropout_scale
        )
        self.encoder_embed = Embedding(self.clock, config.num_mel_bins, config.dims[0])
        self.encoder = Stacks(self.clock, config)
        # Collected once, because iterating over all modules takes milliseconds.
        self._whiteners = [module for module in self.modules() if isinstance(module, Whiten)]

    @property
    def output_dim(self) -> int:
        return self.config.output_dim

    def set_chunks(self, chunk: int, left: int) -> None:
        super().set_chunks(chunk, left)
        if chunk == WHOLE:
            self.chunking = (WHOLE, WHOLE)
            return
        if left == 0:
            raise ValueError(f"left is 0, needs at least the chunk of {chunk} frames")
        step = self.config.common_rate // OUTPUT_RATE
        if chunk % step:
            raise ValueError(
                f"chunk is {chunk}, this Zipformer needs a multiple of {step} frames of 40 ms"
            )
        self.chunking = (OUTPUT_RATE * chunk, OUTPUT_RATE * left)

    def set_step(self, step: float, optimiser_step: float | None = None) -> None:
        """As `Encoder.set_step`.

        To resume exactly, restore this step, the state dict and the states of torch's generators.
        """
        self.clock.set_step(step)

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
            features_NTF: (N, T, F) log-mel energies; padding beyond the lengths is ignored.
            feature_lengths: (N,) integer, on any device.
            chunk_size, left_context: of a causal encoder, in 20 ms frames (-1: all). None: in
                training, sampled from the lists in the configuration; otherwise the values of
                `set_chunks` or of the configuration.

        Returns:
            (N, T'', E) with T'' = ((T - 7) // 2 + 1) // 2, and the (N,) lengths in such frames on
            the device of feature_lengths.

        Raises:
            ValueError: fewer than 9 frames, a number of bins that is not the configured one, a
                chunk size that does not fit the stacks, or a chunk size for a non-causal encoder.
        """
        self._check_features(features_NTF)
        if self.clock.recorder is None:
            self.clock.start_batch()
            if self.training and torch.is_grad_enabled():
                update_probabilities(self._whiteners)
        chunking = self._chunking(chunk_size, left_context)
        lengths_N = feature_lengths.to(features_NTF.device)
        features_NTF = finite_padding(features_NTF, lengths_N)
        centred_NTF = centre_features(features_NTF, lengths_N, self.config.feature_norm)
        lengths_N = embedding_length(lengths_N)
        x_NTE, _ = self.encoder_embed(centred_NTF, lengths_N)
        num_frames = x_NTE.size(1)
        whole = self.config.common_rate
        count = (num_frames + whole - 1) // whole * whole
        if torch.compiler.is_exporting():
            # One frame in the slowest stack would be a special case, which programs leave out.
            count = torch.sym_max(count, 2 * whole)
        x_NTE = functional.pad(x_NTE, (0, 0, 0, count - num_frames))
        positions_RD = relative_positions(0, count, self.config.position_dim, x_NTE)
        frames = {
            rate: frames_at_rate(lengths_N, count, rate, chunking, positions_RD)
            for rate in {1, *self.config.downsampling}
        }
        encoded_NTE, _ = self.encoder(x_NTE, frames, None)
        # A copy: a view would keep the padding in memory, and tie an exported graph to this length.
        frame_T = torch.arange((num_frames + 1) // OUTPUT_RATE, device=x_NTE.device)
        encoded_NTE = encoded_NTE.index_select(1, frame_T)
        return encoded_NTE, subsampled_length(feature_lengths)

    def streaming_init_states(
        self, streams: int, left_context: int | None = None
    ) -> ZipformerState:
        """The initial state of streams.

        Args:
            left_context: frames of 20 ms of left context in attention, a multiple of
                `config.common_rate`; None: the value of the configuration.

        Raises:
            ValueError: the encoder is not causal, or left_context is not such a multiple.
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

        With a chunk of C frames of 20 ms the result equals that of `forward` with chunk_size = C
        and the same left_context, if that is a multiple of C.

        Args:
            features_NTF: (N, 2 C + 13, F) from frame state.processed of each stream; the next chunk
                starts 2 C frames later.
            state: from `streaming_init_states`, or from the previous chunk.
            lengths: (N,) real feature frames, for streams that end within this chunk; None: all
                frames are real. Ignore encoder frames beyond `subsampled_length(lengths)`.

        Returns:
            (N, C / 2, E), and the state for the next chunk.

        Raises:
            ValueError: the number of feature frames or of mel bins is wrong.
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

    def _chunking(self, chunk_size: int | None, left_context: int | None) -> Chunking:
        config = self.config
        if not config.causal:
            if chunk_size not in (None, WHOLE) or left_context not in (None, WHOLE):
                raise ValueError(
                    f"chunk_size is {chunk_size} and left_context is {left_context}, but the "
                    "encoder is not causal and needs whole utterances"
                )
            return Chunking()
        if self.clock.recorder is not None:
            drawn_2 = self.clock.recorder.add(self._draw_chunking, 2).long()
            # Before the first replay the numbers may be zero, and frames are divided by the chunk.
            chunk_1 = drawn_2[:1].clamp(min=config.common_rate)
            return Chunking(chunk_size=chunk_1, left_chunks=drawn_2[1:])
        if self.training and chunk_size is None:
            chunk, left = self._draw_chunking()
            return Chunking(
                chunk_size=None if chunk == UNLIMITED else chunk,
                left_chunks=None if left == UNLIMITED else left,
            )
        chunk_size = self.chunking[0] if chunk_size is None else chunk_size
        left_context = self.chunking[1] if left_context is None else left_context
        config.check_chunk_size(chunk_size)
        if chunk_size == WHOLE:
            return Chunking()
        if left_context == WHOLE:
            return Chunking(chunk_size=chunk_size)
        left_chunks = config.left_chunks(chunk_size, left_context)
        return Chunking(chunk_size=chunk_size, left_chunks=left_chunks)

    def _draw_chunking(self) -> tuple[int, int]:
        """Chunk size and chunks of the past for a training batch; UNLIMITED for no limit."""
        config = self.config
        chunk_size = _sample(config.chunk_sizes or (config.chunk_size,))
        left_context = _sample(config.left_contexts or (config.left_context,))
        if chunk_size == WHOLE:
            return UNLIMITED, UNLIMITED
        if left_context == WHOLE:
            return chunk_size, UNLIMITED
        return chunk_size, config.left_chunks(chunk_size, left_context)


def embedded_chunk(num_features: int) -> int:
    """Frames of 20 ms in a chunk of `num_features` feature frames of a stream."""
    return (num_features - RECEPTIVE_FIELD) // EMBEDDING_RATE + 1 - CONTEXT


def _sample(choices: tuple[int, ...]) -> int:
    return choices[int(torch.randint(len(choices), (), device="cpu"))]


class StreamingZipformer(StreamingEncoder):
    """Runs a causal Zipformer chunk by chunk.

    Args:
        encoder: a causal encoder; it is not copied.
        chunk_size: C; 2 C must be a multiple of every stack's rate (8 for all sizes of the paper).
        left_frames: encoder frames of left context in attention, with the same condition.

    Raises:
        ValueError: the encoder is not causal, or a size does not fit its stacks.

    Attributes:
        input_frames: feature frames of a chunk, 4 C + 13; the last 13 are also the first of the
            next chunk.
        shift: feature frames from one chunk to the next, 4 C.
    """

    def __init__(self, encoder: Zipformer, chunk_size: int, left_frames: int) -> None:
        super().__init__()
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}, needs at least 1")
        encoder.config.check_chunk_size(OUTPUT_RATE * chunk_size)
        encoder.streaming_init_states(0, OUTPUT_RATE * left_frames)
        self.encoder = encoder
        self.chunk_size = chunk_size
        self.left_frames = left_frames
        self.shift = EMBEDDING_RATE * OUTPUT_RATE * chunk_size
        self.input_frames = self.shift + RECEPTIVE_FIELD + EMBEDDING_RATE * (CONTEXT - 1)

    def start(self, streams: int) -> ZipformerState:
        """The initial state of streams."""
        return self.encoder.streaming_init_states(streams, OUTPUT_RATE * self.left_frames)

    def pack(self, state: ZipformerState) -> tuple[Tensor, ...]:
        return state.embedding, *chain.from_iterable(state.layers), state.processed

    def unpack(self, packed: Sequence[Tensor]) -> ZipformerState:
        embedding, *layers, processed = packed
        width = len(LayerState._fields)
        return ZipformerState(
            embedding,
            tuple(LayerState(*layers[i : i + width]) for i in range(0, len(layers), width)),
            processed,
        )

    def forward(
        self, features_NTF: Tensor, state: ZipformerState, lengths: Tensor | None = None
    ) -> tuple[Tensor, ZipformerState]:
        """(N, input_frames, F) -> (N, C, E) and the next state: `Zipformer.streaming_forward`."""
        return self.encoder.streaming_forward(features_NTF, state, lengths)

    def output_length(self, lengths: Tensor) -> Tensor:
        """Encoder frames that are real in a chunk with `lengths` real feature frames."""
        return subsampled_length(lengths).clamp(max=self.chunk_size)
