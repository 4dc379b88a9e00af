"""Chunk and left context of a streaming model: the user's, or those of training."""

from __future__ import annotations

import numbers

from pruned_rnnt.decode.word_times import FEATURE_SECONDS, frame_seconds
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.encoder import StreamingEncoder
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.zipformer.config import OUTPUT_RATE, ZipformerConfig
from pruned_rnnt.system.usage_errors import ExportError

# A causal model emits the last symbols up to this long after they were spoken.
_DELAY_SECONDS = 0.3
# A minute of audio, and ten minutes of context, which every stream keeps.
_MOST_CHUNK_SECONDS, _MOST_LEFT_SECONDS = 60.0, 600.0


def stream_sizes(
    model: SpeechModel, chunk: int, left: int, names: tuple[str, str] = ("--chunk", "--left")
) -> tuple[int, int]:
    """Encoder frames of a chunk and of its left context; 0 for those of training.

    Args:
        names: of both in errors, as the user has set them.

    Raises:
        ExportError: the model is not causal or normalises its features in whole utterances, its
            stacks do not support such sizes, or they are above a minute or ten minutes.
    """
    config = model.encoder.config
    if isinstance(config, ConformerSettings) and config.feature_norm == "bins":
        raise ExportError(
            "model.encoder.feature_norm is bins: the model normalises its features by their mean "
            "and deviation in the whole utterance, which a stream does not have: use it on whole "
            "recordings, or train a model with model.encoder.causal=true and "
            "model.encoder.feature_norm=fixed"
        )
    try:
        model.encoder.check_causal()
    except ValueError as error:
        raise ExportError(str(error)) from error
    trained_chunk, trained_left = config.stream_sizes
    chunk, left = chunk or trained_chunk, left or trained_left
    frame = frame_seconds(model.encoder)
    limits = (chunk, 1, _MOST_CHUNK_SECONDS), (left, 0, _MOST_LEFT_SECONDS)
    for name, (size, least, seconds) in zip(names, limits, strict=True):
        most = round(seconds / frame)
        is_whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if not is_whole or not least <= size <= most:
            raise ExportError(
                f"{name} is {size!r}, needs a whole number of frames ({round(1000 * frame)} ms) "
                f"from 1 to {most}, or 0 for that of training"
            )
    if isinstance(config, ZipformerConfig):
        step = config.common_rate // OUTPUT_RATE
        for name, size in zip(names, (chunk, left), strict=True):
            if size % step:
                raise ExportError(
                    f"{name} is {size}, this Zipformer needs a multiple of {step} frames (40 ms)"
                )
    return int(chunk), int(left)


def tail_seconds(stream: StreamingEncoder) -> float:
    """Seconds of audio to append after the last word so that its chunk becomes full."""
    return round((stream.input_frames + 1) * FEATURE_SECONDS + _DELAY_SECONDS, 3)
