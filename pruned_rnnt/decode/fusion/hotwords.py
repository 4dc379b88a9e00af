"""Hotwords: phrases which a search prefers, by an automaton over symbols (Aho and Corasick 1975).

Axes: R rows, S states (prefixes of phrases), V vocabulary.

Each symbol that goes on with a phrase is rewarded at once, so that the phrase survives in the beam;
what was given for a phrase that is not completed is taken back when it breaks off. In the end a
hypothesis has got

    sum over all occurrences of phrases (they may overlap) of bonus * symbols of the phrase

and nothing else, whatever it began and did not finish.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.search.rows import Rows

# A phrase, its bonus and spaces, in bytes.
_LONGEST_LINE = 1000
# Nothing outweighs a hundred of these, nor does a sum of them leave the range of float32.
_LARGEST_BONUS = 1000.0
# 2 GB of the scorer's table.
_MOST_ENTRIES = 2**29


@dataclass(frozen=True, kw_only=True)
class Hotword:
    """bonus: natural log-probability given for each symbol."""

    symbols: tuple[int, ...]
    bonus: float


def read_hotwords(path: Path, tokenizer: Tokenizer, bonus: float) -> list[Hotword]:
    """One phrase a line, its own bonus after a colon if it has one: `NEW YORK :2.5`.

    Raises:
        ValueError: a bonus which is no finite number or beyond 1000, a phrase which the tokenizer
            cannot write, one of more than 1000 bytes, another encoding than UTF-8, or more phrases
            than the scorer can hold; the message names file and line.
        FileNotFoundError: no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no hotwords at {path}")
    hotwords = []
    entries = 0
    for number, line in _lines(path):
        where = f"{path}:{number}"
        phrase, colon, own_bonus = line.rpartition(" :")
        try:
            value = check_bonus(float(own_bonus)) if colon else bonus
        except ValueError as error:
            raise ValueError(
                f"{where}: bonus {own_bonus!r} is not a number from {-_LARGEST_BONUS:g} to "
                f"{_LARGEST_BONUS:g}"
            ) from error
        symbols = tokenizer.encode(phrase if colon else line)
        if UNKNOWN_ID in symbols:
            raise ValueError(f"{where}: {line!r} has characters which the model lacks")
        entries += len(symbols) * len(tokenizer)
        if entries > _MOST_ENTRIES:
            raise ValueError(
                f"{where}: the phrases up to here have {entries // len(tokenizer):,} symbols; with "
                f"a vocabulary of {len(tokenizer)} the table holds "
                f"{_MOST_ENTRIES // len(tokenizer):,} at most: use fewer or shorter phrases"
            )
        if symbols:
            hotwords.append(Hotword(symbols=tuple(symbols), bonus=value))
    return hotwords


def check_bonus(bonus: float) -> float:
    """A bonus that sums can hold. Raises ValueError for another."""
    if not math.isfinite(bonus) or abs(bonus) > _LARGEST_BONUS:
        raise ValueError(
            f"needs a number from {-_LARGEST_BONUS:g} to {_LARGEST_BONUS:g}, got {bonus}"
        )
    return bonus


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, of which no more is read than a phrase may have."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE + 2):
            number += 1
            text = line.rstrip(b"\r\n")
            if len(text) > _LONGEST_LINE:
                shown = text[:40].decode("utf-8", errors="replace")
                raise ValueError(
                    f"{path}:{number}: phrase longer than {_LONGEST_LINE} bytes, {shown!r}...: "
                    "needs a phrase a line"
                )
            try:
                yield number, text.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number} is not UTF-8") from error


class HotwordScorer:
    """Rewards of hotwords; a `TokenScorer` whose state is a prefix of a phrase.

    Its table has V entries (4 bytes each) for every prefix: 40 MB for 4,000 phrases of 5 symbols
    in a vocabulary of 500.
    """

    def __init__(self, hotwords: Iterable[Hotword], vocab_size: int) -> None:
        trie = _Trie(hotwords)
        next_SV = torch.zeros(len(trie.children), vocab_size, dtype=torch.int32)
        fail = [0] * len(trie.children)
        pending, completed = [0.0] * len(fail), list(trie.completed)
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            if state != 0:
                # What the longest proper suffix does with a symbol, where this prefix has nothing.
                next_SV[state] = next_SV[fail[state]]
                completed[state] += completed[fail[state]]
                # A whole phrase with nothing to follow has nothing pending of its own.
                goes_on = bool(trie.children[state])
                pending[state] = trie.reward[state] if goes_on else pending[fail[state]]
            for symbol, child in trie.children[state].items():
                fail[child] = int(next_SV[state, symbol]) if state != 0 else 0
                next_SV[state, symbol] = child
                waiting.append(child)
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
    """children: symbol -> node of each node; reward: of the symbols up to a node, the most that a
    phrase through it gives; completed: bonus of the phrases that end at a node."""

    def __init__(self, hotwords: Iterable[Hotword]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.reward = [0.0]
        self.completed = [0.0]
        for hotword in hotwords:
            self._add(hotword.symbols, hotword.bonus)

    def _add(self, symbols: Sequence[int], bonus: float) -> None:
        node = 0
        for depth, symbol in enumerate(symbols, start=1):
            if symbol not in self.children[node]:
                self.children[node][symbol] = len(self.children)
                self.children.append({})
                self.reward.append(bonus * depth)
                self.completed.append(0.0)
            node = self.children[node][symbol]
            self.reward[node] = max(self.reward[node], bonus * depth)
        self.completed[node] = max(self.completed[node], bonus * len(symbols))
