"""Times in seconds of encoder frames, and of tokens and words from the frames of their symbols; CTM
lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from pruned_rnnt.data.tokens.text_normalisation import (
    joins_the_character_before,
    written_without_spaces,
)
from pruned_rnnt.data.tokens.tokenizer import BYTE_NAME, Tokenizer
from pruned_rnnt.decode.calibration import Calibration, SymbolTimes
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

FEATURE_SECONDS = 0.01
# Of most encoders; `frame_seconds` has that of any.
FRAME_SECONDS = FEATURE_SECONDS * SUBSAMPLING_FACTOR
WORD_START = "▁"
# Without a calibration: models emit the last symbol of a word before the word ends. With this
# addition, word ends of the synthetic corpus had a mean error of 164 ms, without it 254 ms.
_TAIL_SECONDS = 0.2
# With one: nothing is said for so long between two words; shorter gaps are errors of the times.
_PAUSE_SECONDS = 0.15
# A word that is left less is covered by those before it, whose times are wrong.
_SHORTEST_WORD_SECONDS = 0.02
# In a script without spaces, what lasts longer is a phrase, not a word.
_LONGEST_WORD_SECONDS = 2.0
# Of scripts without spaces, by Unicode's properties. Letters of the grapheme before them
# (Grapheme_Cluster_Break=SpacingMark): Thai and Lao am.
_WITH_THE_ONE_BEFORE = frozenset("\u0e33\u0eb3")
# Written with the consonant after them: signs that stack it (Indic_Conjunct_Break=Linker), and
# vowels that stand on its left (Logical_Order_Exception).
_WITH_THE_ONE_AFTER = frozenset(
    "\u1039\u17d2\u1a60\u1b44\ua9c0"
    "\u0e40\u0e41\u0e42\u0e43\u0e44\u0ec0\u0ec1\u0ec2\u0ec3\u0ec4\u19b5\u19b6\u19b7\u19ba"
)


def frame_seconds(encoder: Encoder) -> float:
    """Seconds of a frame of the encoder: 0.04, or 0.08 of a FastConformer."""
    return FEATURE_SECONDS * encoder.subsampling_factor


class TimedToken(NamedTuple):
    """A symbol, and the start and end of its frame, or of its frames, in seconds.

    Symbols of one frame share its time in equal parts, so that times never decrease.

    symbol, token: its id and name.
    log_prob: of the symbol on the path of the search; head_log_prob: by the CTC head, if there is
        one.
    """

    symbol: int
    token: str
    start: float
    end: float
    log_prob: float
    head_log_prob: float | None = None

    @property
    def confidence(self) -> float:
        """The probability of the symbol on the path."""
        return _probability(self.log_prob)


class TimedWord(NamedTuple):
    """A word with its start and end in seconds.

    confidence: with a calibration, the probability that the word is right; without one, the
        probability of its symbols at their frames, given the symbols before each, or with a
        calibration that needs the CTC head, if the head's path is unknown.
    """

    word: str
    start: float
    end: float
    confidence: float


class WordPart(NamedTuple):
    """A word as its symbols; for the other fields see `TimedWord`."""

    symbols: tuple[int, ...]
    start: float
    end: float
    confidence: float


def timed_tokens(
    names: Sequence[str],
    symbols: Sequence[int],
    frames: Sequence[int],
    log_probs: Sequence[float],
    head: HeadPath | None = None,
    *,
    durations: Sequence[int] = (),
    begin: float = 0.0,
    frame_seconds: float = FRAME_SECONDS,
) -> tuple[TimedToken, ...]:
    """The tokens of a path.

    Args:
        names: the names of all symbols, in the order of their ids.
        symbols, frames, log_probs: the ids of the path with their encoder frames, in order, and
            log-probabilities.
        head: the path of the CTC head through the same symbols, whose frames are then used.
        durations: frames by which each symbol advances, of a model with durations: the symbol lasts
            until the frame on which it lands. Not used with a head.
        begin: seconds at the first frame.
        frame_seconds: of an encoder frame.
    """
    frames = frames if head is None else head.frames
    lasting = durations if durations and head is None else [1] * len(frames)
    tokens = []
    last = -1
    for position, (symbol, frame) in enumerate(zip(symbols, frames, strict=True)):
        if position > last:  # the first symbol of a frame
            first = last = position
            while last + 1 < len(frames) and frames[last + 1] == frame:
                last += 1
        share, index = last - first + 1, position - first
        end = frame + (index + 1) / share
        if position == last:
            end = frame + max(lasting[position], 1)
        tokens.append(
            TimedToken(
                symbol,
                names[symbol],
                _seconds((frame + index / share) * frame_seconds, begin),
                _seconds(end * frame_seconds, begin),
                log_probs[position],
                None if head is None else head.log_probs[position],
            )
        )
    return tuple(tokens)


def timed_words(
    tokenizer: Tokenizer,
    tokens: Sequence[TimedToken],
    seconds: float = math.inf,
    calibration: Calibration | None = None,
    begin: float = 0.0,
) -> tuple[TimedWord, ...]:
    """The words of a path; without word-start symbols it is one word.

    In a script without spaces, a part between two spaces that lasts more than 2 s is a phrase or a
    whole text: each of its symbols is a word, with the marks that follow it.

    With a calibration, words are where it places them around their symbols. Without one, a word
    lasts from its first symbol to 0.2 s after its last one, or to the next word.

    Args:
        seconds: end of the audio, at which the last word ends at the latest.
        calibration: of the model whose path it is.
        begin: start of the audio, before which no word starts.
    """
    parts = word_parts(tokens, seconds, calibration, begin)
    return words_of_parts(parts, tokenizer.decode_all([part.symbols for part in parts]))


def word_parts(
    tokens: Sequence[TimedToken],
    seconds: float = math.inf,
    calibration: Calibration | None = None,
    begin: float = 0.0,
) -> list[WordPart]:
    """The words of a path before their symbols are decoded; arguments as for `timed_words`."""
    parts = [tokens[first:stop] for first, stop in timed_spans(tokens)]
    times = calibration.times if calibration is not None else None
    spans = _token_spans(parts, seconds) if times is None else _word_spans(parts, times, seconds)
    found = []
    for part, (start, end) in zip(parts, spans, strict=True):
        start = min(max(start, begin), seconds)
        found.append(
            WordPart(
                tuple(token.symbol for token in part),
                round(start, 4),
                round(min(max(end, start), max(seconds, start)), 4),
                _confidence(part, calibration),
            )
        )
    return found


def words_of_parts(parts: Sequence[WordPart], texts: Sequence[str]) -> tuple[TimedWord, ...]:
    """The words with the texts of their symbols; those without text are left out."""
    return tuple(
        TimedWord(text, part.start, part.end, part.confidence)
        for part, text in zip(parts, texts, strict=True)
        if text
    )


def word_spans(names: Sequence[str]) -> list[tuple[int, int]]:
    """The first position and the end (exclusive) of each word."""
    starts = [i for i, name in enumerate(names) if i == 0 or name.startswith(WORD_START)]
    return list(pairwise([*starts, len(names)]))


def unit_spans(names: Sequence[str]) -> list[tuple[int, int]]:
    """As `word_spans`, but each symbol of a script without spaces begins a word, too, which marks
    and symbols of other scripts continue. Bytes are symbols of the characters that they form."""
    joined = _with_whole_characters(names)
    starts = [
        each.first
        for before, each in zip([None, *joined], joined, strict=False)
        if before is None or begins_unit(before.text, each.text)
    ]
    return list(pairwise([*starts, len(names)]))


class _Joined(NamedTuple):
    """A symbol, or the character of several that are its bytes; first: position of the first."""

    first: int
    text: str


def _with_whole_characters(names: Sequence[str]) -> list[_Joined]:
    joined: list[_Joined] = []
    character = bytearray()
    for i, name in enumerate(names):
        byte = BYTE_NAME.fullmatch(name)
        value = int(byte[1], 16) if byte else 0
        if character and 0x80 <= value < 0xC0:
            character.append(value)
            joined[-1] = joined[-1]._replace(text=character.decode(errors="replace"))
            continue
        character = bytearray([value] if byte else [])
        text = character.decode(errors="replace") if byte else name
        joined.append(_Joined(first=i, text=text))
    return joined


def begins_unit(before: str, name: str) -> bool:
    """Whether a symbol begins a word, or a character of a script without spaces.

    before: the symbol before it.
    """
    return name.startswith(WORD_START) or (
        before[-1:] not in _WITH_THE_ONE_AFTER and _begins_character(name)
    )


@lru_cache(maxsize=1 << 16)
def _begins_character(name: str) -> bool:
    return (
        written_without_spaces(name)
        and not joins_the_character_before(name[0])
        and name[0] not in _WITH_THE_ONE_BEFORE
    )


def timed_spans(tokens: Sequence[TimedToken]) -> list[tuple[int, int]]:
    """As `word_spans`, but long phrases in a script without spaces are divided as by
    `unit_spans`."""
    names = [token.token for token in tokens]
    spans = []
    for first, stop in word_spans(names):
        own = names[first:stop]
        is_long = tokens[stop - 1].end - tokens[first].start > _LONGEST_WORD_SECONDS
        text = "".join(each.text for each in _with_whole_characters(own)) if is_long else ""
        if is_long and written_without_spaces(text):
            spans += [(first + i, first + j) for i, j in unit_spans(own)]
        else:
            spans.append((first, stop))
    return spans


def _token_spans(
    parts: Sequence[Sequence[TimedToken]], seconds: float
) -> list[tuple[float, float]]:
    """Start and end of each word, from the times of its tokens alone."""
    limits = [part[0].start for part in parts[1:]]
    limits += [max(parts[-1][-1].end, seconds)] if parts else []
    return [
        (part[0].start, min(part[-1].end + _TAIL_SECONDS, limit))
        for part, limit in zip(parts, limits, strict=True)
    ]


def _word_spans(
    parts: Sequence[Sequence[TimedToken]], times: SymbolTimes, seconds: float
) -> list[tuple[float, float]]:
    """Start and end of each word. Two words without a pause between them meet in the middle."""
    if not parts:
        return []
    starts = [part[0].start - times.before[part[0].symbol] for part in parts]
    ends = [part[-1].start + times.after[part[-1].symbol] for part in parts]
    lengths = [max(e - s, _SHORTEST_WORD_SECONDS) for s, e in zip(starts, ends, strict=True)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    for index in range(1, len(parts)):
        if starts[index] - ends[index - 1] < _PAUSE_SECONDS:
            border = (starts[index] + ends[index - 1]) / 2
            # The words before it may reach far into this one.
            border = max(border, starts[index - 1])
            starts[index] = ends[index - 1] = border
            ends[index] = max(ends[index], border)
    _uncover(starts, ends, lengths, seconds)
    return list(zip(starts, ends, strict=True))


def _uncover(
    starts: list[float], ends: list[float], lengths: Sequence[float], seconds: float
) -> None:
    """Give a length, in place, to words that the words before them cover.

    They have their own `lengths`, or an equal share of each, up to the start of the next word. If
    that one begins at once, its room is shared, too.
    """
    limits = [*starts[1:], seconds]
    first = 0
    for index, limit in enumerate(limits):
        if ends[first] - starts[first] >= _SHORTEST_WORD_SECONDS:
            first = index + 1
            continue
        room = limit - starts[first]
        is_enough = room >= (index + 1 - first) * _SHORTEST_WORD_SECONDS
        begins_at_once = limit == ends[index]  # `_word_spans` sets both to one border
        if begins_at_once and not is_enough:
            continue
        share = min(1.0, max(0.0, room) / sum(lengths[first : index + 1]))
        time = starts[first]
        for place in range(first, index + 1):
            starts[place] = time
            time = ends[place] = time + share * lengths[place]
        first = index + 1


def _confidence(tokens: Sequence[TimedToken], calibration: Calibration | None) -> float:
    path, head = worst_scores(tokens)
    found = None if calibration is None else calibration.confidence
    # One that was fitted with the head's probabilities means nothing without them.
    if found is None or (head is None and found.head):
        return _probability(sum(token.log_prob for token in tokens))
    return round(found(path, head), 4)


def worst_scores(tokens: Sequence[TimedToken]) -> tuple[float, float | None]:
    """The smallest log-probability of a word's symbols on the path, and by the CTC head."""
    heads = [token.head_log_prob for token in tokens if token.head_log_prob is not None]
    return min(token.log_prob for token in tokens), min(heads) if heads else None


