"""A Zipformer with a fixed chunk size, with the interface of `StreamingConformer`.

Axes: N streams, T feature frames of a chunk, F mel bins, C encoder frames (40 ms) of a chunk,
E encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from pruned_rnnt.model.encoder import StreamingEncoder
from pruned_rnnt.model.zipformer.config import OUTPUT_RATE
from pruned_rnnt.model.zipformer.embedding import CONTEXT, EMBEDDING_RATE, RECEPTIVE_FIELD
from pruned_rnnt.model.zipformer.state import LayerState, ZipformerState
from pruned_rnnt.model.zipformer.zipformer import Zipformer, subsampled_length


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
