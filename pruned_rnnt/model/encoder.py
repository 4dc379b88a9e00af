"""What every encoder is: features to one frame of 40 ms for each four of 10 ms.

Axes: N batch or streams, T feature frames, T' encoder frames, F mel bins, C encoder frames of a
chunk, E encoder width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Settings that every encoder has.

    kind: conformer or zipformer.
    num_mel_bins: of the features; `pruned-rnnt prepare` computes 80.
    causal: the encoder sees no more than a chunk of the future, and can transcribe live.
    """

    kind: str
    num_mel_bins: int = 80
    causal: bool = False

    @property
    def stream_sizes(self) -> tuple[int, int]:
        """Chunk and past of a stream in encoder frames, where nothing else is asked for."""
        raise NotImplementedError


class Encoder(nn.Module):
    """Base class of encoders, whose `forward` maps features and lengths to frames and lengths.

    `forward(features_NTF, feature_lengths)` gives (N, T', E) and the (N,) lengths in such frames,
    on the device of feature_lengths; T' = (T - receptive_field) // 4 + 1. Frame j of T' begins with
    feature frame 4 j.

    Attributes:
        receptive_field: feature frames without which there is no encoder frame.
        output_dim: E.
    """

    config: EncoderConfig
    receptive_field: int

    @property
    def output_dim(self) -> int:
        raise NotImplementedError

    def output_lengths(self, feature_lengths: Tensor) -> Tensor:
        """Encoder frames of utterances with so many feature frames; 0 where there are too few."""
        frames = (feature_lengths - self.receptive_field) // SUBSAMPLING_FACTOR + 1
        return frames.clamp(min=0)

    def set_step(self, step: float) -> None:
        """Set what schedules of training go by, before each training batch.

        Args:
            step: batches before this one, counted as if each had ten minutes of audio.
        """

    def set_chunks(self, chunk: int, left: int) -> None:
        """How a causal encoder cuts utterances in evaluation mode, instead of as configured.

        Args:
            chunk: encoder frames which are seen together.
            left: encoder frames before them which are seen as well; a multiple of chunk.

        Raises:
            ValueError: an encoder which is not causal, or sizes which do not suit it.
        """
        self.check_causal()
        if chunk < 1 or left < 0 or left % chunk:
            raise ValueError(
                f"chunk is {chunk} and left is {left}; need at least 1, and a multiple of the chunk"
            )

    def check_causal(self) -> None:
        """Raises ValueError for an encoder which has to see whole utterances."""
        if not self.config.causal:
            raise ValueError("the encoder is not causal: train it with model.encoder.causal=true")


class StreamingEncoder(nn.Module):
    """Base class of encoders which hear streams chunk by chunk.

    Attributes:
        chunk_size: C.
        left_frames: encoder frames before the chunk that are seen.
        input_frames: feature frames of a chunk.
        shift: feature frames from one chunk to the next, 4 C.
    """

    chunk_size: int
    left_frames: int
    input_frames: int
    shift: int

    def start(self, streams: int) -> Any:
        """The state of streams which have heard nothing yet: a named tuple of tensors."""
        raise NotImplementedError

    def forward(
        self, features_NTF: Tensor, state: Any, lengths: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """(N, input_frames, F) and the state -> (N, C, E) and the state for the next chunk.

        Args:
            lengths: (N,) feature frames that are real, where streams end within this chunk; None:
                all are. Encoder frames beyond `output_length(lengths)` mean nothing.
        """
        raise NotImplementedError

    def output_length(self, lengths: Tensor) -> Tensor:
        """Encoder frames that are real in a chunk with `lengths` real feature frames."""
        raise NotImplementedError
