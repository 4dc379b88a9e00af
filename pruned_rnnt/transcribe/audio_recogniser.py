"""Transcribe files in Python: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FBANK, FEATURE_DIM, SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.decode.word_times import FEATURE_SECONDS
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.system.device import DeviceLock
from pruned_rnnt.system.openmp import sharing_processors
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.transcribe.batch_input import BatchDecoder, BatchInput, BestPaths
from pruned_rnnt.transcribe.batches import SegmentBatches
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.joined_path import JoinedPath, RecordingPath
from pruned_rnnt.transcribe.recordings import (
    Audio,
    AudioList,
    RecordingReader,
    WholeRecording,
    read_ahead,
)
from pruned_rnnt.transcribe.segments import Segment, SegmentConfig, SpeechDetector
from pruned_rnnt.transcribe.speech_energy import EnergyDetector
from pruned_rnnt.transcribe.speech_silero import SileroDetector
from pruned_rnnt.transcribe.stream import Stream
from pruned_rnnt.transcribe.stream_group import step
from pruned_rnnt.transcribe.transcription import NumberedResult, Transcription, transcriptions

# Threads that read files; more would wait for Python's lock.
_MOST_THREADS = 8
# One recording is read ahead for this much audio of a batch, and at least a few.
_SECONDS_AHEAD, _LEAST_AHEAD = 5.0, 16


class AudioRecogniser(ABC):
    """Transcribes audio of any length; memory grows with the transcripts only.

    Audio longer than `segments.window` is cut at pauses. Where there is no pause within this
    length, overlapping windows are transcribed and joined at words that both contain.

    Several threads may use a recogniser. Steps of its streams wait for each other; on a GPU,
    batches do, too, and steps wait for batches: use a second recogniser for live streams beside
    long files.

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
        if p99_duration is not None and not 0 < p99_duration < math.inf:
            raise ValueError(f"p99_duration is {p99_duration}, needs a positive number of seconds")
        self.tokenizer = tokenizer
        self.p99_duration = p99_duration
        self._calibration = calibration
        self._segments = segments or SegmentConfig()
        self._lock = DeviceLock()
        self._new_detector()

    @abstractmethod
    def _best_paths(self, batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        """Make the best path of each utterance; yield before waiting for the device.

        Args:
            with_heads: whether the paths of the CTC head are needed, if the model has one.
        """

    def stream(
        self, *, chunk: int = 0, left: int = 0, endpoints: EndpointConfig | None = None
    ) -> Stream:
        """Start a live stream. Any number of streams are decoded together by `step`.

        Args:
            chunk, left: encoder frames of a chunk, and of its left context; 0 for `decode.chunk`
                and `decode.left`, or, without these, the values of `export --format torch
                --streaming`, or of training.
            endpoints: when texts become final.

        Raises:
            ValueError: the model is not causal or cannot have such chunks; `decode.chunk` is -1
                and chunk 0; or `decode.method` needs whole utterances.
        """
        raise UsageError(
            "ONNX files cannot transcribe live audio here: load the run or a model.pt, or use "
            "sherpa-onnx"
        )

    def step(self, streams: Iterable[Stream]) -> list[Stream]:
        """Decode one chunk of each stream that has one, in one batch.

        Returns:
            The streams that had one; none if all wait for more audio.

        Raises:
            ValueError: streams is no list of streams.
        """
        return step(streams)

    @overload
    def transcribe(
        self,
        audio: Audio,
        *,
        sampling_rate: int = ...,
        channel: int | None = ...,
        on_seconds: Callable[[float], None] | None = ...,
        words: bool = ...,
    ) -> Transcription: ...

    @overload
    def transcribe(
        self,
        audio: AudioList,
        *,
        sampling_rate: int = ...,
        channel: int | None = ...,
        on_seconds: Callable[[float], None] | None = ...,
        words: bool = ...,
    ) -> list[Transcription]: ...

    def transcribe(
        self,
        audio: Audio | AudioList,
        *,
        sampling_rate: int = SAMPLING_RATE,
        channel: int | None = None,
        on_seconds: Callable[[float], None] | None = None,
        words: bool = True,
    ) -> Transcription | list[Transcription]:
        """Transcribe an audio file (any that `open_audio` reads), samples, or a list of these.

        Audio with nothing but digital silence gives an empty text, and so does audio that is
        shorter than an output frame of the encoder sees (70 to 90 ms).

        Args:
            audio: a path; or an array or tensor (S,) of samples of one channel: floats in [-1, 1],
                or int8, int16, int32 or uint8; or a list or tuple of these.
            sampling_rate: of samples, in Hz; files have their own.
            channel: of files, counted from 0; None: the mean of all, and a warning, once, if their
                sound differs. Samples have channel 0 only.
            on_seconds: called with the seconds read so far of the file or samples.
            words: whether times and confidences of words are wanted; texts alone take less time.

        Returns:
            One transcription, or a list of them for a list.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.audio_file.read_audio`;
                ValueError also for a channel that a file lacks, and for samples of another shape,
                type or range.
        """
        recordings = audio if isinstance(audio, list | tuple) else [audio]
        found = []
        for each in self.transcribe_each(
            recordings,
            sampling_rate=sampling_rate,
            channel=channel,
            on_seconds=on_seconds,
            words=words,
        ):
            if isinstance(each, Exception):
                raise each
            found.append(each)
        return found if recordings is audio else found[0]

    def transcribe_each(
        self,
        audio: Iterable[Audio | Tensor],
        *,
        sampling_rate: int = SAMPLING_RATE,
        channel: int | None = None,
        on_seconds: Callable[[float], None] | None = None,
        words: bool = True,
    ) -> Iterator[Transcription | Exception]:
        """Transcribe any number of recordings, in constant memory.

        With `batch_seconds`, segments of several recordings are decoded together, and threads read
        the next recordings meanwhile.

        Args:
            audio: taken one by one, as late as possible; each as for `transcribe`, or (T, F)
                features.
            sampling_rate, channel, on_seconds, words: as for `transcribe`; with on_seconds, no
                threads read ahead.

        Yields:
            The transcription of each recording, in order, or the error for which it has none:
            those of `transcribe`, and MemoryError or RuntimeError if the memory was too small.

        Raises:
            ValueError: audio is a path.
            Exception: that of the iterator `audio`, after the results of all taken before it.
        """
        results = self.transcribe_numbered(
            audio, sampling_rate=sampling_rate, channel=channel, on_seconds=on_seconds, words=words
        )
        early: dict[int, Transcription | Exception] = {}
        number = 0
        with closing(results):
            for each in results:
                early[each.number] = each.result
                while number in early:
                    yield early.pop(number)
                    number += 1

    @torch.inference_mode()
    def transcribe_numbered(
        self,
        audio: Iterable[Audio | Tensor],
        *,
        sampling_rate: int = SAMPLING_RATE,
        channel: int | None = None,
        on_seconds: Callable[[float], None] | None = None,
        words: bool = True,
    ) -> Generator[NumberedResult, None, None]:
        """As `transcribe_each`, but yields each result as soon as it is known.

        Recordings of similar lengths are decoded together, so that others may wait for long.
        """
        if isinstance(audio, str | Path):
            raise ValueError(f"audio is {str(audio)!r}, needs a list of recordings: [{audio!r}]")
        recordings = self.recordings(
            audio, sampling_rate=sampling_rate, channel=channel, on_seconds=on_seconds
        )
        with sharing_processors(), closing(recordings):
            yield from self._transcribe(recordings, words)

    def recordings(
        self,
        audio: Iterable[Audio | Tensor],
        *,
        sampling_rate: int = SAMPLING_RATE,
        channel: int | None = None,
        on_seconds: Callable[[float], None] | None = None,
    ) -> Generator[tuple[RecordingReader, Iterable[Segment | WholeRecording]], None, None]:
        """Read recordings as `transcribe_each` does, and yield each with its segments."""
        lengths = self._segments.lengths(self.p99_duration)
        readers = (
            RecordingReader(
                each,
                sampling_rate,
                lengths,
                self._new_detector,
                channel=channel,
                on_seconds=on_seconds,
                keeps_samples=self._feature_kind.needs_samples,
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

    def _release_graphs(self) -> None:
        graphs = None if self.model is None else self.model.inference_graphs
        if graphs is not None:
            graphs.release()

    def _transcribe(
        self,
        recordings: Iterable[tuple[RecordingReader, Iterable[Segment | WholeRecording]]],
        with_words: bool,
    ) -> Iterator[NumberedResult]:
        """Transcribe what readers read, each with its segments."""
        decoder = BatchDecoder(
            self._best_paths,
            self._device,
            self._least_frames,
            frame_step=self._frame_step,
            needs_samples=self._feature_kind.needs_samples,
            # Graphs have tensors of their own, into which the inputs of a batch are copied.
            lock=self._lock if self._device.type == "cuda" else nullcontext(),
            release_memory=self._release_graphs,
        )
        batches = SegmentBatches(
            decoder,
            self.batch_seconds / FEATURE_SECONDS,
            with_words=with_words,
            lost_speech=self._segments.lost_speech,
        )
        source = iter(recordings)
        failure: Exception | None = None
        while True:
            try:
                taken = next(source, None)
            except Exception as error:  # of the caller's iterator: what came before it is decoded
                failure = error
                break
            if taken is None:
                break
            reader, parts = taken
            recording = batches.start(
                JoinedPath(
                    self.tokenizer,
                    self._calibration,
                    with_words=with_words,
                    frame_seconds=self._frame_step * FEATURE_SECONDS,
                )
            )
            remaining = iter(parts)
            while True:
                try:
                    part = next(remaining, None)
                except Exception as error:
                    recording.error = error
                    break
                if part is None:
                    break
                for done in batches.add(recording, part):
                    yield from self._results(done)
            recording.frames, recording.warning = reader.frames, reader.warning
            yield from self._results(batches.done())
        for done in batches.finish():
            yield from self._results(done)
        if failure is not None:
            raise failure

    def _results(self, done: Sequence[RecordingPath]) -> Iterator[NumberedResult]:
        found = transcriptions(done, self.tokenizer)
        for recording, result in zip(done, found, strict=True):
            yield NumberedResult(recording.number, result)

    def transcribe_features(self, features_TF: Tensor | FloatArray) -> Transcription:
        """Transcribe log-mel features (T, F) of floats.

        Raises:
            ValueError: the detector is `silero`, or model.encoder.features is not `fbank`, which
                need samples; or the features have another shape or type, or NaN or infinite values.
        """
        if self._segments.detector == "silero":
            raise ValueError("the detector silero needs samples: call transcribe, or use energy")
        features_TF = torch.as_tensor(features_TF)
        if features_TF.ndim != 2:
            raise ValueError(
                f"features_TF has the shape {tuple(features_TF.shape)}, needs (T, {FEATURE_DIM}) "
                "log-mel features of one recording: for samples (S,), call transcribe"
            )
        (found,) = self.transcribe_each([features_TF])
        if isinstance(found, Exception):
            raise found
        return found

    def _new_detector(self) -> SpeechDetector:
        return SileroDetector() if self._segments.detector == "silero" else EnergyDetector()

    @property
    def _least_frames(self) -> int:
        """Feature frames that a segment needs."""
        if self.model is None:
            return 1
        # Features of another kind may be a frame shorter than those that segments are counted in.
        return self.model.encoder.receptive_field + int(self._feature_kind.needs_samples)

    @property
    def _frame_step(self) -> int:
        """Feature frames of an output frame."""
        return SUBSAMPLING_FACTOR if self.model is None else self.model.encoder.subsampling_factor

    @property
    def _feature_kind(self) -> FeatureKind:
        """The features of the model; segments are found by those of `fbank`."""
        if self.model is None:
            return FBANK
        return FeatureKind.of_encoder(self.model.encoder.config)

    @property
    def _device(self) -> torch.device:
        """Where segments are decoded."""
        parameters = () if self.model is None else self.model.parameters()
        return next((each.device for each in parameters), torch.device("cpu"))
