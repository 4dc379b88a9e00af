"""Hotwords: phrases that a search prefers; an automaton over symbols (Aho and Corasick 1975).

Axes: R rows, S states (prefixes of phrases), V vocabulary.

Each symbol that continues a phrase gets its bonus immediately, so that the phrase survives in the
beam. When a hypothesis leaves a phrase without completing it, these bonuses are subtracted again.
A negative bonus counts at the end of its phrase, so that others with the same start stay in the
beam. The total of a hypothesis is

    sum over all occurrences of phrases (they may overlap) of bonus * symbols of the phrase

In scripts without spaces a word may begin anywhere, and after a letter of such a script a word of
any script. A phrase occurs there without the mark of a word's start.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.data.tokens.tokenizer import (
    BYTE_NAME,
    UNKNOWN_ID,
    UNKNOWN_SYMBOL,
    WORD_START,
    Tokenizer,
)
from pruned_rnnt.decode.search.states import Rows

logger = logging.getLogger(__name__)

# Bytes of a line, which has a phrase and its bonus.
_MAX_LINE_BYTES = 1000
# More than enough to force a phrase, and small enough for sums of it in float32.
_MAX_BONUS = 1000.0
# Entries of the scorer's table: 4 GB, and up to 1.6 times that with phrases that begin with signs
# or bytes, which are in it twice.
_MAX_ENTRIES = 2**30
# Phrases that a warning names.
_MOST_SHOWN = 5
# Where a phrase may begin: anywhere; not directly after a symbol that is only the mark of a word's
# start; only after a letter of a script without spaces (and signs or digits after it). The
# scorer's first states, in this order: where a phrase of one place may begin, those of smaller
# places may, too.
_ANYWHERE, _INSIDE, _UNSPACED = range(3)


@dataclass(frozen=True, kw_only=True)
class Hotword:
    """A phrase; bonus: natural log-probability added for each of its symbols; negative to avoid
    the phrase. Of equal phrases the largest bonus counts.

    place: where it may begin; other places than anywhere need the scorer's `names`.
    """

    symbols: tuple[int, ...]
    bonus: float
    place: int = _ANYWHERE


def read_hotwords(path: Path, tokenizer: Tokenizer, bonus: float) -> list[Hotword]:
    """Read a file with a phrase per line, optionally with its own bonus: `NEW YORK :2.5`.

    A file without phrases is logged as a warning, as are phrases with characters in bytes.

    Raises:
        ValueError: a bonus is not a finite number or beyond 1000, a phrase has characters that the
            tokenizer lacks or more than 1000 bytes, the encoding is not UTF-8, or there are too
            many phrases for the scorer's table; the message names file and line.
        FileNotFoundError: `path` does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no hotwords at {path}")
    hotwords = []
    in_bytes = []
    unspaced = [
        name for name in tokenizer.symbols if len(name) == 1 and written_without_spaces(name)
    ]
    entries = 0
    for number, line in _lines(path):
        location = f"{path}:{number}"
        with_bonus = re.fullmatch(r"(.*)[ \t]:(.*)", line)
        phrase, own_bonus = with_bonus.groups() if with_bonus else (line, "")
        try:
            value = check_bonus(float(own_bonus)) if with_bonus else bonus
        except ValueError as error:
            raise ValueError(
                f"{location}: bonus {own_bonus!r} is not a number from {-_MAX_BONUS:g} to "
                f"{_MAX_BONUS:g}"
            ) from error
        symbols = tokenizer.encode(phrase)
        if UNKNOWN_ID in symbols:
            raise ValueError(f"{location}: {phrase!r} has {_lacking(phrase, tokenizer)}")
        if _is_lacked(phrase, tokenizer):
            in_bytes.append(f"{location}: {phrase!r} has {_lacking(phrase, tokenizer, 'in bytes')}")
        inside = _without_word_start(phrase, tokenizer, unspaced)
        if inside == symbols:
            inside = []
        entries += (len(symbols) + len(inside)) * len(tokenizer)
        if entries > _MAX_ENTRIES:
            raise ValueError(
                f"{location}: the phrases up to here take {entries // len(tokenizer):,} rows of "
                f"the scorer's table; with a vocabulary of {len(tokenizer)} it has "
                f"{_MAX_ENTRIES // len(tokenizer):,} at most: use fewer or shorter phrases"
            )
        if symbols:
            hotwords.append(Hotword(symbols=tuple(symbols), bonus=value))
        if inside:
            place = _place_inside(tokenizer.normalise(phrase)[0])
            hotwords.append(Hotword(symbols=tuple(inside), bonus=value, place=place))
    if in_bytes:
        logger.warning(
            "hotwords have characters that the model can only write in bytes, because they were "
            "rare or missing in its training texts (%d): %s%s",
            len(in_bytes),
            " | ".join(in_bytes[:_MOST_SHOWN]),
            " | ..." if len(in_bytes) > _MOST_SHOWN else "",
        )
    if not hotwords:
        logger.warning("%s has no hotwords: it needs one phrase in a line", path)
    return hotwords


