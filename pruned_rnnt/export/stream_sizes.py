"""Chunk and past of a streaming model, where the user did not say."""

from __future__ import annotations

from pruned_rnnt.export.extras import ExportError
from pruned_rnnt.model.streaming import StreamingConformer
from pruned_rnnt.model.transducer import TransducerModel

# Chunks of the past where training had no bound.
_LEFT_CHUNKS = 4
_FRAME_SECONDS = 0.01
# The last symbols of a causal model come up to this much after they were spoken.
_DELAY_SECONDS = 0.3


def stream_sizes(model: TransducerModel, chunk: int, left: int) -> tuple[int, int]:
    """Encoder frames (40 ms) of a chunk and before it; 0 takes what the model was trained with.

    Raises:
        ExportError: the model is not causal.
    """
    config = model.config.encoder
    if not config.causal:
        raise ExportError(
            "the model is not causal, so it cannot stream: train it with model.encoder.causal=true"
        )
    chunk = chunk or config.chunk_size
    chunks = _LEFT_CHUNKS if config.left_chunks is None else config.left_chunks
    return chunk, left or chunks * chunk


def tail_seconds(stream: StreamingConformer) -> float:
    """Silence after the last word which makes its chunk a full one."""
    return round((stream.input_frames + 1) * _FRAME_SECONDS + _DELAY_SECONDS, 3)
