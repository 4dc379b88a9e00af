"""The path of a whole recording, from those of its segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS, FRAME_SECONDS
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.decode.word_times import (
    WORD_START,
    TimedToken,
    WordPart,
    timed_tokens,
    word_parts,
    word_spans,
)
from pruned_rnnt.transcribe.join import TimedUnit, join
from pruned_rnnt.transcribe.lost_speech import Mark, clipped


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
        self._frame_seconds = frame_seconds
        self._symbols: list[int] = []
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
        return [*self._symbols, *self._last_symbols()]

    def word_parts(self) -> list[WordPart]:
        """All words, if they are wanted, at the end of the recording."""
        self._finish_words()
        return self._parts

    def _join(self, tokens: list[TimedToken], begin: float, marks: Sequence[Mark]) -> None:
        """Append tokens whose first ones may be of words that the path has, too, and marks."""
        self._make_tokens()
        place = join(self._units(self._tokens), self._units(tokens), begin, self._end)
        del self._tokens[place.keep :], tokens[: place.skip]
        # Each window is marked where its own text is used.
        cut = tokens[0].start if tokens else self._end
        self.marks = clipped(self.marks, 0.0, cut) + clipped(marks, cut, math.inf)
        # The windows may place the word at which they are joined at different times.
        earliest = self._tokens[-1].end if self._tokens else 0.0
        self._tokens += [
            t._replace(start=max(t.start, earliest), end=max(t.end, earliest)) for t in tokens
        ]

    def _finish_words(self) -> None:
        """Make words of the path since the last pause, if they are wanted."""
        self._symbols += self._last_symbols()
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
        """The words of a path, or its symbols if the model has no words."""
        spans = [(place, place + 1) for place in range(len(tokens))]
        if any(name.startswith(WORD_START) for name in self._tokenizer.symbols):
            spans = word_spans([token.token for token in tokens])
        return [
            TimedUnit(
                tuple(token.symbol for token in tokens[i:j]), j, tokens[i].start, tokens[j - 1].end
            )
            for i, j in spans
        ]
