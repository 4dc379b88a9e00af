"""The path of a whole recording, from those of its segments, which are joined at words that both
contain.

Where windows overlap, the words near the end of the first lack the audio after them, and those near
the beginning of the second the audio before them. The join is a word that both recognised at about
the same time, as far as possible from both edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import (
    FEATURE_SECONDS,
    FRAME_SECONDS,
    WORD_START,
    TimedToken,
    WordPart,
    begins_unit,
    timed_tokens,
    unit_spans,
    word_parts,
)
from pruned_rnnt.transcribe.lost_speech import Mark, clipped

# Models place the same word at times that differ by this much from window to window.
_TOLERANCE_SECONDS = 0.6
# Longer runs of agreeing words than this are not preferred.
_MOST_AGREEING = 3


class TimedUnit(NamedTuple):
    """A word, or a symbol of a model without words or of a script without spaces.

    symbols: its ids. stop: position after its last symbol in the path. start, end: in seconds.
    """

    symbols: tuple[int, ...]
    stop: int
    start: float
    end: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


class Join(NamedTuple):
    """keep: symbols that are kept of the first path; skip: symbols left out of the second one."""

    keep: int
    skip: int


def join(first: Sequence[TimedUnit], second: Sequence[TimedUnit], begin: float, end: float) -> Join:
    """The join of two paths that overlap from `begin` to `end`, in seconds.

    Of the words that agree, the join is in the longest run (up to three words count), and there at
    the one whose two times are closest to each other and to the middle of the overlap. If none
    agree, the first path is used up to the middle and the second one from there on.
    """
    middle = (begin + end) / 2
    places = [
        (min(_agreeing(first, second, i, j), _MOST_AGREEING), -_distance(one, other, middle), i, j)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
        if one.end > begin and other.start < end and _agree(one, other)
    ]
    if places:
        *_, i, j = max(places)
        return Join(first[i].stop, second[j].stop)
    keep = max((unit.stop for unit in first if unit.middle < middle), default=0)
    skip = max((unit.stop for unit in second if unit.middle < middle), default=0)
    return Join(keep, skip)


def _agree(one: TimedUnit, other: TimedUnit) -> bool:
    return one.symbols == other.symbols and abs(one.middle - other.middle) < _TOLERANCE_SECONDS


def _distance(one: TimedUnit, other: TimedUnit, middle: float) -> float:
    """Seconds between the two words, and from the first to the middle of the overlap."""
    return abs(one.middle - other.middle) + abs(one.middle - middle)


def _agreeing(first: Sequence[TimedUnit], second: Sequence[TimedUnit], i: int, j: int) -> int:
    """The number of words in a row that agree, around words i and j."""
    before = after = 0
    while i > before and j > before and _agree(first[i - before - 1], second[j - before - 1]):
        before += 1
    while (
        i + after + 1 < len(first)
        and j + after + 1 < len(second)
        and _agree(first[i + after + 1], second[j + after + 1])
    ):
        after += 1
    return before + 1 + after


class SegmentPlace(NamedTuple):
    """Where a segment is in its recording, in feature frames.

    overlap: how many of its first frames are also the last ones of the segment before.
    """

    begin: int
    overlap: int
    frames: int


class JoinedPath:
    """Collects the paths of segments, in order; overlapping ones are joined.

    Times are computed only if they are needed: for words, or where segments overlap.

    Args:
        with_words: whether words are wanted.
        frame_seconds: of an encoder frame.

    Attributes:
        score: sum of the scores of all segments.
        marks: stretches in which the text is not to be trusted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        calibration: Calibration | None = None,
        *,
        with_words: bool,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self.score = 0.0
        self.marks: list[Mark] = []
        self._tokenizer = tokenizer
        self._calibration = calibration
        self._with_words = with_words
        self._has_words = any(name.startswith(WORD_START) for name in tokenizer.symbols)
        self._frame_seconds = frame_seconds
        self._stretches: list[Sequence[int]] = []
        self._parts: list[WordPart] = []
        # The path since the last pause: that of one segment, or tokens. Where its audio begins and
        # ends, in seconds.
        self._single: tuple[Hypothesis, HeadPath | None] | None = None
        self._tokens: list[TimedToken] = []
        self._begin = self._end = 0.0

    def append(
        self,
        found: Hypothesis,
        head: HeadPath | None,
        place: SegmentPlace,
        marks: Sequence[Mark] = (),
    ) -> None:
        """Add the path of the next segment, that of the CTC head through its symbols, and marks."""
        begin = place.begin * FEATURE_SECONDS
        self.score += found.score
        if place.overlap:
            self._join(self._timed(found, head, begin), begin, marks)
        else:
            self.marks += marks
            self._finish_words()
            self._begin = begin
            self._single = (found, head)
        self._end = begin + place.frames * FEATURE_SECONDS

    @property
    def symbols(self) -> list[int]:
        """The symbols of the whole path."""
        return [symbol for stretch in self.stretches for symbol in stretch]

    @property
    def stretches(self) -> list[Sequence[int]]:
        """The symbols of the whole path, divided at pauses between segments."""
        return [*self._stretches, self._last_symbols()]

    def word_parts(self) -> list[WordPart]:
        """All words, if they are wanted, at the end of the recording."""
        self._finish_words()
        return self._parts

    def _join(self, tokens: list[TimedToken], begin: float, marks: Sequence[Mark]) -> None:
        """Append tokens whose first ones may be of words that the path has, too, and marks."""
        self._make_tokens()
        first = self._first_shared(begin)
        place = join(self._units(self._tokens[first:]), self._units(tokens), begin, self._end)
        del self._tokens[first + place.keep :], tokens[: place.skip]
        # Each window is marked where its own text is used.
        cut = tokens[0].start if tokens else self._end
        self.marks = clipped(self.marks, 0.0, cut) + clipped(marks, cut, math.inf)
        # The windows may place the word at which they are joined at different times.
        earliest = self._tokens[-1].end if self._tokens else 0.0
        self._tokens += [
            t._replace(start=max(t.start, earliest), end=max(t.end, earliest)) for t in tokens
        ]

    def _first_shared(self, begin: float) -> int:
        """The first token of the words that may agree with those of a window from `begin` on.

        In a recording without pauses nearly all tokens are before these, so they are not compared
        again.
        """
        first = len(self._tokens)
        while first and self._tokens[first - 1].end > begin - _TOLERANCE_SECONDS:
            first -= 1
        # To the beginning of the word.
        while self._has_words and 0 < first < len(self._tokens):
            if begins_unit(self._tokens[first - 1].token, self._tokens[first].token):
                break
            first -= 1
        return first

    def _finish_words(self) -> None:
        """Make words of the path since the last pause, if they are wanted."""
        self._stretches.append(self._last_symbols())
        if self._with_words:
            self._make_tokens()
            self._parts += word_parts(self._tokens, self._end, self._calibration, self._begin)
        self._single, self._tokens = None, []

    def _last_symbols(self) -> Sequence[int]:
        """The symbols since the last pause."""
        if self._single is not None:
            return self._single[0].symbols
        return [token.symbol for token in self._tokens]

    def _make_tokens(self) -> None:
        if self._single is not None:
            self._tokens = self._timed(*self._single, self._begin)
            self._single = None

    def _timed(self, found: Hypothesis, head: HeadPath | None, begin: float) -> list[TimedToken]:
        return list(
            timed_tokens(
                self._tokenizer.symbols,
                found.symbols,
                found.frames,
                found.symbol_scores,
                head,
                durations=found.durations,
                begin=begin,
                frame_seconds=self._frame_seconds,
            )
        )

    def _units(self, tokens: Sequence[TimedToken]) -> list[TimedUnit]:
        """The words of a path, or its symbols if they are no parts of words."""
        spans = [(place, place + 1) for place in range(len(tokens))]
        if self._has_words:
            spans = unit_spans([token.token for token in tokens])
        return [
            TimedUnit(
                tuple(token.symbol for token in tokens[i:j]), j, tokens[i].start, tokens[j - 1].end
            )
            for i, j in spans
        ]


