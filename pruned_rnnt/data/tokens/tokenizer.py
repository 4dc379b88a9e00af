"""Converts text to symbol ids and back with a SentencePiece model, for all kinds of symbols.

Ids 0, 1 and 2 are `<blk>`, `<sos/eos>` and `<unk>` in every tokenizer, so the blank of the
losses is 0 and the first real symbol is 3. Blank, sos/eos and the language tags, which come last,
are control symbols; no text encodes to them, and no text that is decoded shows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece

from pruned_rnnt.data.tokens.text_normalisation import (
    JOINERS,
    joins_the_character_before,
    normal_form,
)

BLANK_SYMBOL = "<blk>"
SOS_EOS_SYMBOL = "<sos/eos>"
UNKNOWN_SYMBOL = "<unk>"
BLANK_ID = 0
SOS_EOS_ID = 1
UNKNOWN_ID = 2

# A call for many sequences starts a thread, which takes as long as so many single calls.
_LEAST_TOGETHER = 64
WORD_START = "\u2581"
# The name of the symbol of a byte, in hexadecimal digits.
BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
_LANGUAGE_TAG = re.compile(r"<\|([^<|>\s]+)\|>")
# NFKC, SentencePiece's default, rewrites the first and the second; without it both stay.
_PROBE = "\uff21\u0e33"


class Tokenizer:
    """A trained SentencePiece model with the special symbols of this package; can be pickled.

    It encodes texts in normal form. Models that normalise texts themselves (by SentencePiece's
    NFKC rules, as those of earlier versions and of other toolkits) keep their own rules.
    """

    def __init__(self, model: bytes) -> None:
        """`model`: a serialised SentencePiece model whose ids 0, 1, 2 are the special symbols."""
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        self._size = int(self._processor.get_piece_size())
        special = self.symbols[:3]  # all are read: a damaged one is no UTF-8
        wanted = [BLANK_SYMBOL, SOS_EOS_SYMBOL, UNKNOWN_SYMBOL]
        if special != wanted:
            raise ValueError(
                f"tokenizer model must have the symbols {wanted} at ids 0, 1, 2; got {special}"
            )

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Reads `folder`/tokens.model.

        Raises FileNotFoundError if it is missing; ValueError if it is damaged.
        """
        path = Path(folder) / "tokens.model"
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}: prepare the data with `pruned-rnnt prepare`; if this is "
                "a run or an export, copy it again with all of its files"
            )
        try:
            return cls(path.read_bytes())
        except (RuntimeError, ValueError) as error:  # SentencePiece raises the former
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path} is damaged or not a tokenizer ({reason})") from error

    def save(self, folder: Path | str) -> None:
        """Writes `folder`/tokens.model and `folder`/tokens.txt (`SYMBOL ID` lines).

        tokens.model is written last and atomically; if it exists, both files are complete.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lines = (f"{symbol} {index}\n" for index, symbol in enumerate(self.symbols))
        (folder / "tokens.txt").write_text("".join(lines), encoding="utf-8")
        unfinished = folder / ".tokens.model.tmp"
        unfinished.write_bytes(self._model)
        unfinished.replace(folder / "tokens.model")

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> bytes:
        return self._model

    def __setstate__(self, model: bytes) -> None:
        Tokenizer.__init__(self, model)

    @cached_property
    def symbols(self) -> list[str]:
        """All symbols, in the order of their ids; not to be changed."""
        return [self._processor.id_to_piece(i) for i in range(len(self))]

    @property
    def model(self) -> bytes:
        """The serialised SentencePiece model that `Tokenizer` takes."""
        return self._model

    @cached_property
    def languages(self) -> dict[str, int]:
        """The ids of the language tags, by language code; empty without tags."""
        found = ((_LANGUAGE_TAG.fullmatch(s), i) for i, s in enumerate(self.symbols))
        return {tag[1]: i for tag, i in found if tag is not None and self._processor.is_control(i)}

    @cached_property
    def has_bytes(self) -> bool:
        """Whether characters without a symbol become the symbols of their bytes, not `<unk>`."""
        return any(self._processor.is_byte(i) for i in range(len(self)))

    @cached_property
    def has_own_rules(self) -> bool:
        """Whether the model normalises texts by rules of SentencePiece."""
        return self._normalised_by_model(_PROBE) != _PROBE

    def normalise(self, text: str) -> str:
        """The text as the tokenizer spells it: what `decode` returns for the ids of `text`, if
        every part has a symbol. References need it before they are compared with hypotheses."""
        text = normal_form(text)
        if not self.has_own_rules:
            return text
        return self._normalised_by_model(text)

    def _normalised_by_model(self, text: str) -> str:
        return _single_spaces(self._processor.normalize(text).replace(WORD_START, " "))

    def encode(self, text: str, language: str = "") -> list[int]:
        """Ids of `text`; pieces that are not in the vocabulary become `<unk>` (id 2).

        language: the code whose tag comes first, if the tokenizer has one for it.
        """
        ids: list[int] = self._processor.encode(self.normalise(text), out_type=int)
        return [self.languages[language], *ids] if language in self.languages else ids

    def language_of(self, ids: Sequence[int]) -> str:
        """The code of the first language tag in `ids`; "" without one."""
        if not self.languages:
            return ""
        codes = {index: code for code, index in self.languages.items()}
        return next((codes[index] for index in ids if index in codes), "")

    @cached_property
    def has_whole_words(self) -> bool:
        """Whether each symbol is a word, so that a word without one is unknown as a whole."""
        ordinary = self.symbols[UNKNOWN_ID + 1 :]
        return all(
            symbol.startswith(WORD_START) or self._processor.is_control(index)
            for index, symbol in enumerate(ordinary, start=UNKNOWN_ID + 1)
        )

    def lacks(self, part: str) -> bool:
        """Whether a character or word of a text becomes `<unk>`, wholly or in part."""
        if part in JOINERS:  # has no normal form outside a word
            return not self.has_bytes and all(part not in name for name in self.symbols)
        return UNKNOWN_ID in self.encode(part)

    def pieces(self, text: str) -> list[str]:
        """What each of the ids of `encode(text)` stands for: names of symbols, and for `<unk>` the
        part of the text, which may be several words."""
        found: list[str] = self._processor.encode(self.normalise(text), out_type=str)
        return found

    def unknown_parts(self, text: str) -> list[str]:
        """The words or characters of `text` that become `<unk>`."""
        spelt = zip(self.pieces(text), self.encode(text), strict=True)
        unknown = [piece for piece, index in spelt if index == UNKNOWN_ID]
        # A part may be several unknown words.
        return [word for part in unknown for word in part.split(WORD_START) if word]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without blank and sos/eos; `<unk>` becomes the word `<unk>`."""
        (text,) = self.decode_all([ids])
        return text

    def decode_all(self, all_ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of many sequences, as `decode`, in a fraction of the time of single calls."""
        for ids in all_ids:
            if ids and not (min(ids) >= 0 and max(ids) < self._size):
                wrong = next(index for index in ids if not 0 <= index < self._size)
                raise ValueError(f"ids must lie in [0, {self._size}), got {wrong}")
        if len(all_ids) < _LEAST_TOGETHER:
            texts = [self._processor.decode(list(ids)) for ids in all_ids]
        else:
            texts = self._processor.decode([list(ids) for ids in all_ids], num_threads=1)
        # Symbols that are neighbours for the first time may be one character in normal form.
        spelling = _single_spaces if self.has_own_rules else normal_form
        return [spelling(text) for text in texts]

    def lasting(self, text: str) -> str:
        """The beginning of a decoded text that stays, whatever symbols follow."""
        text = text.rstrip("\ufffd")  # bytes of an incomplete character
        if not self._joins_characters:
            return text
        end = len(text)
        while end and joins_the_character_before(text[end - 1]):
            end -= 1
        return text[: max(end - 1, 0)]

    @cached_property
    def _joins_characters(self) -> bool:
        """Whether a symbol may become one character with the end of the symbol before."""
        if self.has_own_rules:
            return False
        return self.has_bytes or any(joins_the_character_before(name[:1]) for name in self.symbols)


def _single_spaces(text: str) -> str:
    return " ".join(text.split())