def _seconds(seconds: float, begin: float) -> float:
    seconds = round(seconds, 4)
    return round(begin + seconds, 4) if begin else seconds


def _probability(log_prob: float) -> float:
    return round(math.exp(min(log_prob, 0.0)), 4)


def ctm_name(name: str) -> str:
    """A name as the first column: spaces become underscores, and so do semicolons that would make
    the line a comment."""
    column = _column(name)
    return f"__{column[2:]}" if column.startswith(";;") else column


def _column(text: str) -> str:
    return "_".join(text.split())


def _ctm_line(name: str, word: str, start: float, end: float, confidence: float) -> str:
    """`name channel start duration word confidence`; spaces in name and word become underscores."""
    times = f"{start:.3f} {end - start:.3f}"
    return f"{ctm_name(name)} 1 {times} {_column(word)} {confidence:.4f}"


def ctm_text(name: str, items: Sequence[tuple[str, float, float, float]]) -> str:
    """The lines of one recording; items are (word, start, end, confidence) in order of time.

    Words do not overlap, and one without length lasts 1 ms.
    """
    spans = separate_spans([(start, end) for _, start, end, _ in items], digits=3)
    return "".join(
        f"{_ctm_line(name, word, start, end, confidence)}\n"
        for (word, _, _, confidence), (start, end) in zip(items, spans, strict=True)
    )


def separate_spans(spans: Iterable[tuple[float, float]], digits: int) -> list[tuple[float, float]]:
    """Spans in order of time with starts and ends rounded to `digits` decimals, each with a length,
    and none before the end of the one before."""
    found: list[tuple[float, float]] = []
    time = 0.0
    for start, end in spans:
        start = max(round(start, digits), time)
        time = max(round(end, digits), round(start + 10.0**-digits, digits))
        found.append((start, time))
    return found
