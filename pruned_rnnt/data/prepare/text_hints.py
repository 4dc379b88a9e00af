"""Hints about the texts of a new corpus, with the options of `prepare` to change them."""

from __future__ import annotations

from collections import Counter

from pruned_rnnt.data.tokens.text_normalisation import TextConfig, is_punctuation
from pruned_rnnt.data.tokens.tokenizer import Tokenizer, TokenizerConfig

_SHOWN = 8


def text_hints(characters: Counter[str], config: TextConfig) -> list[str]:
    """Hints about mixed case and about punctuation, if `config` keeps them.

    characters: counts of the characters in the normalised training texts.
    """
    hints = []
    upper = sum(count for character, count in characters.items() if character.isupper())
    lower = sum(count for character, count in characters.items() if character.islower())
    if config.case == "keep" and upper and lower:
        hints.append(
            f"texts have upper-case ({upper:,}) and lower-case ({lower:,}) letters, which the "
            "model learns as different symbols; pass --case lower unless it should write both"
        )
    marks = Counter({c: count for c, count in characters.items() if is_punctuation(c)})
    if config.punctuation == "keep" and marks:
        shown = " ".join(mark for mark, _ in marks.most_common(_SHOWN))
        more = f" and {len(marks) - _SHOWN} more kinds" if len(marks) > _SHOWN else ""
        hints.append(
            f"texts have punctuation ({shown}{more}; {marks.total():,} in all); pass --punctuation "
            "remove unless the model should write it"
        )
    return hints


def token_hints(tokenizer: Tokenizer, config: TokenizerConfig) -> list[str]:
    """A hint if the tokenizer has fewer tokens than requested."""
    if config.kind not in ("bpe", "unigram") or len(tokenizer) >= config.vocab_size:
        return []
    return [
        f"--tokens {config.kind} found {len(tokenizer)} tokens, not the {config.vocab_size} of "
        "--vocab-size, because the texts have no more pieces. Many of them are whole words with "
        "few examples; a smaller --vocab-size, or --tokens char, gives more examples per token"
    ]
