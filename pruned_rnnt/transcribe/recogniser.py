"""Transcribe files in Python: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.decode_set import build_search
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.decode.timing.head_paths import HeadPath, head_paths
from pruned_rnnt.decode.word_times import TimedWord
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.out_of_memory import is_out_of_memory
from pruned_rnnt.transcribe.joined_path import JoinedPath
from pruned_rnnt.transcribe.recordings import Audio, AudioList, FrameCounter, read_recording
from pruned_rnnt.transcribe.segments import (
    AudioPiece,
    Segment,
    SegmentConfig,
    Segmenter,
    SpeechDetector,
)
from pruned_rnnt.transcribe.speech_energy import EnergyDetector
from pruned_rnnt.transcribe.speech_silero import SileroDetector
from pruned_rnnt.transcribe.windows import encode_segments

logger = logging.getLogger(__name__)


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


# Of audio that a GPU decodes together: enough to keep it busy, in a few GiB of memory.
_BATCH_SECONDS = 600.0


class AudioRecogniser(ABC):
    """Transcribes audio of any length; memory grows with the transcripts only.

    Audio longer than `segments.window` is cut at pauses. Where there is no pause within this
    length, overlapping windows are transcribed and joined at words that both contain.

    Attributes:
        model: the torch model in evaluation mode; None if another library runs it.
        tokenizer: converts between texts and the ids of symbols.
        p99_duration: 99th percentile of the training utterances' durations in seconds; None if
            unknown.
        sampling_rate: 16000, the rate in Hz that the model works at.
        batch_seconds: of audio, with padding, in the segments that are decoded together; 0: each
            segment by itself.

    Raises:
        MissingPackageError: a package that `segments.detector` needs is not installed.
    """

    model: SpeechModel | None = None
    sampling_rate = SAMPLING_RATE
    batch_seconds = 0.0

    def __init__(
        self,
        tokenizer: Tokenizer,
        p99_duration: float | None = None,
        calibration: Calibration | None = None,
        segments: SegmentConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.p99_duration = p99_duration
        self._calibration = calibration
        self._segments = segments or SegmentConfig()
        self._new_detector()

    @abstractmethod
    def _best_paths(self, segments: Sequence[Tensor]) -> list[tuple[Hypothesis, HeadPath | None]]:
        """The best path through each segment (T, F), and that of the CTC head, if it has one."""

    @overload
    def transcribe(
        self,
        audio: Audio,
        *,
        sampling_rate: int = ...,
        on_seconds: Callable[[float], None] | None = ...,
    ) -> Transcription: ...

    @overload
    def transcribe(
        self,
        audio: AudioList,
        *,
        sampling_rate: int = ...,
        on_seconds: Callable[[float], None] | None = ...,
    ) -> list[Transcription]: ...

    def transcribe(
        self,
        audio: Audio | AudioList,
        *,
        sampling_rate: int = SAMPLING_RATE,
        on_seconds: Callable[[float], None] | None = None,
    ) -> Transcription | list[Transcription]:
        """Transcribe an audio file (any that `open_audio` reads), samples, or a list of these.

        Audio with nothing but digital silence gives an empty text.

        Args:
            audio: a path; or (S,) samples of one channel in [-1, 1]; or a list or tuple of these.
            sampling_rate: of samples, in Hz; files have their own.
            on_seconds: called with the seconds read so far of the file or samples.

        Returns:
            One transcription, or a list of them for a list.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.load_audio.read_audio`;
                ValueError also for samples of another shape.
        """
        if isinstance(audio, list | tuple):
            return self._transcribe(
                (read_recording(item, sampling_rate) for item in audio), on_seconds
            )
        (found,) = self._transcribe([read_recording(audio, sampling_rate)], on_seconds)
        return found

    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """Transcribe log-mel features (T, F).

        Raises:
            ValueError: the detector is `silero`, which needs samples.
        """
        if self._segments.detector == "silero":
            raise ValueError("the detector silero needs samples: call transcribe, or use energy")
        piece = AudioPiece(np.zeros(0, dtype=np.float32), features_TF)
        (found,) = self._transcribe([[piece]], None)
        return found

    @torch.inference_mode()
    def _transcribe(
        self,
        recordings: Iterable[Iterable[AudioPiece]],
        on_seconds: Callable[[float], None] | None,
    ) -> list[Transcription]:
        most_frames = self.batch_seconds / FEATURE_SECONDS
        found: list[tuple[JoinedPath, FrameCounter]] = []
        waiting: list[tuple[JoinedPath, Segment]] = []
        longest = 0
        for pieces in recordings:
            counter = FrameCounter(pieces, on_seconds)
            path = JoinedPath(self.tokenizer, self._calibration)
            found.append((path, counter))
            segmenter = Segmenter(self._segments.lengths(self.p99_duration), self._new_detector())
            for segment in segmenter(counter):
                longest = max(longest, len(segment.features_TF))
                if waiting and (len(waiting) + 1) * longest > most_frames:
                    self._append(waiting)
                    waiting, longest = [], len(segment.features_TF)
                waiting.append((path, segment))
        self._append(waiting)
        return [
            Transcription(
                text=path.text,
                words=path.words,
                score=path.score,
                seconds=round(counter.frames * FEATURE_SECONDS, 2),
            )
            for path, counter in found
        ]

    def _append(self, waiting: Sequence[tuple[JoinedPath, Segment]]) -> None:
        """Append the best path of each segment to the path of its recording.

        Where the memory is too small for all together, halves are decoded one after the other.
        """
        if not waiting:
            return
        try:
            best = self._best_paths([segment.features_TF for _, segment in waiting])
        except (MemoryError, RuntimeError) as error:
            if len(waiting) == 1 or not is_out_of_memory(error):
                raise
            best = None  # outside of this block, the error no longer holds its tensors
        if best is None:
            logger.warning(
                "%d segments do not fit in memory together: decode.batch_seconds is too large",
                len(waiting),
            )
            self._append(waiting[: len(waiting) // 2])
            self._append(waiting[len(waiting) // 2 :])
            return
        for (path, segment), (hypothesis, head) in zip(waiting, best, strict=True):
            path.append(hypothesis, head, segment)

    def _new_detector(self) -> SpeechDetector:
        return SileroDetector() if self._segments.detector == "silero" else EnergyDetector()


class Recogniser(AudioRecogniser):
    """Transcribes with a torch model; see `AudioRecogniser`.

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

    model: SpeechModel

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
        super().__init__(tokenizer, p99_duration, calibration, segments)
        self.model = model.eval()
        decode = decode or DecodeConfig()
        self._precision = decode.precision
        if decode.batch_seconds is not None:
            self.batch_seconds = decode.batch_seconds
        elif next(model.parameters()).device.type != "cpu":
            self.batch_seconds = _BATCH_SECONDS
        self._search = build_search(model, decode, tokenizer, language_model)

    def _best_paths(self, segments: Sequence[Tensor]) -> list[tuple[Hypothesis, HeadPath | None]]:
        encoded_NTE, lengths = encode_segments(self.model, segments, self._precision)
        best = [hypotheses[0] for hypotheses in self._search(encoded_NTE, lengths)]
        heads = head_paths(self.model, encoded_NTE, lengths, [each.symbols for each in best])
        return list(zip(best, heads, strict=True))
