"""An n-gram language model over symbols, as an automaton on the device of the search.

Axes: R rows, S states, A arcs, L levels, D most arcs of a state, C classes, V vocabulary.

A state is a context: the last words that can still matter, at most one fewer than the longest
n-gram has. The score of a word w after a context h is

    log p(w | h)            = the entry of h w, if the model has one: an arc of the state h
                              back_off(h) + log p(w | h without its first word), otherwise

so a word is looked for in the arcs of h and of the contexts to which h backs off. These are stored
with the state, its levels; the empty context is the last one, and has a dense table. A step is a
fixed number of kernels and needs nothing from the host, so a search can capture it in a CUDA graph.

Classes are the words of the model that are symbols, `<unk>`, as which symbols that the model lacks
count, and `</s>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.fusion.ngram_files import BEGIN, END, UNKNOWN, Entry, Ngram, read_arpa
from pruned_rnnt.decode.search.states import Rows


class _Tables(NamedTuple):
    """The automaton.

    class_V: int64, class of each symbol.
    root_C, root_next_C: float32 and int64, scores after the empty context, and next states.
    levels_SL: int64, the state and those to which it backs off, longest first; a state without
        arcs where there are fewer.
    weight_SL: float32, sum of the back-off weights before each level.
    root_weight_S: float32, the same before the empty context.
    begin_S, count_S: int64, the arcs of each state.
    arc_class_A, arc_next_A: int64; arc_score_A: float32. D more arcs at the end belong to no state.
    """

    class_V: Tensor
    root_C: Tensor
    root_next_C: Tensor
    levels_SL: Tensor
    weight_SL: Tensor
    root_weight_S: Tensor
    begin_S: Tensor
    count_S: Tensor
    arc_class_A: Tensor
    arc_next_A: Tensor
    arc_score_A: Tensor


class NgramScorer:
    """A `TokenScorer` whose state is a context of the n-gram model.

    Args:
        model: ARPA file (also gzipped), whose words are the model's symbols; or n-grams by order.
        symbols: names of the symbols, by id.
        scale: factor of the log-probabilities.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not in ARPA format, or its words are not the model's symbols.
    """

    capturable = True

    def __init__(
        self, model: Path | Sequence[dict[Ngram, Entry]], symbols: Sequence[str], scale: float
    ) -> None:
        if isinstance(model, Path):
            if not model.is_file():
                raise FileNotFoundError(f"no n-gram model at {model}")
            orders: Sequence[dict[Ngram, Entry]] = read_arpa(model, symbols)
            known = orders[0].keys() - {(UNKNOWN,)}
            check_symbols(model, symbols, [(name,) in known for name in symbols])
        else:
            orders = model
        self._tables, self._start, self._most_arcs = _make_tables(orders, symbols, scale)

    def start(self, rows: int, device: torch.device) -> Rows:
        if self._tables.class_V.device != device:
            self._tables = _Tables(*(table.to(device) for table in self._tables))
        return (torch.full((rows,), self._start, device=device),)

    def scores(self, state: Rows) -> Tensor:
        return self._by_class(state[0])[:, self._tables.class_V]

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        (state_R,) = state
        tables = self._tables
        class_R = tables.class_V[symbols_R]
        arcs_RLD, exists_RLD = self._arcs(state_R)
        is_taken_RA = (
            exists_RLD & (tables.arc_class_A[arcs_RLD] == class_R[:, None, None])
        ).flatten(1)
        # Of several levels with an arc, the first one has the longest context.
        taken_R1 = is_taken_RA.int().argmax(dim=1, keepdim=True)
        arc_R = arcs_RLD.flatten(1).gather(1, taken_R1)[:, 0]
        has_arc_R = is_taken_RA.gather(1, taken_R1)[:, 0]
        return (torch.where(has_arc_R, tables.arc_next_A[arc_R], tables.root_next_C[class_R]),)

    def final(self, state: Rows) -> Tensor:
        return self._by_class(state[0])[:, -1]

    def _by_class(self, state_R: Tensor) -> Tensor:
        """(R, C): the score of each class after the states."""
        tables = self._tables
        arcs_RLD, exists_RLD = self._arcs(state_R)
        score_RLD = tables.arc_score_A[arcs_RLD] + tables.weight_SL[state_R].unsqueeze(-1)
        # Places that are no arcs write to a column of their own.
        column_RLD = torch.where(exists_RLD, tables.arc_class_A[arcs_RLD], len(tables.root_C))
        score_RC = tables.root_C + tables.root_weight_S[state_R][:, None]
        score_RC = torch.nn.functional.pad(score_RC, (0, 1))
        for level in range(score_RLD.size(1) - 1, -1, -1):
            score_RC = score_RC.scatter(1, column_RLD[:, level], score_RLD[:, level])
        return score_RC[:, :-1]

    def _arcs(self, state_R: Tensor) -> tuple[Tensor, Tensor]:
        """(R, L, D): the arcs of all levels of the states, and which of them exist."""
        tables = self._tables
        levels_RL = tables.levels_SL[state_R]
        offset_D = torch.arange(self._most_arcs, device=state_R.device)
        arcs_RLD = tables.begin_S[levels_RL].unsqueeze(-1) + offset_D
        return arcs_RLD, offset_D < tables.count_S[levels_RL].unsqueeze(-1)


def check_symbols(path: Path, symbols: Sequence[str], known: Sequence[bool]) -> None:
    """ValueError if an n-gram model has hardly any of the symbols: it is over other units.

    Even the right one lacks blank, sos/eos and `<unk>`.
    """
    if sum(known) >= 0.1 * len(known):
        return
    missing = [name for name, is_known in zip(symbols, known, strict=True) if not is_known]
    raise ValueError(
        f"{path} has {sum(known)} of {len(known)} symbols (it lacks, for example, "
        f"{missing[-1]!r}): train it on texts that are split into the model's symbols"
    )


def _make_tables(
    orders: Sequence[dict[Ngram, Entry]], symbols: Sequence[str], scale: float
) -> tuple[_Tables, int, int]:
    """The automaton, the state at the beginning of a text, and D."""
    ngrams = _with_prefixes(orders)
    words = [*dict.fromkeys(name for name in symbols if (name,) in ngrams), UNKNOWN, END]
    words = list(dict.fromkeys(words))
    words.append(words.pop(words.index(END)))
    class_of = {word: index for index, word in enumerate(words)}
    contexts = {ngram[:-1] for ngram in ngrams if len(ngram) > 1}
    # N-grams of the highest order have no back-off weights, except in a file whose higher orders
    # have become empty.
    states = sorted(ngram for ngram, entry in ngrams.items() if ngram in contexts or entry.back_off)
    longest = max(map(len, states), default=1)
    # The last state is the empty context; its arcs are the dense table.
    ids = {state: index for index, state in enumerate(states)}
    ids[()] = len(states)
    arcs: list[list[tuple[int, float, int]]] = [[] for _ in range(len(ids))]
    for ngram, entry in ngrams.items():
        if len(ngram) > 1 and ngram[-1] in class_of:
            following = ids[_longest_suffix(ngram, ids)]
            arcs[ids[ngram[:-1]]].append((class_of[ngram[-1]], scale * entry.log_prob, following))
    levels, weights, root_weights = _back_offs(states, ids, ngrams, longest, scale)
    for of_state in arcs:
        of_state.sort()
    count_S = torch.tensor([len(of_state) for of_state in arcs])
    most = max(int(count_S.max()), 1)
    flat = [arc for of_state in arcs for arc in of_state] + [(0, 0.0, 0)] * most
    arc_class_A, arc_score_A, arc_next_A = (
        torch.tensor(column) for column in zip(*flat, strict=True)
    )
    unknown = ngrams[UNKNOWN,]
    tables = _Tables(
        class_V=torch.tensor([class_of.get(name, class_of[UNKNOWN]) for name in symbols]),
        root_C=torch.tensor([scale * ngrams.get((word,), unknown).log_prob for word in words]),
        root_next_C=torch.tensor([ids.get((word,), ids[()]) for word in words]),
        levels_SL=torch.tensor(levels),
        weight_SL=torch.tensor(weights),
        root_weight_S=torch.tensor(root_weights),
        begin_S=count_S.cumsum(0) - count_S,
        count_S=count_S,
        arc_class_A=arc_class_A,
        arc_next_A=arc_next_A,
        arc_score_A=arc_score_A.float(),
    )
    return tables, ids.get((BEGIN,), ids[()]), most


def _with_prefixes(orders: Sequence[dict[Ngram, Entry]]) -> dict[Ngram, Entry]:
    """All n-grams, and those that are only the beginning of longer ones, with backed-off scores."""
    ngrams: dict[Ngram, Entry] = {}
    missing = [
        {ngram[: length + 1] for longer in orders[length + 1 :] for ngram in longer}
        - entries.keys()
        for length, entries in enumerate(orders)
    ]
    for entries, prefixes in zip(orders, missing, strict=True):
        ngrams |= entries
        for prefix in prefixes:
            ngrams[prefix] = Entry(_backed_off(prefix, ngrams), 0.0)
    return ngrams


def _backed_off(ngram: Ngram, ngrams: Mapping[Ngram, Entry]) -> float:
    """The score of the last word of an n-gram that is not in the model."""
    if len(ngram) == 1:
        return ngrams[UNKNOWN,].log_prob
    context, shorter = ngram[:-1], ngram[1:]
    weight = ngrams[context].back_off if context in ngrams else 0.0
    return weight + (
        ngrams[shorter].log_prob if shorter in ngrams else _backed_off(shorter, ngrams)
    )


def _longest_suffix(ngram: Ngram, ids: Mapping[Ngram, int]) -> Ngram:
    """The longest end of an n-gram that is a state; it may be the n-gram itself."""
    while ngram not in ids:
        ngram = ngram[1:]
    return ngram


def _back_offs(
    states: Sequence[Ngram],
    ids: Mapping[Ngram, int],
    ngrams: Mapping[Ngram, Entry],
    most_levels: int,
    scale: float,
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Levels, their weights, and the weight of the empty context, of all states and that one."""
    levels, weights, root_weights = [], [], []
    for state in (*states, ()):
        of_state: list[int] = []
        before: list[float] = []
        total = 0.0
        while state:
            of_state.append(ids[state])
            before.append(total)
            total += scale * ngrams[state].back_off
            state = _longest_suffix(state[1:], ids)
        padding = most_levels - len(of_state)
        levels.append(of_state + [ids[()]] * padding)
        weights.append(before + [total] * padding)
        root_weights.append(total)
    return levels, weights, root_weights
