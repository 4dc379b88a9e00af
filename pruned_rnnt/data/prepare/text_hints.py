"""Hints about the texts of a new corpus, with the options of `prepare` that act on them."""

from __future__ import annotations

from collections import Counter

from pruned_rnnt.data.tokens.text_normalisation import TextConfig, is_punctuation
from pruned_rnnt.data.tokens.tokenizer import Tokenizer, TokenizerConfig

_SHOWN = 8


def text_hints(characters: Counter[str], config: TextConfig) -> list[str]:
    """A sentence for mixed case and one for punctuation, where `config` keeps them.

    characters: of the training texts as they were written, with their counts.
    """
    hints = []
    upper = sum(count for character, count in characters.items() if character.isupper())
    lower = sum(count for character, count in characters.items() if character.islower())
    if config.case == "keep" and upper and lower:
        hints.append(
            f"texts have upper-case ({upper:,}) and lower-case ({lower:,}) letters, which the "
            "model learns as different symbols: pass --case lower unless it is to write both"
        )
    marks = Counter({c: count for c, count in characters.items() if is_punctuation(c)})
    if config.punctuation == "keep" and marks:
        shown = " ".join(mark for mark, _ in marks.most_common(_SHOWN))
        more = f" and {len(marks) - _SHOWN} more kinds" if len(marks) > _SHOWN else ""
        hints.append(
            f"texts have punctuation ({shown}{more}; {marks.total():,} in all): pass --punctuation "
            "remove unless the model is to write it"
        )
    return hints


def token_hints(tokenizer: Tokenizer, config: TokenizerConfig) -> list[str]:
    """A sentence where training found fewer pieces than asked for."""
    if config.kind not in ("bpe", "unigram") or len(tokenizer) >= config.vocab_size:
        return []
    return [
        f"--tokens {config.kind} found {len(tokenizer)} tokens, not the {config.vocab_size} of "
        "--vocab-size: the texts have no more pieces. Many of these are whole words with few "
        "examples each; a smaller --vocab-size, or --tokens char, gives the model more of each"
    ]
