"""From symbols at encoder frames to tokens and words at seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import FRAME_SECONDS

WORD_START = "▁"
# A symbol comes before its word has been said to the end. With this much after the last one, word
# ends of the synthetic corpus were 164 ms off in the mean, without it 254 ms.
_TAIL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class TimedToken:
    """A symbol, the seconds in which it is emitted, and its probability there.

    Symbols of one frame share its 40 ms in equal parts, so that times never run backwards.
    """

    token: str
    start: float
    end: float
    confidence: float


@dataclass(frozen=True, kw_only=True)
class TimedWord:
    """A word in seconds: from its first symbol to a little after its last, or to the next word.

    confidence: probability of its symbols, each given those before it, where they are emitted.
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
    """Tokens of a path.

    Args:
        names: of all symbols, in the order of their ids.
        symbols, frames, log_probs: ids, their encoder frames in order, their log-probabilities.
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
    """Words of a path; a text without word starts is one word. Arguments as of `timed_tokens`.

    Args:
        seconds: length of the audio, beyond which no word lasts.
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
    """First position and position after the last one of each word."""
    starts = [i for i, name in enumerate(names) if i == 0 or name.startswith(WORD_START)]
    return list(pairwise([*starts, len(names)]))


def _seconds(frame: float) -> float:
    return round(frame * FRAME_SECONDS, 4)


def _probability(log_prob: float) -> float:
    return round(math.exp(min(log_prob, 0.0)), 4)
