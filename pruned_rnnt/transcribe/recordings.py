"""The input of transcription: files or samples, cut into segments, and read ahead in threads, in
constant memory.

Decoders and resamplers run outside of Python's lock, so that a few threads keep a GPU busy. Each
computes features by itself: with torch's usual number of threads, a machine of sixteen processors
would have over a hundred that wait for each other. The thread that uses the recordings launches
kernels and needs Python's lock all the time; what is exchanged for every recording is therefore
little: two queues that are implemented in C.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_stream import FeatureStream, short_or_blocks
from pruned_rnnt.data.audio.features import FEATURE_DIM, frame_count, most_samples
from pruned_rnnt.data.audio.samples import samples_at_16_khz
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array
from pruned_rnnt.decode.word_times import FEATURE_SECONDS
from pruned_rnnt.transcribe.segments import (
    AudioPiece,
    Segment,
    Segmenter,
    SegmentLengths,
    SpeechDetector,
)

# A file, or (S,) samples of one of the types of `samples_at_16_khz`.
Audio = Path | str | FloatArray | Tensor | npt.NDArray[np.integer[Any]]
AudioList = list[Any] | tuple[Audio, ...]
_Part = TypeVar("_Part")
_Recording = TypeVar("_Recording", bound=Iterable[Any])
# Parts of one recording that wait for their reader.
_MOST_PARTS = 4
# A thread that waits looks this often whether it has to stop, in seconds.
_PATIENCE = 0.05


class WholeRecording(NamedTuple):
    """(S,) samples at 16 kHz of a recording that need not be cut; without features yet."""

    samples_S: FloatArray | Pcm16Array


class RecordingReader:
    """Iterates over the segments of a recording, and reads it meanwhile.

    A recording that need not be cut is one `WholeRecording`.

    Args:
        audio: a file; or (S,) samples of one channel; or (T, F) features.
        sampling_rate: of samples, in Hz.
        channel: of files, counted from 0; None: the mean of all. Samples have channel 0 only.
        lengths: of segments.
        new_detector: makes the detector of speech for a recording that is cut.
        on_seconds: called with the seconds read so far.
        keeps_samples: segments have samples, which a model with features of its own needs.

    Attributes:
        frames: feature frames read so far.
        warning: once all is read, how a file ends before its header says; empty if it does not.

    Raises:
        FileNotFoundError, ValueError: while iterating, as
            `pruned_rnnt.data.audio.audio_file.read_audio`; ValueError also for samples or features
            of another shape, type or range.
    """

    def __init__(
        self,
        audio: Audio | Tensor,
        sampling_rate: int,
        lengths: SegmentLengths,
        new_detector: Callable[[], SpeechDetector],
        *,
        channel: int | None = None,
        on_seconds: Callable[[float], None] | None = None,
        keeps_samples: bool = False,
    ) -> None:
        self.frames = 0
        self.warning = ""
        self._audio = audio
        self._sampling_rate = sampling_rate
        self._channel = channel
        self._lengths = lengths
        self._new_detector = new_detector
        self._on_seconds = on_seconds
        self._keeps_samples = keeps_samples

    def __iter__(self) -> Iterator[Segment | WholeRecording]:
        audio = self._audio
        if self._channel and not isinstance(audio, str | Path):
            raise ValueError(f"channel={self._channel} is for files: samples have channel 0 only")
        if isinstance(audio, Tensor) and audio.ndim == 2:
            if self._keeps_samples:
                raise ValueError(
                    f"a tensor of two axes, {tuple(audio.shape)}, holds features, but this model "
                    "has features of its own (model.encoder.features): pass samples (S,) or a file"
                )
            piece = AudioPiece(np.zeros(0, dtype=np.float32), _features(audio))
            yield from self._segmenter()(self._counted([piece]))
            return
        longest = self._lengths.longest
        blocks = self._blocks(most_samples(longest))
        begin: list[Any] = []
        for block_S in blocks:
            begin.append(block_S)
            self.frames = frame_count(sum(map(len, begin)))
            if self.frames > longest:
                break
        else:
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)
            yield WholeRecording(begin[0] if len(begin) == 1 else np.concatenate(begin))
            return
        self.frames = 0
        yield from self._segmenter()(self._counted(_pieces(chain(begin, blocks))))

    def _blocks(self, most: int) -> Iterator[Any]:
        """Blocks (S,) at 16 kHz; a file of at most `most` samples may be one block of integers."""
        if isinstance(self._audio, str | Path):
            return short_or_blocks(self._audio, most, self._truncated, self._channel)
        return iter([samples_at_16_khz(self._audio, self._sampling_rate)])

    def _truncated(self, how: str) -> None:
        self.warning = f"the file is truncated: {how}"

    def _segmenter(self) -> Segmenter:
        return Segmenter(self._lengths, self._new_detector(), keeps_samples=self._keeps_samples)

    def _counted(self, pieces: Iterable[AudioPiece]) -> Iterator[AudioPiece]:
        """The pieces, whose frames are counted and reported."""
        for piece in pieces:
            self.frames += len(piece.features_TF)
            yield piece
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)


def _features(features_TF: Tensor) -> Tensor:
    if features_TF.size(1) == FEATURE_DIM and features_TF.is_floating_point():
        if not features_TF.isfinite().all():
            raise ValueError("the features have NaN or infinite values")
        return features_TF.float()
    raise ValueError(
        f"a tensor of two axes holds features, (T, {FEATURE_DIM}) of floats, but got "
        f"{tuple(features_TF.shape)} of {features_TF.dtype}: samples have one axis, (S,)"
    )


def _pieces(blocks: Iterable[FloatArray]) -> Iterator[AudioPiece]:
    """Sample blocks (S,) at 16 kHz with the features that are complete with them."""
    stream = FeatureStream()
    for block_S in blocks:
        yield AudioPiece(block_S, stream.accept(block_S))
    yield AudioPiece(np.zeros(0, dtype=np.float32), stream.finish())


class _End(NamedTuple):
    """The end of a recording, with the error that ended it."""

    error: BaseException | None


class _Reading(Generic[_Part]):
    """One recording, which a thread reads and another one iterates over."""

    def __init__(self, parts: Iterable[_Part], stop: Event) -> None:
        self._parts = parts
        self._stop = stop
        self._queue: SimpleQueue[_Part | _End] = SimpleQueue()
        self._places = Semaphore(_MOST_PARTS)

    def run(self) -> None:
        """Read the recording, in a thread."""
        try:
            for part in self._parts:
                if not self._wait_for_place():
                    return
                self._queue.put(part)
        except BaseException as error:  # raised again where the parts are used
            self._queue.put(_End(error))
        else:
            self._queue.put(_End(None))

    def _wait_for_place(self) -> bool:
        """Wait until few parts wait; False if nobody wants more of them."""
        while not self._stop.is_set():
            if self._places.acquire(timeout=_PATIENCE):
                return True
        return False

    def __iter__(self) -> Iterator[_Part]:
        while True:
            try:
                part = self._queue.get(timeout=_PATIENCE)
            except Empty:
                continue
            if isinstance(part, _End):
                if part.error is not None:
                    raise part.error
                return
            self._places.release()
            yield part


def read_ahead(
    recordings: Iterable[_Recording], *, threads: int, recordings_ahead: int
) -> Generator[tuple[_Recording, Iterable[Any]], None, None]:
    """Yield the recordings in order, each with its parts, while threads read the next ones.

    Use the parts of a recording before taking the next one. An error in a recording is raised where
    its parts are used. Close this generator to end the threads.

    Args:
        recordings: what a thread iterates over; taken as late as possible.
        recordings_ahead: how many are being read or wait to be used.

    Raises:
        Exception: that of taking the next recording, after those that were taken before it.
    """
    stop, started = Event(), Semaphore(0)
    waiting: deque[tuple[_Recording, _Reading[Any]]] = deque()
    tasks: SimpleQueue[_Reading[Any] | None] = SimpleQueue()
    workers = [
        Thread(target=_read_each, args=(tasks, stop, started), name=f"audio_{number}", daemon=True)
        for number in range(threads)
    ]
    with _torch_threads_kept():
        for worker in workers:
            worker.start()
        for _ in workers:
            started.acquire()
    source = iter(recordings)
    failure: Exception | None = None
    try:
        while True:
            try:
                for recording in islice(source, recordings_ahead - len(waiting)):
                    reading: _Reading[Any] = _Reading(recording, stop)
                    tasks.put(reading)
                    waiting.append((recording, reading))
            except Exception as error:
                failure, source = error, iter(())
            if waiting:
                yield waiting.popleft()
            elif failure is not None:
                raise failure
            else:
                return
    finally:
        stop.set()
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.join()


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Threads may call torch.set_num_threads, for themselves.

    torch also takes the last number for threads that are started later, until another call.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read_each(tasks: SimpleQueue[_Reading[Any] | None], stop: Event, started: Semaphore) -> None:
    """Read one recording after the other, in a thread."""
    torch.get_num_threads()  # the first use in a thread sets the number to that of the process
    torch.set_num_threads(1)
    started.release()
    while (reading := tasks.get()) is not None:
        if not stop.is_set():
            reading.run()
