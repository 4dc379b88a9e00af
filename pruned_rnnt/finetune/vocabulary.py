"""Choose the vocabulary of a fine-tuned model, and describe how it differs from the source's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.tokens.extended_tokenizer import extended_tokenizer
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.model.vocabulary_change import VocabularyChange, match_vocabularies

logger = logging.getLogger(__name__)

# More unknown symbols than this are an error, fewer a warning.
_MOST_UNKNOWN = 0.01
_SHOWN = 12


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
        how = "extend" if unknown_share(source, texts) > 0 else "keep"
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
