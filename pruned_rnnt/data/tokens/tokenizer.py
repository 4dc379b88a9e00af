"""Converts text to symbol ids and back with a SentencePiece model, for all kinds of symbols.

Ids 0, 1 and 2 are `<blk>`, `<sos/eos>` and `<unk>` in every tokenizer, so the blank of the
losses is 0 and the first real symbol is 3. Blank and sos/eos are control symbols; no text
encodes to them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import sentencepiece

BLANK_SYMBOL = "<blk>"
SOS_EOS_SYMBOL = "<sos/eos>"
UNKNOWN_SYMBOL = "<unk>"
BLANK_ID = 0
SOS_EOS_ID = 1
UNKNOWN_ID = 2

# A call for many sequences starts a thread, which takes as long as so many single calls.
_LEAST_TOGETHER = 64
TOKENIZER_KINDS = ("unigram", "bpe", "char", "word")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How to train a tokenizer.

    kind: "unigram" or "bpe" (pieces of words), "char" (single characters) or "word".
    vocab_size: largest number of symbols, including the three special ones; a small text may have
        fewer pieces. "char" and "word" use all characters or words of the text.
    """

    kind: Literal["unigram", "bpe", "char", "word"] = "unigram"
    vocab_size: int = 500


class Tokenizer:
    """A trained SentencePiece model with the special symbols of this package; can be pickled."""

    def __init__(self, model: bytes) -> None:
        """`model`: a serialised SentencePiece model whose ids 0, 1, 2 are the special symbols."""
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        self._size = int(self._processor.get_piece_size())
        special = [self._processor.id_to_piece(i) for i in range(min(3, len(self)))]
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
            raise FileNotFoundError(f"no tokenizer at {path}; run `pruned-rnnt prepare` first")
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

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; pieces that are not in the vocabulary become `<unk>` (id 2)."""
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def unknown_parts(self, text: str) -> list[str]:
        """The words or characters of `text` that become `<unk>`."""
        parts = self._processor.encode(text, out_type=str)
        unknown = [p for p, i in zip(parts, self.encode(text), strict=True) if i == UNKNOWN_ID]
        # A part may be several unknown words.
        return [word for part in unknown for word in part.split("\u2581") if word]

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
        return [" ".join(str(text).split()) for text in texts]


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains on `texts` in memory; the same texts in the same order give the same model.

    Raises ValueError if there is no text, the kind is unknown, or `vocab_size` is too small for the
    characters of the text.
    """
    if config.kind not in TOKENIZER_KINDS:
        raise ValueError(f"tokenizer kind must be one of {TOKENIZER_KINDS}, got {config.kind!r}")
    lines = [text for text in texts if text.strip()]
    if not lines:
        raise ValueError("train_tokenizer needs at least one text that is not empty, got none")
    try:
        return _train(lines, config.kind, config.vocab_size)
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if needed is None:
            raise
        raise ValueError(
            f"vocab_size must be at least {needed.group(1)} (the characters of the text and three "
            f"special symbols), got {config.vocab_size}"
        ) from error


def _train(lines: list[str], kind: str, vocab_size: int) -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        use_all_vocab=kind in ("char", "word"),
        character_coverage=1.0,
        control_symbols=[BLANK_SYMBOL, SOS_EOS_SYMBOL],
        unk_id=UNKNOWN_ID,
        unk_piece=UNKNOWN_SYMBOL,
        unk_surface=f" {UNKNOWN_SYMBOL} ",
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return Tokenizer(model.getvalue())
