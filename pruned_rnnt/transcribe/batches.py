"""Decode the segments of many recordings together.

Segments wait until there is audio for some batches. Batches then have segments of similar length,
because padding takes as long as audio. A recording is done when all of its segments are decoded,
often before earlier ones.

On a GPU, a batch is launched before the results of the one before are read, so that the GPU
computes while the host makes texts and collects the next batch. Results leave batch by batch, so
that texts are made and written all along, and not at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from pruned_rnnt.decode.build_search import score_problem
from pruned_rnnt.model.inference_graphs import graph_padding
from pruned_rnnt.system.device import HostCopy
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.transcribe.batch_input import (
    BatchDecoder,
    batch_input,
    part_frames,
)
from pruned_rnnt.transcribe.head_evidence import disagreements
from pruned_rnnt.transcribe.joined_path import (
    DecodedSegment,
    JoinedPath,
    RecordingPath,
    SegmentPlace,
)
from pruned_rnnt.transcribe.lost_speech import (
    FoundPath,
    Mark,
    MarkKind,
    Stretch,
    as_marks,
    loudest_nearby,
    may_need_marks,
    spoken_places,
    without_speech,
    without_text,
)
from pruned_rnnt.transcribe.quiet_speech import Compared, missing_gain
from pruned_rnnt.transcribe.recordings import WholeRecording
from pruned_rnnt.transcribe.second_decoding import SecondDecoding
from pruned_rnnt.transcribe.segments import LostSpeech, Segment

logger = logging.getLogger(__name__)

# Segments wait for so many batches: more audio to choose from means less padding. At first, fewer
# (or a smaller batch): a GPU that has nothing to do should not wait. Each time doubles them.
_FIRST_BATCHES, _MOST_BATCHES = 0.5, 8
_DECODED = object()


class _Waiting(NamedTuple):
    """A segment that is not decoded yet; number: in its recording."""

    recording: RecordingPath
    number: int
    part: Segment | WholeRecording
    frames: int


class SegmentBatches:
    """Collects segments and decodes them in batches.

    Args:
        most_frames: feature frames of a batch, with padding; 0: each segment by itself, at once.
        with_words: whether words are wanted.
        lost_speech: see `SegmentConfig`.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        most_frames: float,
        *,
        with_words: bool,
        lost_speech: LostSpeech = "ignore",
    ) -> None:
        self._decoder = decoder
        self._second = SecondDecoding(decoder)
        self._most_frames = most_frames
        self._graph_padding = graph_padding(decoder.least_frames)
        self._with_words = with_words
        self._lost_speech = lost_speech
        # Those that are not done, and how many there were before the next one.
        self._recordings: list[RecordingPath] = []
        self._started = 0
        self._has_decoded = False
        self._waiting: list[_Waiting] = []
        self._frames = 0
        self._batches_waiting: float = _FIRST_BATCHES
        self._longest_first = False
        # Batches that were launched, in this order.
        self._launched: list[Generator[None]] = []

    def start(self, path: JoinedPath) -> RecordingPath:
        """The next recording."""
        recording = RecordingPath(path, self._started)
        self._started += 1
        self._recordings.append(recording)
        return recording

    def add(
        self, recording: RecordingPath, part: Segment | WholeRecording
    ) -> Iterator[list[RecordingPath]]:
        """Add the next segment of the newest recording, and decode those that wait if they are
        enough, while the caller iterates.

        Yields the earlier recordings that are decoded with each batch.
        """
        number, frames = recording.add(), part_frames(part)
        if frames < self._decoder.least_frames:
            recording.decoded(number, None)
            return
        self._waiting.append(_Waiting(recording, number, part, frames))
        self._frames += frames
        if self._frames >= self._batches_waiting * self._most_frames:
            for _ in self._launch_batches(to_the_end=False):
                yield self.done(besides=recording)
            self._batches_waiting = min(2 * self._batches_waiting, _MOST_BATCHES)

    def done(self, besides: RecordingPath | None = None) -> list[RecordingPath]:
        """The recordings that are decoded, of those that have ended.

        No recording is returned twice.

        Args:
            besides: the newest recording, if it has not ended.
        """
        # Of recordings alone that are decoded in no batch, such as those that cannot be read.
        changed = self._recordings if self._has_decoded else self._recordings[-1:]
        done = [each for each in changed if not each.waiting and each is not besides]
        if done:
            self._recordings = [
                each for each in self._recordings if each.waiting or each is besides
            ]
        self._has_decoded = False
        return done

    def finish(self) -> Iterator[list[RecordingPath]]:
        """Decode all segments that wait, while the caller iterates. All recordings have ended.

        Yields the recordings that are decoded with each batch.
        """
        for _ in self._launch_batches(to_the_end=True):
            yield self.done()
        while self._launched:
            self._go_on()
            yield self.done()

    def _launch_batches(self, *, to_the_end: bool) -> Iterator[None]:
        """Divide the segments that wait into full batches of similar lengths, and launch these.

        Yields after each batch. Segments left over wait for the next time, which begins at their
        end of the lengths.
        """
        waiting = sorted(self._waiting, key=lambda item: item.frames, reverse=self._longest_first)
        self._longest_first = not self._longest_first
        while waiting:
            count, is_full = self._next_batch(waiting)
            if not (is_full or to_the_end):
                break
            self._launch(waiting[:count])
            del waiting[:count]
            yield
        self._waiting = waiting
        self._frames = sum(item.frames for item in waiting)

    def _next_batch(self, waiting: Sequence[_Waiting]) -> tuple[int, bool]:
        """How many of these segments, sorted by length, are the next batch, and if it is full.

        Few numbers of frames occur, and one number of segments for each: a new shape has to be
        captured as a CUDA graph, or needs new plans.
        """
        count, most = 0, 1
        limit = self._most_frames * min(1, self._batches_waiting)
        for item in waiting:
            frames = max(item.frames, waiting[0].frames)
            padded = self._graph_padding.frames_of(frames)
            most = self._graph_padding.most_rows(max(1, int(limit // padded)))
            if count >= most:
                break
            count += 1
        return count, count >= most

    def _launch(self, batch: Sequence[_Waiting]) -> None:
        """Launch a batch, then go on with those launched before."""
        new = self._decode(batch)
        has_begun = self._goes_on(new)
        self._go_on()
        if has_begun:
            self._launched.append(new)
        if self._decoder.device.type == "cpu":
            self._wait()

    def _go_on(self) -> None:
        """Go on with each batch that was launched, up to where it waits for the device again."""
        self._launched = [batch for batch in self._launched if self._goes_on(batch)]

    def _goes_on(self, batch: Generator[None]) -> bool:
        """Go on with a batch up to where it waits for the device; False if it is decoded."""
        with self._decoder.lock:
            return next(batch, _DECODED) is not _DECODED

    def _wait(self) -> None:
        """Wait for the batches that were launched."""
        while self._launched:
            self._go_on()

    def _decode(self, batch: Sequence[_Waiting]) -> Generator[None]:
        """Decode some segments; yields before it waits for the device.

        Where the memory is too small for all together, halves are decoded one after the other.
        """
        usable = [item for item in batch if item.recording.error is None]
        for item in batch:
            if item.recording.error is not None:
                item.recording.decoded(item.number, None)
                self._has_decoded = True
        if not usable:
            return
        best: list[DecodedSegment | None] | None = None
        try:
            best = yield from self._best_paths(usable)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(usable) == 1:
                usable[0].recording.error = _without_frames(error)
                best = [None]
        if best is None:
            self._decoder.release_memory()
            logger.warning(
                "%d segments do not fit in memory together: decode.batch_seconds is too large",
                len(usable),
            )
            yield from self._decode(usable[: len(usable) // 2])
            yield from self._decode(usable[len(usable) // 2 :])
            return
        self._has_decoded = True
        for item, segment in zip(usable, best, strict=True):
            if segment is not None and (problem := score_problem(segment.hypothesis)):
                item.recording.error = ValueError(problem)
            item.recording.decoded(item.number, segment)

    def _best_paths(
        self, batch: Sequence[_Waiting]
    ) -> Generator[None, None, list[DecodedSegment | None]]:
        """The best path of each segment; None for digital silence."""
        parts = [item.part for item in batch]
        found = batch_input(parts, self._decoder)
        checks_speech = self._lost_speech != "ignore"
        flags = [found.is_silent_N]
        if checks_speech:
            flags.append(loudest_nearby(found.features_NTF, found.lengths_N))
            gain_NT = missing_gain(found.features_NTF, found.lengths_N)
            flags.append(gain_NT > 0)
        copy = HostCopy(flags)
        # Segments of a long recording are joined by the times of their words.
        with_heads = (
            self._with_words or checks_speech or any(isinstance(part, Segment) for part in parts)
        )
        best = yield from self._decoder.best_paths(found, with_heads)
        paths = [FoundPath(*path, self._decoder.frame_step) for path in best]
        is_silent_N, *levels = copy.tensors()
        places = [_place(item) for item in batch]
        found_marks: list[list[Mark]] = [[] for _ in batch]
        if checks_speech:
            loudest_NT, is_quiet_NT = levels
            rows = [
                row
                for row, place in enumerate(places)
                if not is_silent_N[row]
                and may_need_marks(loudest_NT[row, : place.frames], paths[row].symbol_places)
            ]
            speech = yield from self._second.speech(found, rows, places)
            loud: dict[int, Compared] = {}
            if self._lost_speech == "retry":
                paths = yield from self._second.retried(found, paths, speech, places)
                loud = yield from self._second.louder(found, paths, gain_NT, is_quiet_NT, places)
                paths = [loud[row].path if row in loud else path for row, path in enumerate(paths)]
            found_marks = [
                [] if is_silent else _marks(path, speech.get(row), place.begin, loud.get(row))
                for row, (is_silent, path, place) in enumerate(
                    zip(is_silent_N.tolist(), paths, places, strict=True)
                )
            ]
        return [
            None if silent else DecodedSegment(path.hypothesis, path.head, place, own)
            for silent, path, place, own in zip(
                is_silent_N.tolist(), paths, places, found_marks, strict=True
            )
        ]


def _marks(
    path: FoundPath, speech: Sequence[Stretch] | None, begin: int, louder: Compared | None
) -> list[Mark]:
    """The marks of a path; speech: None if its energy has nothing to mark; louder: of a segment
    with quiet speech."""
    differences = disagreements(path, speech[-1].end if speech else None)
    lost = [each.stretch for each in differences if not each.is_doubtful]
    doubtful = [each.stretch for each in differences if each.is_doubtful]
    if louder is not None:
        lost += louder.lost
        doubtful += louder.doubtful
    found: dict[MarkKind, list[Stretch]] = {
        "speech without text": lost,
        "text unlike the speech": doubtful,
    }
    if speech is not None:
        places = spoken_places(path, speech)
        lost += without_text(speech, places)
        found["text without speech"] = without_speech(speech, places)
    return as_marks(found, begin)


def _without_frames(error: Exception) -> Exception:
    """The error without the frames of the pass, which would keep its tensors for as long."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


def _place(item: _Waiting) -> SegmentPlace:
    if isinstance(item.part, WholeRecording):
        return SegmentPlace(0, 0, item.frames)
    return SegmentPlace(item.part.begin, item.part.overlap, item.frames)
