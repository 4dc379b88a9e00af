"""An n-gram language model over symbols in kenlm's binary format, by kenlm.

Axes: R rows, S contexts seen so far, V vocabulary.

kenlm computes scores on the CPU, one symbol at a time. The same contexts occur many times, so the
scores of all symbols after a context are computed once and stored in a table on the search's
device. Each frame then needs one copy to the CPU: the symbols that the hypotheses emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.decode.fusion.ngram import check_symbols
from pruned_rnnt.decode.search.rows import Rows
from pruned_rnnt.system.optional_packages import require

# Table entries (4 bytes each) that are kept from one batch to the next.
_MAX_ENTRIES = 100_000_000
_LN_10 = math.log(10.0)
# How such files begin.
_BINARY = b"mmap lm http://kheafield.com/code"


def is_kenlm_binary(path: Path) -> bool:
    """True for a file that only kenlm can read."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BINARY)) == _BINARY


class KenlmScorer:
    """A `TokenScorer` whose state is a context of the n-gram model.

    Args:
        path: kenlm binary; its words are the model's symbols.
        symbols: names of the symbols, by id.
        scale: factor of the log-probabilities.

    Raises:
        FileNotFoundError: `path` does not exist.
        MissingPackageError: kenlm is not installed.
        ValueError: kenlm cannot read the file, or its words are not the model's symbols.
    """

    _table_SV: Tensor

    capturable = False

    def __init__(self, path: Path, symbols: Sequence[str], scale: float) -> None:
        require("kenlm")
        import kenlm

        if not path.is_file():
            raise FileNotFoundError(f"no n-gram model at {path}")
        try:
            config = kenlm.Config()
            config.show_progress = False
            self._model = kenlm.Model(str(path), config)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"kenlm cannot read {path}: {error}") from error
        check_symbols(path, symbols, [symbol in self._model for symbol in symbols])
        self._symbols = list(symbols)
        self._scale = scale
        self._new_state = kenlm.State
        self._reset()

    def start(self, rows: int, device: torch.device) -> Rows:
        if self._table_SV.numel() > _MAX_ENTRIES:
            self._reset()
        self._table_SV = self._table_SV.to(device)
        begin = self._new_state()
        self._model.BeginSentenceWrite(begin)
        first = self._context(begin)
        self._fill()
        return (torch.full((rows,), first, device=device),)

    def scores(self, state: Rows) -> Tensor:
        (context_R,) = state
        return self._table_SV[context_R]

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        (context_R,) = state
        rows = torch.stack((context_R, symbols_R, emits_R.long()), dim=1).tolist()
        grown = [
            self._after(context, symbol) if emits else context for context, symbol, emits in rows
        ]
        self._fill()
        return (torch.tensor(grown, device=context_R.device),)

    def final(self, state: Rows) -> Tensor:
        (context_R,) = state
        scratch = self._new_state()
        ends = {
            context: self._scale
            * _LN_10
            * self._model.BaseScore(self._contexts[context], "</s>", scratch)
            for context in set(context_R.tolist())
        }
        return torch.tensor([ends[context] for context in context_R.tolist()]).to(context_R.device)

    def _reset(self) -> None:
        self._contexts: list[Any] = []
        self._ids: dict[Any, int] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._table_SV = torch.zeros(0, len(self._symbols))
        self._filled = 0

    def _after(self, context: int, symbol: int) -> int:
        key = (context, symbol)
        if key not in self._next:
            after = self._new_state()
            self._model.BaseScore(self._contexts[context], self._symbols[symbol], after)
            self._next[key] = self._context(after)
        return self._next[key]

    def _context(self, state: Any) -> int:
        if state not in self._ids:
            self._ids[state] = len(self._contexts)
            self._contexts.append(state)
        return self._ids[state]

    def _fill(self) -> None:
        """Compute the table's rows for new contexts; a full table doubles its capacity."""
        if self._filled == len(self._contexts):
            return
        missing = len(self._contexts) - len(self._table_SV)
        if missing > 0:
            room_SV = self._table_SV.new_zeros(missing + len(self._contexts), len(self._symbols))
            self._table_SV = torch.cat((self._table_SV, room_SV))
        scratch, factor = self._new_state(), self._scale * _LN_10
        rows = [
            [factor * self._model.BaseScore(context, symbol, scratch) for symbol in self._symbols]
            for context in self._contexts[self._filled :]
        ]
        self._table_SV[self._filled : len(self._contexts)] = torch.tensor(rows)
        self._filled = len(self._contexts)