def _is_lacked(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text has characters or words without a symbol: unknown, or in bytes, which
    `Tokenizer.lacks` counts as known."""
    names = (tokenizer.symbols[index] for index in tokenizer.encode(text))
    return any(name == UNKNOWN_SYMBOL or BYTE_NAME.fullmatch(name) for name in names)


def _lacking(phrase: str, tokenizer: Tokenizer, how: str = "that the model lacks") -> str:
    """What a phrase has that the tokenizer lacks; `how` tells that in the text."""
    known = {text for text in phrase if not _is_lacked(text, tokenizer)}
    found = ", ".join(repr(text) for text in dict.fromkeys(phrase) if text not in known)
    # Words may be unknown although their characters are not.
    shown = f"characters {how}: {found}" if found else f"words {how}"
    for spelling in (phrase.lower(), phrase.upper()):
        if spelling != phrase and not _is_lacked(spelling, tokenizer):
            shown += f"; it knows {spelling!r}"
    if re.search(r"[^ \t]:[-+.\d]+$", phrase.rstrip()):
        shown += "; a bonus needs a space before its colon, such as `NEW YORK :2.5`"
    return shown


def _without_word_start(phrase: str, tokenizer: Tokenizer, characters: Iterable[str]) -> list[int]:
    """The symbols of a phrase after one of the characters, without a space; empty if none fits.

    A text alone begins with the mark of a word's start, which the middle of a sentence lacks.
    """
    for character in characters:
        before, both = tokenizer.encode(character), tokenizer.encode(character + phrase)
        if both[: len(before)] == before and UNKNOWN_ID not in both:
            return both[len(before) :]
    return []


def _place_inside(first: str) -> int:
    """The place of a phrase without the mark of a word's start, by its first character."""
    # Brackets and other signs begin something new, also after a letter of a script with spaces;
    # apostrophes and hyphens do not.
    is_sign = unicodedata.category(first)[0] in "PS" and first not in "'\u2019-"
    return _INSIDE if is_sign or written_without_spaces(first) else _UNSPACED


def _place_after(name: str) -> int | None:
    """The place after a symbol; None if it has neither letters nor the mark of a word's start."""
    if byte := BYTE_NAME.fullmatch(name):
        value = int(byte[1], 16)
        if 0xE3 <= value <= 0xE9:  # begins Han, kana, and their punctuation
            return _UNSPACED
        if 0xC3 <= value <= 0xDF or 0xEA <= value <= 0xED:  # Latin to Arabic; Korean
            return _INSIDE
        # The other bytes do not tell the script: the place remains that before them.
        name = chr(value) if value < 0x80 else ""
    for character in reversed(name):
        kind = unicodedata.category(character)[0]
        is_wide_mark = kind == "P" and unicodedata.east_asian_width(character) in "WF"
        if is_wide_mark or written_without_spaces(character):
            return _UNSPACED
        if kind in "LM" or character == WORD_START:
            return _ANYWHERE if name.endswith(WORD_START) else _INSIDE
    return None


def check_bonus(bonus: float) -> float:
    """Return the bonus; ValueError if it is not a finite number or too large."""
    if not math.isfinite(bonus) or abs(bonus) > _MAX_BONUS:
        raise ValueError(f"needs a number from {-_MAX_BONUS:g} to {_MAX_BONUS:g}, got {bonus}")
    return bonus


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines; reads no more of a line than a phrase may have."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES + 2):
            number += 1
            text = line.rstrip(b"\r\n")
            if len(text) > _MAX_LINE_BYTES:
                shown = text[:40].decode("utf-8", errors="replace")
                raise ValueError(
                    f"{path}:{number}: phrase longer than {_MAX_LINE_BYTES} bytes, {shown!r}...: "
                    "needs one phrase per line"
                )
            try:
                yield number, text.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number} is not UTF-8") from error


