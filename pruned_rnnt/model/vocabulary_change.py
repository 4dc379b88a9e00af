"""Move the parameters of a transducer to one with another vocabulary.

Parameters with a row for each symbol are matched by the text of the symbols: rows of symbols that
both vocabularies have are copied, others are random. All other parameters are copied.

Axes: V vocabulary, D width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruned_rnnt.model.speech_model import SpeechModel

# Modules whose parameters have a row for each symbol.
_BY_SYMBOL = (
    "predictor.embedding.",
    "joiner.output_linear.",
    "pruned_loss.joiner.output_linear.",
    "pruned_loss.simple_am_proj.",
    "pruned_loss.simple_lm_proj.",
    "ctc_head.",
)
# Blank, start and unknown: their rows are not typical of ordinary symbols.
_SPECIAL_SYMBOLS = 3


@dataclass(frozen=True, kw_only=True)
class VocabularyChange:
    """How the symbols of a new vocabulary correspond to those of an old one.

    rows: for each new symbol, its id in the old vocabulary, or None.
    added, dropped: symbols that only the new or the old vocabulary has.
    """

    rows: tuple[int | None, ...]
    added: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def kept(self) -> int:
        return len(self.rows) - len(self.added)


def match_vocabularies(old: Sequence[str], new: Sequence[str]) -> VocabularyChange:
    """Match symbols by their text."""
    ids = {symbol: index for index, symbol in enumerate(old)}
    present = set(new)
    return VocabularyChange(
        rows=tuple(ids.get(symbol) for symbol in new),
        added=tuple(symbol for symbol in new if symbol not in ids),
        dropped=tuple(symbol for symbol in old if symbol not in present),
    )


@torch.no_grad()
def transfer_parameters(
    source: SpeechModel, target: SpeechModel, change: VocabularyChange
) -> tuple[str, ...]:
    """Copy the parameters and buffers of a model into one of the same sizes.

    New rows of weights are drawn from the normal distribution that has, in each column, the mean
    and standard deviation of the source's ordinary symbols. New biases are the lowest of theirs,
    so that a new symbol starts as the least frequent one.

    Returns:
        Names of parameters and buffers that the source lacks; they keep their initial values.

    Raises:
        ValueError: a parameter differs in shape between the models; the message names it.
    """
    state, missing = source.state_dict(), []
    # A module that is registered twice has two names for one parameter, which is drawn once.
    drawn: dict[int, Tensor] = {}
    for name, value in target.state_dict(keep_vars=True).items():
        old = state.get(name)
        if old is None:
            missing.append(name)
        elif (
            old.shape[1 if name.startswith(_BY_SYMBOL) else 0 :]
            != value.shape[1 if name.startswith(_BY_SYMBOL) else 0 :]
        ):
            raise ValueError(
                f"{name} has the shape {tuple(old.shape)} in the source and {tuple(value.shape)} "
                "in the configured model"
            )
        elif name.startswith(_BY_SYMBOL):
            if id(value) not in drawn:
                drawn[id(value)] = _with_rows(old, value, change.rows)
                value.copy_(drawn[id(value)])
        else:
            value.copy_(old)
    return tuple(missing)


def _with_rows(old: Tensor, initial: Tensor, rows: Sequence[int | None]) -> Tensor:
    """Rows of `old` for kept symbols, random ones for others (`initial` if `old` is small)."""
    new = initial.detach().clone()
    ordinary = old[_SPECIAL_SYMBOLS:]
    if len(ordinary) > 1:
        if old.dim() == 1:
            new.fill_(float(ordinary.min()))
        else:
            spread_D, mean_D = torch.std_mean(ordinary, dim=0)
            new.copy_(mean_D + spread_D * torch.randn(new.shape).to(new))
    kept = [index for index, row in enumerate(rows) if row is not None]
    new[kept] = old[[row for row in rows if row is not None]].to(new)
    return new
