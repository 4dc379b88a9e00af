"""The vocabulary of a fine-tuned model: choose it, match its symbols with those of the source, and
move the parameters of the source to it.

Parameters with a row for each symbol are matched by the text of the symbols: rows of symbols that
both vocabularies have are copied, others are random. All other parameters are copied.

Axes: V vocabulary, D width of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import extended_tokenizer
from pruned_rnnt.model.speech_model import SpeechModel

logger = logging.getLogger(__name__)

# Modules whose parameters have a row for each symbol.
_EMBEDDING = "predictor.embedding."
_BY_SYMBOL = (
    _EMBEDDING,
    "joiner.output_linear.",
    "pruned_loss.joiner.output_linear.",
    "pruned_loss.simple_am_proj.",
    "pruned_loss.simple_lm_proj.",
    "ctc_head.",
)
# Blank, start and unknown: their rows are not typical of ordinary symbols.
_SPECIAL_SYMBOLS = 3
# More unknown symbols than this are an error, fewer a warning.
_MOST_UNKNOWN = 0.01
_SHOWN = 12


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


def check_added_are_trained(
    model: nn.Module, change: VocabularyChange, patterns: Sequence[str]
) -> None:
    """Raise an error if output weights with random rows for added symbols are frozen.

    Args:
        patterns: of `finetune.freeze`, for the message.

    Raises:
        ConfigError: a weight is frozen; the message names it. Biases may be frozen, and the
            predictor's embedding: random vectors tell symbols apart, too.
    """
    if not change.added:
        return
    for name, parameter in model.named_parameters():
        is_output = name.startswith(_BY_SYMBOL) and not name.startswith(_EMBEDDING)
        if is_output and parameter.dim() > 1 and not parameter.requires_grad:
            raise ConfigError(
                f"finetune.freeze=[{','.join(patterns)}] freezes {name}, whose rows for the "
                f"{len(change.added)} added symbols{_examples(change.added)} are random and would "
                "stay so: freeze other parts, or set finetune.vocabulary=keep if the texts can do "
                "without these symbols"
            )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The vocabulary of the new model; how: keep, extend or replace."""

    tokenizer: Tokenizer
    change: VocabularyChange
    how: str

    def describe(self) -> str:
        """A line for the log."""
        change = self.change
        verb = {"keep": "kept", "extend": "extended", "replace": "replaced"}[self.how]
        parts = [f"kept {change.kept} symbols"]
        parts += [
            f"{word} {len(symbols)}{_examples(symbols)}"
            for word, symbols in (("added", change.added), ("dropped", change.dropped))
        ]
        return f"vocabulary {verb}: {', '.join(parts)}"


def choose_vocabulary(
    how: str, source: Tokenizer, data: Tokenizer, texts: Sequence[str]
) -> Vocabulary:
    """The vocabulary for these texts.

    Args:
        how: as `FinetuneConfig.vocabulary`.
        source, data: tokenizers of the source and of the data.
        texts: some texts of the data.
    """
    if how == "auto":
        # A source without language tags was trained to do without them.
        has_new_languages = source.languages and data.languages.keys() - source.languages.keys()
        how = "extend" if has_new_languages or unknown_share(source, texts) > 0 else "keep"
    tokenizer = {
        "keep": lambda: source,
        "extend": lambda: extended_tokenizer(source, data),
        "replace": lambda: data,
    }[how]()
    change = match_vocabularies(source.symbols, tokenizer.symbols)
    hint = _case_hint(source, texts) if how != "replace" else ""
    if hint:
        logger.warning("%s", hint)
    return Vocabulary(tokenizer=tokenizer, change=change, how=how)


def check_coverage(vocabulary: Vocabulary, texts: Sequence[str], path: str) -> None:
    """Raise an error if many symbols of the texts are unknown, log a warning if some are.

    Args:
        path: folder of the texts, for the message.

    Raises:
        ConfigError: more than 1% of the symbols are unknown.
    """
    share = unknown_share(vocabulary.tokenizer, texts)
    if share == 0:
        return
    missing = sorted({part for text in texts for part in vocabulary.tokenizer.unknown_parts(text)})
    message = f"{share:.1%} of the symbols of the texts in {path} are unknown{_examples(missing)}"
    if share <= _MOST_UNKNOWN:
        logger.warning("%s", message)
        return
    advice = {
        "keep": "set finetune.vocabulary=extend or replace",
        "extend": "the tokenizer of the data does not fit that of the source: prepare the data "
        "with the same kind of --tokens, or set finetune.vocabulary=replace",
        "replace": "set finetune.vocabulary=extend",
    }[vocabulary.how]
    raise ConfigError(f"finetune.vocabulary={vocabulary.how}: {message}; {advice}")


def unknown_share(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Fraction of the symbols of the texts that are `<unk>`."""
    ids = [index for text in texts for index in tokenizer.encode(text)]
    return ids.count(UNKNOWN_ID) / max(len(ids), 1)


def _case_hint(source: Tokenizer, texts: Sequence[str]) -> str:
    """Advice if the source would cover the texts in the other case of letters."""
    if unknown_share(source, texts) <= _MOST_UNKNOWN:
        return ""
    for case in ("upper", "lower"):
        if unknown_share(source, [getattr(text, case)() for text in texts]) == 0:
            return (
                f"the symbols of the source cover the texts in {case} case: prepare the data with "
                f"--case {case} to use what it has learned"
            )
    return ""


def _examples(symbols: Sequence[str]) -> str:
    if not symbols:
        return ""
    more = ", ..." if len(symbols) > _SHOWN else ""
    return f" ({', '.join(symbols[:_SHOWN])}{more})"