class HotwordScorer:
    """Bonuses for hotwords; a `TokenScorer` whose state is a prefix of a phrase.

    Its table has V entries (4 bytes each) for every prefix: 40 MB for 4,000 phrases of 5 symbols
    in a vocabulary of 500, and twice that with letters of scripts without spaces, because each
    phrase is then there with and without the mark of a word's start.

    Args:
        vocab_size: V.
        names: of the symbols, by id; needed for hotwords with a `place`.
    """

    capturable = True

    def __init__(
        self, hotwords: Iterable[Hotword], vocab_size: int, names: Sequence[str] = ()
    ) -> None:
        places = [_place_after(name) for name in names]
        neutral = {symbol for symbol, place in enumerate(places) if place is None}
        trie = _Trie(hotwords, neutral)
        next_SV = torch.zeros(len(trie.children), vocab_size, dtype=torch.int32)
        for symbol, place in enumerate(places):
            next_SV[0, symbol] = _INSIDE if place is None else place
        fail = [0] * len(trie.children)
        fail[_UNSPACED] = _INSIDE
        pending, completed = [0.0] * len(fail), list(trie.completed)
        queue = deque([_ANYWHERE, _INSIDE, _UNSPACED])
        while queue:
            state = queue.popleft()
            if state != 0:
                # A symbol that does not continue this prefix continues its longest proper suffix.
                next_SV[state] = next_SV[fail[state]]
                completed[state] += completed[fail[state]]
                pending[state] = trie.reward[state] or pending[fail[state]]
            if state == _UNSPACED:
                next_SV[state, sorted(neutral)] = _UNSPACED
            for symbol, child in trie.children[state].items():
                fail[child] = int(next_SV[state, symbol])
                next_SV[state, symbol] = child
                queue.append(child)
        self._next_SV = next_SV
        self._pending_S = torch.tensor(pending)
        self._gain_S = self._pending_S + torch.tensor(completed)

    def start(self, rows: int, device: torch.device) -> Rows:
        self._next_SV = self._next_SV.to(device)
        self._pending_S = self._pending_S.to(device)
        self._gain_S = self._gain_S.to(device)
        return (torch.zeros(rows, dtype=torch.int64, device=device),)

    def scores(self, state: Rows) -> Tensor:
        (state_R,) = state
        return self._gain_S[self._next_SV[state_R].long()] - self._pending_S[state_R, None]

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        (state_R,) = state
        return (self._next_SV[state_R, symbols_R].long(),)

    def final(self, state: Rows) -> Tensor:
        (state_R,) = state
        return -self._pending_S[state_R]


class _Trie:
    """The tries of phrases, one for each place where these may begin.

    That of _UNSPACED also has the other places' phrases that begin with one of the `neutral`
    symbols: such a symbol leaves the place as it was, and so do these copies.

    children: for each node, the node after each symbol.
    reward: for each node, the largest bonus that a phrase that goes on after it gives for the
        symbols up to it; 0 if there is none, or all are negative.
    completed: for each node, the bonus of the phrases that end there.
    """

    def __init__(self, hotwords: Iterable[Hotword], neutral: Collection[int]) -> None:
        self.children: list[dict[int, int]] = [{}, {}, {}]
        self.reward = [0.0, 0.0, 0.0]
        self.completed = [0.0, 0.0, 0.0]
        best: dict[tuple[int, tuple[int, ...]], float] = {}
        for word in hotwords:
            key = word.place, word.symbols
            best[key] = max(word.bonus, best.get(key, word.bonus))
        for (place, symbols), bonus in best.items():
            self._add(place, symbols, bonus)
            if place != _UNSPACED and symbols and symbols[0] in neutral:
                self._add(_UNSPACED, symbols, bonus)

    def _add(self, node: int, symbols: Sequence[int], bonus: float) -> None:
        for depth, symbol in enumerate(symbols, start=1):
            if symbol not in self.children[node]:
                self.children[node][symbol] = len(self.children)
                self.children.append({})
                self.reward.append(0.0)
                self.completed.append(0.0)
            node = self.children[node][symbol]
            if depth < len(symbols):
                self.reward[node] = max(self.reward[node], bonus * depth)
        self.completed[node] += bonus * len(symbols)
