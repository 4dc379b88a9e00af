"""An n-gram model of words, which gives the probability of a range of sorted words in one step.

Axes: Q queries, G n-grams, K levels of history (the order minus 1).

With a history h, and h' the history without its first word, the model is

    P(w | h) = excess(h, w) + rest(h) * P(w | h')

A back-off model has this form too: its excess is P(w | h) - rest(h) * P(w | h') for the n-grams
that it lists, and 0 for the others. Words are sorted, and the n-grams of one order by history and
word, so the excess of the words a .. b-1 is a difference of two entries of a running sum.

Texts adapt a model by the method of Witten and Bell 1991: after a history that they have n times,
with d different next words, their relative frequencies have the share n / (n + d).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BEGIN, END = "<s>", "</s>"
# Have ids after those of the words.
_MARKS = (END, BEGIN, "<unk>")


class NgramList(NamedTuple):
    """The n-grams of one order of a back-off model.

    columns: for each position, the words of all n-grams.
    probability, backoff: (G,) float64, not logarithms.
    """

    columns: Sequence[Sequence[str]]
    probability: Tensor
    backoff: Tensor


class _Table(NamedTuple):
    """The n-grams of one order as (G, order) word ids; an n-gram may occur twice: see _level."""

    grams: Tensor
    excess: Tensor
    rest: Tensor


class _Level(NamedTuple):
    """The n-grams of order k, sorted by key.

    key: (G,) index of the first k-1 words in the level below * number of ids + last word.
    total: (G + 1,) running sum of the excess. rest: (G + 1,); the last is 1, for absent histories.
    """

    key: Tensor
    total: Tensor
    rest: Tensor


class WordNgram:
    """An n-gram model of words, on the CPU or, after `to`, on another device.

    words: sorted; their ids are their positions. end: the id of the end of a sentence.

    Args:
        backoff: the orders 1, 2, ... of a back-off model; may be empty.
        texts: words separated by spaces; they adapt the model, or are its only source.
        order: of the n-grams that are counted in `texts`.
        caution: factor of d in this share: with a larger one, the texts change the model less.

    Raises:
        ValueError: there is neither a model nor a text.
    """

    def __init__(
        self,
        backoff: Sequence[NgramList] = (),
        texts: Iterable[str] = (),
        order: int = 3,
        caution: float = 8.0,
    ) -> None:
        counts = _count(texts, order)
        if not backoff and not counts[0]:
            raise ValueError("a word n-gram model needs a back-off model or texts, got neither")
        names = set(backoff[0].columns[0]) if backoff else set()
        self.words = sorted(names.union(*counts[0]).difference(_MARKS))
        self.end = len(self.words)
        self._ids = {name: i for i, name in enumerate((*self.words, *_MARKS))}
        self._levels: list[_Level] = []
        own = self._text_tables(counts, caution) if counts[0] else []
        own_levels = self._build(own)
        left = 1.0 - _share(sum(counts[0].values()), caution * len(counts[0]))
        tables = []
        for k, table in enumerate(self._backoff_tables(backoff)):
            # The texts leave the rest of each history to the model.
            before = self._find(own_levels[:k], table.grams[:, :-1])
            scale = own_levels[k - 1].rest[before] if 0 < k <= len(own_levels) else left
            tables.append(table._replace(excess=table.excess * (scale if own else 1.0)))
        if not tables:  # Words that the texts lack are equally likely.
            grams = torch.arange(len(self._ids))[:, None]
            share = torch.full((len(grams),), left / len(grams), dtype=torch.float64)
            tables.append(_Table(grams, share, torch.ones_like(share)))
        self._levels = self._build(
            [
                _Table(*(torch.cat(pair) for pair in zip(*both, strict=True)))
                for both in _by_order(tables, own)
            ]
        )

    def to(self, device: torch.device) -> None:
        self._levels = [_Level(*(x.to(device) for x in level)) for level in self._levels]

    def start(self, rows: int) -> Tensor:
        """(rows, K) history of the beginning of a sentence."""
        device = self._levels[0].key.device
        begin_R = torch.full((rows,), self._ids[BEGIN], device=device)
        empty_RK = torch.zeros(rows, len(self._levels) - 1, dtype=torch.int64, device=device)
        return self.after(self.forget(empty_RK), begin_R)

    def forget(self, history_QK: Tensor) -> Tensor:
        """(Q, K) histories that no n-gram continues, as after an unknown word."""
        columns = [
            torch.full_like(history_QK[:, k], len(level.key))
            for k, level in enumerate(self._levels[:-1])
        ]
        return torch.stack(columns, dim=1) if columns else history_QK

    def after(self, history_QK: Tensor, word_Q: Tensor) -> Tensor:
        """(Q, K) histories after one more word each."""
        columns = [
            _lookup(level, history_QK[:, k - 1] * len(self._ids) + word_Q if k else word_Q)
            for k, level in enumerate(self._levels[:-1])
        ]
        return torch.stack(columns, dim=1) if columns else history_QK

    def between(self, history_QK: Tensor, first_Q: Tensor, stop_Q: Tensor) -> Tensor:
        """(Q,) float64 probability of the words first .. stop - 1 after the histories."""
        bottom = self._levels[0]
        sum_Q = bottom.total[stop_Q] - bottom.total[first_Q]
        for k, level in enumerate(self._levels[1:]):
            offset_Q = history_QK[:, k] * len(self._ids)
            stop_place_Q = torch.searchsorted(level.key, offset_Q + stop_Q)
            first_place_Q = torch.searchsorted(level.key, offset_Q + first_Q)
            excess_Q = level.total[stop_place_Q] - level.total[first_place_Q]
            sum_Q = excess_Q + self._levels[k].rest[history_QK[:, k]] * sum_Q
        return sum_Q.clamp(min=0.0)

    def _text_tables(
        self, counts: Sequence[Counter[tuple[str, ...]]], caution: float
    ) -> list[_Table]:
        """Excess and rest of the texts' own n-grams; the longest are no history."""
        tables: list[_Table] = []
        names: list[tuple[str, ...]] = []
        for k, ngrams in enumerate(counts):
            words: Counter[tuple[str, ...]] = Counter()
            different: Counter[tuple[str, ...]] = Counter()
            for gram, count in ngrams.items():
                words[gram[:-1]] += count
                different[gram[:-1]] += 1
            if k:
                rest = [1.0 - _share(words[gram], caution * different[gram]) for gram in names]
                tables[-1] = tables[-1]._replace(rest=torch.tensor(rest, dtype=torch.float64))
            names, excess = list(ngrams), []
            for gram, count in ngrams.items():
                before = gram[:-1]
                excess.append(count / (words[before] + caution * different[before]))
            if k == 0:  # The beginning is a history and no next word.
                names.append((BEGIN,))
                excess.append(0.0)
            columns = list(zip(*names, strict=True))
            tables.append(self._table(columns, torch.tensor(excess, dtype=torch.float64)))
        return tables

    def _backoff_tables(self, orders: Sequence[NgramList]) -> list[_Table]:
        """Excess and rest of a back-off model; leaves its levels in self._levels."""
        tables: list[_Table] = []
        for k, ngrams in enumerate(orders):
            table = self._table(ngrams.columns, ngrams.probability)._replace(rest=ngrams.backoff)
            if k:
                before = self._find(self._levels, table.grams[:, :-1])
                lower = self._probability(table.grams[:, 1:])
                excess = table.excess - self._levels[-1].rest[before] * lower
                # n-grams whose history is not listed, as after pruning, cannot be looked up.
                listed = before < len(self._levels[-1].key)
                table = _Table(table.grams[listed], excess[listed], table.rest[listed])
            else:
                table.excess[table.grams[:, 0] == self._ids[BEGIN]] = 0.0
            tables.append(table)
            self._levels = self._build(tables)
        return tables

    def _table(self, columns: Sequence[Sequence[str]], excess: Tensor) -> _Table:
        ids = [torch.tensor([self._ids[name] for name in column]) for column in columns]
        grams = torch.stack(ids, dim=1)
        return _Table(grams, excess.double(), torch.ones_like(excess, dtype=torch.float64))

    def _build(self, tables: Sequence[_Table]) -> list[_Level]:
        levels: list[_Level] = []
        for k, table in enumerate(tables):
            before = self._find(levels, table.grams[:, :-1])
            size = len(self._ids)
            levels.append(_level(before * size + table.grams[:, -1], table, size if k == 0 else 0))
        return levels

    def _find(self, levels: Sequence[_Level], grams: Tensor) -> Tensor:
        """(G,) indices of n-grams in their level, its size if absent; 0 for empty ones."""
        index = torch.zeros(len(grams), dtype=torch.int64)
        for level, word in zip(levels, grams.unbind(1), strict=False):
            index = _lookup(level, index * len(self._ids) + word)
        return index

    def _probability(self, grams: Tensor) -> Tensor:
        """(G,) probability of the last word of each n-gram after the others."""
        history, word = grams[:, :-1], grams[:, -1]
        columns = [
            self._find(self._levels, history[:, history.size(1) - k :])
            for k in range(1, history.size(1) + 1)
        ]
        shape = (len(grams), 0)
        history_QK = torch.stack(columns, dim=1) if columns else torch.zeros(shape).long()
        return self.between(history_QK, word, word + 1)


