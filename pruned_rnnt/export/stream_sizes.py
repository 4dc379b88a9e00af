"""Chunk and past of a streaming model, where the user did not say."""

from __future__ import annotations

from pruned_rnnt.model.encoder import StreamingEncoder
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.model.zipformer.config import OUTPUT_RATE, ZipformerConfig
from pruned_rnnt.usage_errors import ExportError

_FRAME_SECONDS = 0.01
# The last symbols of a causal model come up to this much after they were spoken.
_DELAY_SECONDS = 0.3


def stream_sizes(model: TransducerModel, chunk: int, left: int) -> tuple[int, int]:
    """Encoder frames (40 ms) of a chunk and before it; 0 takes what the model was trained with.

    Raises:
        ExportError: the model is not causal, or its stacks cannot have such sizes.
    """
    config = model.encoder.config
    if not config.causal:
        raise ExportError(
            "the model is not causal, so it cannot stream: train it with model.encoder.causal=true"
        )
    trained_chunk, trained_left = config.stream_sizes
    chunk, left = chunk or trained_chunk, left or trained_left
    if isinstance(config, ZipformerConfig):
        step = config.common_rate // OUTPUT_RATE
        for name, size in (("--chunk", chunk), ("--left", left)):
            if size % step:
                raise ExportError(
                    f"{name} is {size}, this Zipformer needs a multiple of {step} frames of 40 ms"
                )
    return chunk, left


def tail_seconds(stream: StreamingEncoder) -> float:
    """Silence after the last word which makes its chunk a full one."""
    return round((stream.input_frames + 1) * _FRAME_SECONDS + _DELAY_SECONDS, 3)
