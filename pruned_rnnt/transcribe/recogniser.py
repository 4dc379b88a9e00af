"""Transcribe files in Python: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import overload

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
from pruned_rnnt.transcribe.batches import RecordingPath, SegmentBatches
from pruned_rnnt.transcribe.joined_path import JoinedPath
from pruned_rnnt.transcribe.read_ahead import read_ahead
from pruned_rnnt.transcribe.recordings import Audio, AudioList, RecordingReader, WholeRecording
from pruned_rnnt.transcribe.segments import Segment, SegmentConfig, Segmenter, SpeechDetector
from pruned_rnnt.transcribe.speech_energy import EnergyDetector
from pruned_rnnt.transcribe.speech_silero import SileroDetector
from pruned_rnnt.transcribe.windows import encode_segments


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
# Threads that read files; more would wait for Python's lock.
_MOST_THREADS = 8
# One recording is read ahead for this much audio of a batch, and at least a few.
_SECONDS_AHEAD, _LEAST_AHEAD = 5.0, 16


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
        recordings = audio if isinstance(audio, list | tuple) else [audio]
        found = []
        for each in self.transcribe_each(
            recordings, sampling_rate=sampling_rate, on_seconds=on_seconds
        ):
            if isinstance(each, Exception):
                raise each
            found.append(each)
        return found if recordings is audio else found[0]

    @torch.inference_mode()
    def transcribe_each(
        self,
        audio: Iterable[Audio | Tensor],
        *,
        sampling_rate: int = SAMPLING_RATE,
        on_seconds: Callable[[float], None] | None = None,
    ) -> Iterator[Transcription | Exception]:
        """Transcribe any number of recordings, in constant memory.

        With `batch_seconds`, segments of several recordings are decoded together, and threads read
        the next recordings meanwhile.

        Args:
            audio: taken one by one, as late as possible; each as for `transcribe`, or (T, F)
                features.
            sampling_rate, on_seconds: as for `transcribe`; with on_seconds, no threads read ahead.

        Yields:
            The transcription of each recording, in order, or the error for which it has none:
            those of `transcribe`, and MemoryError or RuntimeError if the memory was too small.
        """
        with closing(
            self.recordings(audio, sampling_rate=sampling_rate, on_seconds=on_seconds)
        ) as recordings:
            yield from self._transcribe(recordings)

    def recordings(
        self,
        audio: Iterable[Audio | Tensor],
        *,
        sampling_rate: int = SAMPLING_RATE,
        on_seconds: Callable[[float], None] | None = None,
    ) -> Generator[tuple[RecordingReader, Iterable[Segment | WholeRecording]], None, None]:
        """Read recordings as `transcribe_each` does, and yield each with its segments."""
        lengths = self._segments.lengths(self.p99_duration)
        readers = (
            RecordingReader(
                each,
                sampling_rate,
                Segmenter(lengths, self._new_detector()),
                on_seconds=on_seconds,
            )
            for each in audio
        )
        if not self.batch_seconds or on_seconds is not None:
            return ((reader, reader) for reader in readers)
        return read_ahead(
            readers,
            threads=min(_MOST_THREADS, os.cpu_count() or 1),
            recordings_ahead=max(_LEAST_AHEAD, round(self.batch_seconds / _SECONDS_AHEAD)),
        )

    def _transcribe(
        self, recordings: Iterable[tuple[RecordingReader, Iterable[Segment | WholeRecording]]]
    ) -> Iterator[Transcription | Exception]:
        """The same for readers, each with its segments."""
        batches = SegmentBatches(
            self._best_paths, self.batch_seconds / FEATURE_SECONDS, self._device
        )
        for reader, parts in recordings:
            recording = batches.start(JoinedPath(self.tokenizer, self._calibration))
            remaining = iter(parts)
            while True:
                try:
                    part = next(remaining, None)
                except Exception as error:
                    recording.error = error
                    break
                if part is None:
                    break
                batches.add(recording, part)
            recording.frames = reader.frames
            yield from map(_result, batches.done())
        batches.decode()
        yield from map(_result, batches.done())

    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """Transcribe log-mel features (T, F).

        Raises:
            ValueError: the detector is `silero`, which needs samples.
        """
        if self._segments.detector == "silero":
            raise ValueError("the detector silero needs samples: call transcribe, or use energy")
        (found,) = self.transcribe_each([features_TF])
        if isinstance(found, Exception):
            raise found
        return found

    def _new_detector(self) -> SpeechDetector:
        return SileroDetector() if self._segments.detector == "silero" else EnergyDetector()

    @property
    def _device(self) -> torch.device:
        """Where segments are decoded."""
        parameters = () if self.model is None else self.model.parameters()
        return next((each.device for each in parameters), torch.device("cpu"))


def _result(recording: RecordingPath) -> Transcription | Exception:
    if recording.error is not None:
        return recording.error
    path = recording.path
    return Transcription(
        text=path.text,
        words=path.words,
        score=path.score,
        seconds=round(recording.frames * FEATURE_SECONDS, 2),
    )


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