def _count(texts: Iterable[str], order: int) -> list[Counter[tuple[str, ...]]]:
    """The n-grams of each order, with begin and end of each text."""
    counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(order)]
    for text in texts:
        words = (BEGIN, *text.split(), END)
        for k, count in enumerate(counts):
            count.update(words[i : i + k + 1] for i in range(len(words) - k) if k or i)
    return counts


def _share(words: int, different: float) -> float:
    return words / (words + different) if words else 0.0


def _by_order(one: Sequence[_Table], other: Sequence[_Table]) -> list[list[_Table]]:
    return [[*one[k : k + 1], *other[k : k + 1]] for k in range(max(len(one), len(other)))]


def _level(key: Tensor, table: _Table, size: int) -> _Level:
    """A level; of n-grams that occur twice, excesses are added and rests are multiplied.

    size: if not 0, the level has all keys below it.
    """
    unique, place = key.unique(return_inverse=True)
    if size:
        unique, place = torch.arange(size), key
    excess = table.excess.new_zeros(len(unique)).index_add(0, place, table.excess)
    rest = table.rest.new_ones(len(unique) + 1)
    rest.scatter_reduce_(0, place, table.rest, "prod")
    total = torch.cat((excess.new_zeros(1), excess.cumsum(0)))
    return _Level(unique, total, rest)


def _lookup(level: _Level, key_Q: Tensor) -> Tensor:
    place_Q = torch.searchsorted(level.key, key_Q)
    found_Q = level.key[place_Q.clamp(max=len(level.key) - 1)] == key_Q
    return torch.where(found_Q, place_Q, len(level.key))
