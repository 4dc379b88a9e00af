"""Transcribe files in Python: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_stream import FeatureStream, audio_blocks
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import DecodeConfig, build_search
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.decode.timing.head_paths import head_paths
from pruned_rnnt.decode.word_times import TimedWord
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.transcribe.joined_path import JoinedPath
from pruned_rnnt.transcribe.segments import AudioPiece, SegmentConfig, Segmenter, SpeechDetector
from pruned_rnnt.transcribe.speech_energy import EnergyDetector
from pruned_rnnt.transcribe.speech_silero import SileroDetector
from pruned_rnnt.transcribe.windows import encode_features


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """The text of a recording.

    score: natural log-probability of the path, or the sum of those of all segments.
    seconds: length of the audio.
    """

    text: str
    words: tuple[TimedWord, ...]
    score: float
    seconds: float

    def __str__(self) -> str:
        return self.text


class Recogniser:
    """Transcribes files of any length; only the transcript grows with their length.

    Audio longer than `segments.window` is cut at pauses. Where there is no pause for so long,
    overlapping windows are transcribed and joined at words that both contain.

    Args:
        p99_duration: 99th percentile of the training utterances' durations in seconds; None if
            unknown.
        calibration: of the model's word times and confidences.
        segments: how audio is cut.
        decode: search method, beam and fusion; default: greedy search.
        language_model: the model that `decode.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as `build_search`.
        MissingPackageError: a package that `segments.detector` needs is not installed.
    """

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        p99_duration: float | None = None,
        calibration: Calibration | None = None,
        *,
        segments: SegmentConfig | None = None,
        decode: DecodeConfig | None = None,
        language_model: LanguageModel | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.p99_duration = p99_duration
        self._calibration = calibration
        self._segments = segments or SegmentConfig()
        self._new_detector()
        self._search = build_search(model, decode or DecodeConfig(), tokenizer, language_model)

    def transcribe(
        self,
        audio: Path | str | FloatArray,
        *,
        on_seconds: Callable[[float], None] | None = None,
    ) -> Transcription:
        """Transcribe an audio file (any that `open_audio` reads), or (S,) samples at 16 kHz.

        Audio with nothing but digital silence gives an empty text.

        Args:
            on_seconds: called with the seconds of audio read so far.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.load_audio.read_audio`.
        """
        blocks = audio_blocks(audio) if isinstance(audio, str | Path) else [audio]
        return self._transcribe(_pieces(blocks), on_seconds)

    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """Transcribe log-mel features (T, F).

        Raises:
            ValueError: the detector is `silero`, which needs samples.
        """
        if self._segments.detector == "silero":
            raise ValueError("the detector silero needs samples: use transcribe, or energy")
        return self._transcribe([AudioPiece(np.zeros(0, dtype=np.float32), features_TF)], None)

    @torch.inference_mode()
    def _transcribe(
        self, pieces: Iterable[AudioPiece], on_seconds: Callable[[float], None] | None
    ) -> Transcription:
        counter = _FrameCounter(pieces, on_seconds)
        segmenter = Segmenter(self._segments.lengths(self.p99_duration), self._new_detector())
        path = JoinedPath(self.tokenizer, self._calibration)
        for segment in segmenter(counter):
            encoded_NTE = encode_features(self.model, segment.features_TF)
            lengths = torch.tensor([encoded_NTE.size(1)])
            ((best, *_),) = self._search(encoded_NTE, lengths)
            (head,) = head_paths(self.model, encoded_NTE, lengths, [best.symbols])
            path.append(best, head, segment)
        return Transcription(
            text=path.text,
            words=path.words,
            score=path.score,
            seconds=round(counter.frames * FEATURE_SECONDS, 2),
        )

    def _new_detector(self) -> SpeechDetector:
        return SileroDetector() if self._segments.detector == "silero" else EnergyDetector()


def _pieces(blocks: Iterable[FloatArray]) -> Iterator[AudioPiece]:
    """Sample blocks (S,) at 16 kHz with the features that are complete with them."""
    stream = FeatureStream()
    for block_S in blocks:
        yield AudioPiece(block_S, stream.accept(block_S))
    yield AudioPiece(np.zeros(0, dtype=np.float32), stream.finish())


class _FrameCounter:
    """Iterates over pieces, counts their frames and reports the seconds read."""

    def __init__(
        self, pieces: Iterable[AudioPiece], on_seconds: Callable[[float], None] | None
    ) -> None:
        self._pieces = pieces
        self._on_seconds = on_seconds
        self.frames = 0

    def __iter__(self) -> Iterator[AudioPiece]:
        for piece in self._pieces:
            self.frames += len(piece.features_TF)
            yield piece
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)


def load(
    path: Path | str,
    device: torch.device | str = "cpu",
    *,
    segments: SegmentConfig | None = None,
) -> Recogniser:
    """Load a model that `pruned-rnnt export RUN --format torch` wrote.

    Args:
        path: model.pt, or its folder.
        segments: as of `Recogniser`.

    Raises:
        ValueError: the file does not exist, is damaged, or is not an exported model.
    """
    model, tokenizer, p99_duration, calibration = load_model(path)
    return Recogniser(model.to(device), tokenizer, p99_duration, calibration, segments=segments)
