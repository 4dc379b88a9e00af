"""Times in seconds of tokens and words, from the encoder frames of symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.frame_times import FRAME_SECONDS

WORD_START = "▁"
# Models emit the last symbol of a word before the word ends. With this addition, word ends of the
# synthetic corpus had a mean error of 164 ms, without it 254 ms.
_TAIL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class TimedToken:
    """A symbol, the start and end of its frame in seconds, and its probability there.

    Symbols of one frame share its 40 ms in equal parts, so that times never decrease.
    """

    token: str
    start: float
    end: float
    confidence: float


@dataclass(frozen=True, kw_only=True)
class TimedWord:
    """A word: from its first symbol to a little after its last, or to the next word, in seconds.

    confidence: probability of its symbols at their frames, given the symbols before each.
    """

    word: str
    start: float
    end: float
    confidence: float


def timed_tokens(
    names: Sequence[str],
    symbols: Sequence[int],
    frames: Sequence[int],
    log_probs: Sequence[float],
) -> tuple[TimedToken, ...]:
    """The tokens of a path.

    Args:
        names: the names of all symbols, in the order of their ids.
        symbols, frames, log_probs: the ids of the path with their encoder frames, in order, and
            log-probabilities.
    """
    tokens = []
    for position, (symbol, frame) in enumerate(zip(symbols, frames, strict=True)):
        first, last = position, position
        while first > 0 and frames[first - 1] == frame:
            first -= 1
        while last + 1 < len(frames) and frames[last + 1] == frame:
            last += 1
        share, index = last - first + 1, position - first
        tokens.append(
            TimedToken(
                token=names[symbol],
                start=_seconds(frame + index / share),
                end=_seconds(frame + (index + 1) / share),
                confidence=_probability(log_probs[position]),
            )
        )
    return tuple(tokens)


def timed_words(
    tokenizer: Tokenizer,
    symbols: Sequence[int],
    tokens: Sequence[TimedToken],
    log_probs: Sequence[float],
    seconds: float = math.inf,
) -> tuple[TimedWord, ...]:
    """The words of a path; without word-start symbols it is one word. Arguments as `timed_tokens`.

    Args:
        seconds: length of the audio, at which the last word ends at the latest.
    """
    words = []
    for first, stop in word_spans([token.token for token in tokens]):
        word = tokenizer.decode(symbols[first:stop])
        if not word:
            continue
        last = tokens[stop - 1].end
        limit = tokens[stop].start if stop < len(tokens) else max(last, seconds)
        words.append(
            TimedWord(
                word=word,
                start=tokens[first].start,
                end=round(min(last + _TAIL_SECONDS, limit), 4),
                confidence=_probability(sum(log_probs[first:stop])),
            )
        )
    return tuple(words)


def word_spans(names: Sequence[str]) -> list[tuple[int, int]]:
    """The first position and the end (exclusive) of each word."""
    starts = [i for i, name in enumerate(names) if i == 0 or name.startswith(WORD_START)]
    return list(pairwise([*starts, len(names)]))


def _seconds(frame: float) -> float:
    return round(frame * FRAME_SECONDS, 4)


def _probability(log_prob: float) -> float:
    return round(math.exp(min(log_prob, 0.0)), 4)
