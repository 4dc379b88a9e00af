"""Base classes of encoders, which turn feature frames of 10 ms into encoder frames of 40 or 80 ms.

Axes: N batch or streams, T feature frames, T' encoder frames, F mel bins, C encoder frames of a
chunk, E encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

if TYPE_CHECKING:
    from pruned_rnnt.model.zipformer.schedule import Clock

# As a chunk size: the whole utterance. As a left context: all of the past.
WHOLE = -1


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Settings that all encoders have.

    kind: conformer, fastconformer, zipformer, transformers, or the name of an encoder that
        `register_encoder` has added.
    num_mel_bins: mel bins of the features; `pruned-rnnt prepare` computes 80.
    features: `fbank` are those of `pruned-rnnt prepare`; `nemo` those of NeMo's models, and
        `samples` the samples themselves, 160 a frame; both come from recordings
        (data.features=waveform).
    causal: the encoder uses future frames only within a chunk, and can transcribe live audio.
    """

    kind: str
    num_mel_bins: int = 80
    features: Literal["fbank", "nemo", "samples"] = "fbank"
    causal: bool = False

    @property
    def stream_sizes(self) -> tuple[int, int]:
        """Default chunk and left context of a stream of a causal encoder, in encoder frames."""
        raise NotImplementedError


class Encoder(nn.Module):
    """Base class of encoders.

    `forward(features_NTF, feature_lengths)` returns (N, T', E) and the (N,) lengths in encoder
    frames, on the device of feature_lengths; T' = (T - receptive_field) // R + 1 with the rate
    R = subsampling_factor. Encoder frame j starts at feature frame R j.

    Attributes:
        subsampling_factor: feature frames per encoder frame.
        receptive_field: feature frames that one encoder frame needs.
        output_dim: E.
        chunking: chunk and left context of a causal encoder in evaluation mode, in its own units.
        clock: evaluates the encoder's training schedules; None for an encoder without any.
        can_be_captured: passes of one shape always launch the same kernels, call each module once,
            and never wait for the device, so that they can run as CUDA graphs.
    """

    config: EncoderConfig
    receptive_field: int
    subsampling_factor: int = SUBSAMPLING_FACTOR
    clock: Clock | None = None
    can_be_captured = False

    def __init__(self, config: EncoderConfig, chunking: tuple[Any, Any]) -> None:
        super().__init__()
        self.config = config
        self.chunking = chunking

    @property
    def output_dim(self) -> int:
        raise NotImplementedError

    def output_lengths(self, feature_lengths: Tensor) -> Tensor:
        """Encoder frames of utterances with these numbers of feature frames; 0 if too short."""
        frames = (feature_lengths - self.receptive_field) // self.subsampling_factor + 1
        return frames.clamp(min=0)

    def _check_features(self, features_NTF: Tensor) -> None:
        """Raise ValueError if the features are too short, or have other bins than configured."""
        bins = self.config.num_mel_bins
        if features_NTF.dim() != 3 or features_NTF.size(2) != bins:
            raise ValueError(
                f"features has shape {tuple(features_NTF.shape)}, needs (N, T, {bins})"
            )
        if features_NTF.size(1) < self.receptive_field:
            raise ValueError(
                f"features has {features_NTF.size(1)} frames, the encoder needs at least "
                f"{self.receptive_field}: pad shorter audio with silence"
            )

    def set_step(self, step: float, optimiser_step: float | None = None) -> None:
        """Set the step of training schedules; called before each training batch.

        Args:
            step: number of earlier batches, counted as if each had ten minutes of audio.
            optimiser_step: number of earlier batches; None: as `step`.
        """

    def check_trainable(self) -> None:
        """Raise ValueError if the encoder cannot be trained."""

    def set_chunks(self, chunk: int, left: int) -> None:
        """Set the chunks of a causal encoder in evaluation mode, instead of the configured ones.

        Args:
            chunk: encoder frames of a chunk, or `WHOLE` for whole utterances.
            left: encoder frames of left context; a multiple of chunk. Without meaning for `WHOLE`.

        Raises:
            ValueError: the encoder is not causal, or does not support these sizes.
        """
        self.check_causal()
        if chunk != WHOLE and (chunk < 1 or left < 0 or left % chunk):
            raise ValueError(
                f"chunk is {chunk} and left is {left}, need chunk >= 1 and left a multiple of "
                f"chunk, or chunk = {WHOLE} for whole utterances"
            )

    def check_causal(self) -> None:
        """Raise ValueError if the encoder needs whole utterances."""
        if not self.config.causal:
            raise ValueError(
                "the encoder is not causal, so it has no chunks and cannot stream: train it with "
                "model.encoder.causal=true"
            )


class StreamingEncoder(nn.Module):
    """Base class of encoders that process streams chunk by chunk.

    Attributes:
        chunk_size: C.
        left_frames: encoder frames of left context.
        input_frames: feature frames of a chunk.
        shift: feature frames from one chunk to the next.
    """

    chunk_size: int
    left_frames: int
    input_frames: int
    shift: int

    def start(self, streams: int) -> Any:
        """The state at the start of streams: a named tuple of tensors."""
        raise NotImplementedError

    def pack(self, state: Any) -> tuple[Tensor, ...]:
        """All tensors of a state, with the streams on axis 0."""
        raise NotImplementedError

    def unpack(self, packed: Sequence[Tensor]) -> Any:
        """The state of the tensors that `pack` returns."""
        raise NotImplementedError

    def forward(
        self, features_NTF: Tensor, state: Any, lengths: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """(N, input_frames, F) and the state -> (N, C, E) and the state for the next chunk.

        Args:
            lengths: (N,) valid feature frames, if streams end in this chunk; None: all are valid.
                Encoder frames beyond `output_length(lengths)` are undefined.
        """
        raise NotImplementedError

    def output_length(self, lengths: Tensor) -> Tensor:
        """Valid encoder frames of a chunk with `lengths` valid feature frames."""
        raise NotImplementedError
