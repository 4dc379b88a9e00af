"""Cut a stream of audio into segments that a model can transcribe, in constant memory.

Axes: S samples, T feature frames (10 ms), F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.config.checks import check_seconds
from pruned_rnnt.data.audio.features import FEATURE_DIM, FRAME_SAMPLES
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.decode.word_times import FEATURE_SECONDS
from pruned_rnnt.transcribe.speech_energy import is_digital_silence, runs

LostSpeech = Literal["retry", "mark", "ignore"]

_LONGEST_SECONDS = 30.0
# Of the 99th percentile of the training utterances' durations.
_LONGEST_SHARE, _SHORTEST_SHARE = 1.25, 0.25
# Segments are never joined across a pause of a second.
_LONG_PAUSE_FRAMES = 100
# If no pause is long enough, audio is cut at the longest gap between half and all of the longest
# segment; a shorter gap than 120 ms may be the closure of a stop within a word.
_SHORT_PAUSE_FRAMES = 12
_LEAST_WINDOW = 0.5  # seconds
# Shorter sounds between pauses, such as clicks, are not speech; a detector widens them by 60 ms.
_SHORTEST_SPEECH_FRAMES = 10
_NO_SAMPLES: FloatArray = np.zeros(0, dtype=np.float32)
# Windows without a pause between them share a third, at most 4 s, which holds several words.
_OVERLAP_SHARE, _MOST_OVERLAP_FRAMES = 1 / 3, 400


@dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    """How audio is cut at pauses; all lengths are in seconds.

    window: length of the longest segment; audio of at most this length is not cut. Default: 1.25
        times the 99th percentile of the training utterances' durations, 0.5 to 30. In segments
        longer than its training utterances, a model may delete words.
    shortest: shorter segments are joined with the next one if the pause between them is below a
        second. Default: a quarter of that percentile.
    pause: shortest stretch without speech at which audio is cut.
    padding: kept before and after the speech of a segment.
    detector: how speech is found: by `energy`, or by `silero`, a neural network (needs the packages
        silero-vad and onnxruntime).
    lost_speech: what is done about speech for which the model has no text: `retry` decodes it again
        by itself, and marks it if it still has none; `mark` only marks it; `ignore` neither.
    """

    window: float | None = None
    shortest: float | None = None
    pause: float = 0.3
    padding: float = 0.2
    detector: Literal["energy", "silero"] = "energy"
    lost_speech: LostSpeech = "retry"

    def __post_init__(self) -> None:
        # The encoder processes a whole window at once, so the window determines its memory.
        for name, value, least, most in (
            ("window", self.window, _LEAST_WINDOW, 3600),
            ("shortest", self.shortest, 0, self.window or 3600),
            ("pause", self.pause, 0.1, 1),
            ("padding", self.padding, 0, 0.5),
        ):
            if value is not None or name in ("pause", "padding"):
                check_seconds(name, value, least, most)
        if self.detector not in ("energy", "silero"):
            raise ValueError(f"detector is {self.detector!r}; it must be energy or silero")
        if self.lost_speech not in get_args(LostSpeech):
            raise ValueError(
                f"lost_speech is {self.lost_speech!r}; it must be one of {get_args(LostSpeech)}"
            )

    def lengths(self, p99_duration: float | None) -> SegmentLengths:
        """In frames, for a model whose training utterances have this 99th percentile."""
        usual = p99_duration or _LONGEST_SECONDS
        default = max(_LEAST_WINDOW, min(_LONGEST_SECONDS, _LONGEST_SHARE * usual))
        longest = self.window or default
        shortest = min(usual, longest) * _SHORTEST_SHARE if self.shortest is None else self.shortest
        frames = _frames(longest)
        return SegmentLengths(
            longest=frames,
            shortest=min(_frames(shortest), frames),
            pause=_frames(self.pause),
            padding=_frames(self.padding),
            overlap=min(int(frames * _OVERLAP_SHARE), _MOST_OVERLAP_FRAMES),
        )


class SegmentLengths(NamedTuple):
    """`SegmentConfig` in feature frames; overlap: shared by windows without a pause between."""

    longest: int
    shortest: int
    pause: int
    padding: int
    overlap: int


class Segment(NamedTuple):
    """A part of a stream.

    features_TF: (T, F). begin: its first frame in the stream.
    overlap: how many of its first frames are also the last ones of the segment before.
    samples_S: of these frames; empty unless the segmenter keeps them.
    """

    features_TF: Tensor
    begin: int
    overlap: int
    samples_S: FloatArray = _NO_SAMPLES


class SpeechDetector(Protocol):
    """Decides which frames of a stream are speech."""

    def accept(self, samples_S: FloatArray, features_TF: Tensor) -> Tensor:
        """More (S,) samples and (T, F) features -> (T',) bool of the frames decided next."""

    def finish(self) -> Tensor:
        """(T',) bool of the other frames, at the end of the stream."""


class _Cut(NamedTuple):
    """The end of a segment, and how many of its last frames the next one has, too."""

    end: int
    overlap: int


class AudioPiece(NamedTuple):
    """(S,) samples at 16 kHz and the (T, F) features that are complete with them."""

    samples_S: FloatArray
    features_TF: Tensor


class Segmenter:
    """Cuts one stream into segments.

    Segments end at pauses. Speech without a pause within the longest segment is cut into windows
    of that length, which overlap. Silence beyond the padding is left out. A stream of at most the
    longest segment is one segment with all of its silence, but none if all is digital silence.

    Args:
        keeps_samples: segments have samples, which a model with features of its own needs.
    """

    def __init__(
        self, lengths: SegmentLengths, detector: SpeechDetector, *, keeps_samples: bool = False
    ) -> None:
        self.lengths = lengths
        self._detector = detector
        # Features from the frame `_first` on; those before the frame `_known` are decided.
        self._features_TF = torch.zeros(0, FEATURE_DIM)
        self._first = self._known = 0
        # The samples from the same frame on, if they are kept.
        self._keeps_samples = keeps_samples
        self._samples_S = _NO_SAMPLES
        # Stretches of speech: first frame and end. The next segment begins at `_start` or later;
        # the last one ended at `_last_end`.
        self._speech: list[tuple[int, int]] = []
        self._start = self._last_end = 0

    def __call__(self, pieces: Iterable[AudioPiece]) -> Iterator[Segment]:
        """Yield the segments of a stream that arrives in pieces, as soon as they are known."""
        for piece in pieces:
            self._features_TF = torch.cat((self._features_TF, piece.features_TF))
            if self._keeps_samples:
                self._samples_S = np.concatenate((self._samples_S, piece.samples_S))
            self._decide(self._detector.accept(piece.samples_S, piece.features_TF))
            if self._known > self.lengths.longest:
                yield from self._segments(is_last=False)
        self._decide(self._detector.finish())
        total = self._first + len(self._features_TF)
        if total <= self.lengths.longest:
            if not is_digital_silence(self._features_TF).all():
                yield Segment(self._features_TF, 0, 0, self._samples_S)
            return
        # The frames of another detector may end a little earlier or later.
        self._known = total
        self._speech = [(begin, min(end, total)) for begin, end in self._speech if begin < total]
        yield from self._segments(is_last=True)

    def _decide(self, is_speech_T: Tensor) -> None:
        """Append the speech of the next frames."""
        for first, end in runs(is_speech_T):
            begin = first + self._known
            if self._speech and self._speech[-1][1] == begin:
                begin, _ = self._speech.pop()
            self._speech.append((begin, end + self._known))
        self._known += len(is_speech_T)

    def _segments(self, *, is_last: bool) -> Iterator[Segment]:
        """Yield the segments that later frames cannot change; all that are left if `is_last`."""
        while (cut := self._next_cut(is_last)) is not None:
            begin = self._begin
            first, end = begin - self._first, cut.end - self._first
            yield Segment(
                self._features_TF[first:end],
                begin,
                max(0, self._last_end - begin),
                self._samples_S[first * FRAME_SAMPLES : end * FRAME_SAMPLES],
            )
            self._last_end = cut.end
            self._start = cut.end - cut.overlap
            self._speech = [
                (max(first, self._start), end) for first, end in self._speech if end > self._start
            ]
        # The next speech begins now or later.
        self._start = max(self._start, self._begin)
        self._features_TF = self._features_TF[self._start - self._first :]
        self._samples_S = self._samples_S[(self._start - self._first) * FRAME_SAMPLES :]
        self._first = self._start

    @property
    def _begin(self) -> int:
        """The first frame of the next segment."""
        speech = self._speech[0][0] if self._speech else self._known
        return max(self._start, speech - self.lengths.padding)

    def _next_cut(self, is_last: bool) -> _Cut | None:
        """The end of the next segment; None if there is none, or later frames may change it."""
        self._drop_click(is_last)
        longest, shortest, pause, padding, _ = self.lengths
        begin = self._begin
        limit = begin + longest
        joined: _Cut | None = None
        for (_, end), gap in zip(self._speech, self._gaps(is_last), strict=True):
            if end > limit:
                return joined or self._cut_without_pause(begin)
            if gap < pause:
                continue
            if end + gap == self._known and gap < _LONG_PAUSE_FRAMES:
                # Whether this pause becomes a long one is not known yet.
                return None
            cut = _Cut(min(end + min(padding, gap // 2), self._known, limit), 0)
            if cut.end - begin >= shortest or gap >= _LONG_PAUSE_FRAMES:
                return cut
            joined = cut
        return None

    def _gaps(self, is_last: bool) -> list[int]:
        """The frames without speech after each stretch of speech.

        The last gap ends with the known frames, or is long if these are all.
        """
        ends = [end for _, end in self._speech]
        begins = [begin for begin, _ in self._speech[1:]]
        begins.append(self._known + (2 * _LONG_PAUSE_FRAMES if is_last else 0))
        return [begin - end for begin, end in zip(begins, ends, strict=bool(ends))]

    def _drop_click(self, is_last: bool) -> None:
        """Drop leading sounds that are too short to be speech."""
        while self._speech:
            begin, end = self._speech[0]
            gap = self._gaps(is_last)[0]
            if end - begin >= _SHORTEST_SPEECH_FRAMES or gap < self.lengths.pause:
                return
            del self._speech[0]

    def _cut_without_pause(self, begin: int) -> _Cut:
        """Cut at the longest gap between half and all of the longest segment, or overlap."""
        longest, overlap = self.lengths.longest, self.lengths.overlap
        gaps = [
            (after - before, (after + before) // 2)
            for (_, before), (after, _) in pairwise(self._speech)
        ]
        usable = [
            (gap, middle)
            for gap, middle in gaps
            if gap >= _SHORT_PAUSE_FRAMES and longest // 2 <= middle - begin <= longest
        ]
        return _Cut(max(usable)[1], 0) if usable else _Cut(begin + longest, overlap)


def _frames(seconds: float) -> int:
    return round(seconds / FEATURE_SECONDS)