class DecodedSegment(NamedTuple):
    """The best path through a segment, that of the CTC head, if there is one, and its marks."""

    hypothesis: Hypothesis
    head: HeadPath | None
    place: SegmentPlace
    marks: Sequence[Mark] = ()


@dataclass
class RecordingPath:
    """What is known of one recording.

    number: of those before it.
    error: why it could not be read or decoded.
    frames, warning: feature frames, and the warning of the transcription; known at the end.
    segments: how many were added; waiting: how many of them are not decoded yet.
    """

    path: JoinedPath
    number: int = 0
    error: Exception | None = None
    frames: int = 0
    warning: str = ""
    segments: int = 0
    waiting: int = 0
    _decoded: dict[int, DecodedSegment | None] = field(default_factory=dict)
    _joined: int = 0

    def add(self) -> int:
        """The number of the next segment, which waits to be decoded."""
        self.segments += 1
        self.waiting += 1
        return self.segments - 1

    def decoded(self, number: int, segment: DecodedSegment | None) -> None:
        """Segments may be decoded in any order; None: it has no path."""
        self.waiting -= 1
        self._decoded[number] = segment
        while self._joined in self._decoded:
            found = self._decoded.pop(self._joined)
            self._joined += 1
            if found is not None:
                self.path.append(*found)
