"""Beams on the CPU: sequences and contexts as numbers in Python, to do only what a frame needs.

In most frames few hypotheses emit a symbol. Contexts of a stateless predictor occur again and
again, in other hypotheses and later frames; each is computed once per batch.

Axes: R = N * B rows of a beam, C context size, D joiner width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.model.transducer_model import TransducerModel

Context = tuple[int, ...]


class HostBeam:
    """The sequences of the rows of a beam.

    Attributes:
        sequences: for each row, a number that equal sequences of an utterance share.
        lengths: symbols of each row.
    """

    def __init__(self, model: TransducerModel, batch: int, beam: int) -> None:
        self._model = model
        self._beam = beam
        self._blank = model.predictor.blank
        self.sequences = [n for n in range(batch) for _ in range(beam)]
        self.lengths = [0] * (batch * beam)
        self._after: dict[tuple[int, int], int] = {}
        output_RP, (context_RC,) = model.predictor.start(1, torch.device("cpu"))
        start: Context = tuple(context_RC[0].tolist())
        self._contexts = [start] * (batch * beam)
        self._places: dict[Context, int] = {start: 0}
        self._table: Tensor = model.joiner.decoder_proj(output_RP)
        self._chosen = [0] * (batch * beam)

    @property
    def predicted_RD(self) -> Tensor:
        """(R, D): the projected output of the predictor after each sequence."""
        return self._table[torch.tensor(self._chosen)]

    def grow(self, parents: Sequence[int], symbols: Sequence[int]) -> bool:
        """Take these rows and append their symbols; False if all rows stay as they are."""
        blank, batch = self._blank, len(self.sequences) // self._beam
        emits = [symbol != blank for symbol in symbols]
        if not any(emits) and list(parents) == list(range(len(parents))):
            return False
        self.lengths = [
            self.lengths[parent] + emit for parent, emit in zip(parents, emits, strict=True)
        ]
        sequences, contexts = [], []
        for parent, symbol in zip(parents, symbols, strict=True):
            sequence, context = self.sequences[parent], self._contexts[parent]
            if symbol != blank:
                key = (sequence, symbol)
                sequence = self._after.setdefault(key, batch + len(self._after))
                context = (*context[1:], symbol)
            sequences.append(sequence)
            contexts.append(context)
        self.sequences, self._contexts = sequences, contexts
        self._compute([each for each in dict.fromkeys(contexts) if each not in self._places])
        self._chosen = [self._places[context] for context in contexts]
        return True

    def _compute(self, contexts: Sequence[Context]) -> None:
        """Add rows for new contexts to the table."""
        if not contexts:
            return
        context_AC = torch.tensor(contexts)
        # A step drops the first symbol of the old context and appends the new one.
        before_AC = context_AC.roll(1, dims=1)
        output_AP, _ = self._model.predictor.step(context_AC[:, -1], (before_AC,))
        for context in contexts:
            self._places[context] = len(self._places)
        self._table = torch.cat((self._table, self._model.joiner.decoder_proj(output_AP)))

    def merged(self, scores: Sequence[float]) -> list[float] | None:
        """As `merge_equal`, of the scores of all rows; None if no sequences are equal."""
        found: list[float] = []
        changed = False
        for row in range(0, len(scores), self._beam):
            totals: dict[int, list[float]] = {}
            for sequence, score in zip(
                self.sequences[row : row + self._beam], scores[row:], strict=False
            ):
                if sequence in totals:
                    totals[sequence].append(score)
                    found.append(-math.inf)
                    changed = True
                else:
                    totals[sequence] = [score]
                    found.append(0.0)
            sums = iter(totals.values())
            for place in range(row, row + self._beam):
                if found[place] == 0.0:
                    found[place] = _log_sum(next(sums))
        return found if changed else None


def _log_sum(scores: Sequence[float]) -> float:
    """Logarithm of the sum of the exponentials."""
    highest = max(scores)
    if len(scores) == 1 or highest == -math.inf:
        return highest
    return highest + math.log(math.fsum(math.exp(score - highest) for score in scores))
