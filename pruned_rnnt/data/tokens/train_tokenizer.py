"""Trains SentencePiece models on texts, and extends them by the symbols of others and of languages.

Texts are trained on in normal form, and SentencePiece's own normalisation is off, so that a text
that is encoded and decoded is the same text.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from pruned_rnnt.data.tokens.text_normalisation import normal_form
from pruned_rnnt.data.tokens.tokenizer import (
    BLANK_SYMBOL,
    SOS_EOS_SYMBOL,
    UNKNOWN_ID,
    UNKNOWN_SYMBOL,
    WORD_START,
    Tokenizer,
)

TOKENIZER_KINDS = ("unigram", "bpe", "char", "word")
DEFAULT_VOCAB_SIZE = 500
# By default there are at least so many symbols beyond the characters of the text.
_LEAST_PIECES = 250
_SPECIAL, _BYTES = 3, 256
# With byte fallback, characters that occur less often get no symbol.
_RARE_BELOW = 5
# protobuf creates the classes of this module at import, so type checkers do not see them.
_proto: Any = sentencepiece_model_pb2


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How to train a tokenizer.

    kind: "unigram" or "bpe" (pieces of words), "char" (single characters) or "word".
    vocab_size: largest number of symbols, including the special ones, bytes and language tags; a
        small text may have fewer pieces. None: 500, or 250 more than the characters and special
        symbols if these are many; bytes and tags come on top.
        "char" and "word" use all characters or words of the text.
    byte_fallback: write rare characters, and those that the text does not have, as the symbols of
        their UTF-8 bytes, of which there are 256. Not for "word".
    languages: codes of the languages that get a tag.
    """

    kind: Literal["unigram", "bpe", "char", "word"] = "unigram"
    vocab_size: int | None = None
    byte_fallback: bool = False
    languages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least, note = _SPECIAL + len(set(self.languages)), ""
        if self.byte_fallback and self.kind != "char":
            least, note = least + _BYTES + 2, " with byte_fallback"
        if self.vocab_size is not None and self.vocab_size < least:
            raise ValueError(f"vocab_size must be at least {least}{note}, got {self.vocab_size}")


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains on `texts` in memory; the same texts in the same order give the same model.

    Raises ValueError if there is no text, the kind is unknown or has no byte fallback, or
    `vocab_size` is too small for the characters of the text.
    """
    if config.kind not in TOKENIZER_KINDS:
        raise ValueError(f"tokenizer kind must be one of {TOKENIZER_KINDS}, got {config.kind!r}")
    if config.byte_fallback and config.kind == "word":
        raise ValueError("byte_fallback needs the kind unigram, bpe or char, got 'word'")
    lines = [text for text in map(normal_form, texts) if text]
    if not lines:
        raise ValueError("train_tokenizer needs at least one text that is not empty, got none")
    others = _SPECIAL + (_BYTES if config.byte_fallback else 0)
    tags = len(set(config.languages))
    vocab_size = None if config.vocab_size is None else config.vocab_size - tags
    if config.byte_fallback:
        most = None if vocab_size is None else vocab_size - others
        lines = _without_rare_characters(lines, config, most)
    if vocab_size is None:
        pieces = max(DEFAULT_VOCAB_SIZE - _SPECIAL, len(set("".join(lines))) + _LEAST_PIECES)
        vocab_size = others + pieces
    try:
        tokenizer = _train(lines, config, vocab_size)
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if needed is None:
            raise
        raise ValueError(
            f"vocab_size must be at least {int(needed.group(1)) + tags} (the characters of the "
            f"text and the special symbols), got {config.vocab_size}"
        ) from error
    return _with_language_tags(tokenizer, config.languages)


def _without_rare_characters(
    lines: list[str], config: TokenizerConfig, pieces: int | None
) -> list[str]:
    """The lines with spaces for the characters that become bytes.

    pieces: number of symbols that are neither special nor bytes, of which characters take at most
        half; None without a bound.
    """
    counts = Counter("".join(lines))
    del counts[" "]
    frequent = [character for character, count in counts.most_common() if count >= _RARE_BELOW]
    if pieces is not None and config.kind != "char":
        frequent = frequent[: pieces // 2]
    # SentencePiece needs one character.
    frequent = frequent or [counts.most_common(1)[0][0]]
    rare = str.maketrans(dict.fromkeys(counts.keys() - set(frequent), " "))
    return [line for line in (line.translate(rare) for line in lines) if line.strip()]


def _train(lines: list[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=config.kind,
        vocab_size=vocab_size,
        byte_fallback=config.byte_fallback,
        hard_vocab_limit=False,
        use_all_vocab=config.kind in ("char", "word"),
        normalization_rule_name="identity",
        character_coverage=1.0,
        control_symbols=[BLANK_SYMBOL, SOS_EOS_SYMBOL],
        unk_id=UNKNOWN_ID,
        unk_piece=UNKNOWN_SYMBOL,
        unk_surface=f" {UNKNOWN_SYMBOL} ",
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        # SentencePiece leaves out longer lines; its default is 4192 bytes.
        max_sentence_length=max(4192, max(len(line.encode()) for line in lines)),
        minloglevel=2,
    )
    return Tokenizer(model.getvalue())


def extended_tokenizer(tokenizer: Tokenizer, more: Tokenizer) -> Tokenizer:
    """`tokenizer` with the symbols of `more` that it lacks, after its own, which keep their ids.

    It splits and normalises texts as `tokenizer` does: one of characters gets only the single
    characters of `more`, and one of words only its symbols that start a word.
    """
    model, other = (_parsed(each) for each in (tokenizer, more))
    kinds, kind = _proto.TrainerSpec, model.trainer_spec.model_type
    ordinary, control = (getattr(_proto.ModelProto.SentencePiece, n) for n in ("NORMAL", "CONTROL"))
    known = {piece.piece for piece in model.pieces}
    scores = [piece.score for piece in model.pieces if piece.type == ordinary]
    lowest = min(scores, default=0.0)
    comparable = (
        kind == kinds.UNIGRAM
        and other.trainer_spec.model_type == kinds.UNIGRAM
        and len(set(scores)) > 1
    )
    for piece in other.pieces:
        if piece.type == control and piece.piece not in known:  # a language tag
            model.pieces.add(piece=piece.piece, score=0.0, type=control)
        if piece.type != ordinary:
            continue
        for text in _in_spelling_of(tokenizer, piece.piece, kind == kinds.CHAR):
            if text in known or (kind == kinds.WORD and not text.startswith(WORD_START)):
                continue
            known.add(text)
            if kind == kinds.BPE:
                lowest -= 1.0  # BPE merges pairs in the order of the scores
            score = piece.score if comparable else lowest
            model.pieces.add(piece=text, score=score, type=ordinary)
    model.trainer_spec.vocab_size = len(model.pieces)
    return Tokenizer(model.SerializeToString())


def _in_spelling_of(tokenizer: Tokenizer, piece: str, by_character: bool) -> list[str]:
    """The symbols that `tokenizer` needs to write a symbol; none if it cannot get them."""
    rest = piece.lstrip(WORD_START)
    spelled = tokenizer.normalise(rest) if tokenizer.has_own_rules else rest
    spelled = piece[: len(piece) - len(rest)] + spelled.replace(" ", WORD_START)
    if not by_character:
        return [spelled]
    return list(spelled) if len(piece) == 1 else []


def _with_language_tags(tokenizer: Tokenizer, languages: Sequence[str]) -> Tokenizer:
    """`tokenizer` with a control symbol for each language after its own symbols.

    They come last because sherpa-onnx needs the symbols of bytes directly after the special ones.
    """
    if not languages:
        return tokenizer
    model = _parsed(tokenizer)
    for language in sorted(set(languages)):
        kind = _proto.ModelProto.SentencePiece.CONTROL
        model.pieces.add(piece=f"<|{language}|>", score=0.0, type=kind)
    model.trainer_spec.vocab_size = len(model.pieces)
    return Tokenizer(model.SerializeToString())


def _parsed(tokenizer: Tokenizer) -> Any:
    model = _proto.ModelProto()
    model.ParseFromString(tokenizer.model)
    return model
