"""The path of a whole recording, from those of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.decode.word_times import (
    WORD_START,
    TimedToken,
    TimedWord,
    timed_tokens,
    timed_words,
    word_spans,
)
from pruned_rnnt.transcribe.join import TimedUnit, join
from pruned_rnnt.transcribe.segments import Segment


class JoinedPath:
    """Collects the paths of segments, in order; overlapping ones are joined.

    score: sum of the scores of all segments.
    """

    def __init__(self, tokenizer: Tokenizer, calibration: Calibration | None = None) -> None:
        self.score = 0.0
        self._tokenizer = tokenizer
        self._calibration = calibration
        self._names = tokenizer.symbols
        self._has_words = any(name.startswith(WORD_START) for name in self._names)
        self._symbols: list[int] = []
        self._words: list[TimedWord] = []
        # The path since the last pause; where its audio begins and ends, in seconds.
        self._tokens: list[TimedToken] = []
        self._begin = self._end = 0.0

    def append(self, found: Hypothesis, head: HeadPath | None, segment: Segment) -> None:
        """Add the path of the next segment, and that of the CTC head through its symbols."""
        begin = segment.begin * FEATURE_SECONDS
        tokens = [
            replace(token, start=round(begin + token.start, 4), end=round(begin + token.end, 4))
            for token in timed_tokens(
                self._names,
                found.symbols,
                found.frames,
                found.symbol_scores,
                head,
                durations=found.durations,
            )
        ]
        self.score += found.score
        if segment.overlap:
            place = join(self._units(self._tokens), self._units(tokens), begin, self._end)
            del self._tokens[place.keep :], tokens[: place.skip]
            # The windows may place the word at which they are joined at different times.
            earliest = self._tokens[-1].end if self._tokens else 0.0
            tokens = [
                replace(t, start=max(t.start, earliest), end=max(t.end, earliest)) for t in tokens
            ]
        else:
            self._finish_words()
            self._begin = begin
        self._tokens += tokens
        self._end = begin + len(segment.features_TF) * FEATURE_SECONDS

    @property
    def text(self) -> str:
        return self._tokenizer.decode([*self._symbols, *(t.symbol for t in self._tokens)])

    @property
    def words(self) -> tuple[TimedWord, ...]:
        self._finish_words()
        return tuple(self._words)

    def _finish_words(self) -> None:
        """Make words of the path since the last pause."""
        self._words += timed_words(
            self._tokenizer, self._tokens, self._end, self._calibration, self._begin
        )
        self._symbols += [token.symbol for token in self._tokens]
        self._tokens = []

    def _units(self, tokens: Sequence[TimedToken]) -> list[TimedUnit]:
        """The words of a path, or its symbols if the model has no words."""
        spans = [(place, place + 1) for place in range(len(tokens))]
        if self._has_words:
            spans = word_spans([token.token for token in tokens])
        return [
            TimedUnit(
                tuple(token.symbol for token in tokens[i:j]), j, tokens[i].start, tokens[j - 1].end
            )
            for i, j in spans
        ]
