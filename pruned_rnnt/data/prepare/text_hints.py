"""Hints about the texts of a new corpus, with the options of `prepare` to change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pruned_rnnt.data.tokens.punctuation import is_punctuation
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import DEFAULT_VOCAB_SIZE, TokenizerConfig

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


def token_hints(tokenizer: Tokenizer, config: TokenizerConfig, characters: int) -> list[str]:
    """A hint if the tokenizer has fewer tokens than requested, or more than by default.

    characters: the number of different ones in the training texts.
    """
    wanted = config.vocab_size or DEFAULT_VOCAB_SIZE
    if config.kind not in ("bpe", "unigram"):
        return []
    if len(tokenizer) > wanted and not config.byte_fallback:
        return [
            f"texts have {characters:,} different characters, so --tokens {config.kind} has "
            f"{len(tokenizer):,} tokens, not {wanted}. --tokens char has one for each character; "
            "--byte-fallback with a smaller --vocab-size writes rare characters as bytes"
        ]
    if len(tokenizer) >= wanted:
        return []
    return [
        f"--tokens {config.kind} found {len(tokenizer)} tokens, not the {wanted} of "
        "--vocab-size, because the texts have no more pieces. Many of them are whole words with "
        "few examples; a smaller --vocab-size, or --tokens char, gives more examples per token"
    ]


def unknown_hints(unknown: Mapping[str, Counter[str]]) -> list[str]:
    """A hint for each split with characters that have no token.

    unknown: counts of these characters, by split.
    """
    return [
        f"{split} has {len(counts):,} character{'s' * (len(counts) > 1)} without a token "
        f"({shown_counts(counts)}), {counts.total():,} in all, each of which counts as an error; "
        "--byte-fallback gives every character a spelling"
        for split, counts in unknown.items()
    ]


def shown_counts(counts: Counter[str]) -> str:
    """The most frequent ones, as in "a 12, b 3, ..."."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    shown = [f"{name} {count:,}" for name, count in most]
    return ", ".join([*shown, *(["..."] if len(counts) > _SHOWN else [])])
