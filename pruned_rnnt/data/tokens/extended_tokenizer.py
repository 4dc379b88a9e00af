"""Extends a tokenizer by the symbols of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from pruned_rnnt.data.tokens.tokenizer import WORD_START, Tokenizer

# protobuf creates the classes of this module at import, so type checkers do not see them.
proto: Any = sentencepiece_model_pb2


def extended_tokenizer(tokenizer: Tokenizer, more: Tokenizer) -> Tokenizer:
    """`tokenizer` with the symbols of `more` that it lacks, after its own, which keep their ids.

    It splits and normalises texts as `tokenizer` does: one of characters gets only the single
    characters of `more`, and one of words only its symbols that start a word.
    """
    model, other = (_parsed(each) for each in (tokenizer, more))
    kinds, kind = proto.TrainerSpec, model.trainer_spec.model_type
    ordinary, control = (getattr(proto.ModelProto.SentencePiece, n) for n in ("NORMAL", "CONTROL"))
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


def with_language_tags(tokenizer: Tokenizer, languages: Sequence[str]) -> Tokenizer:
    """`tokenizer` with a control symbol for each language after its own symbols.

    They come last because sherpa-onnx needs the symbols of bytes directly after the special ones.
    """
    if not languages:
        return tokenizer
    model = _parsed(tokenizer)
    for language in sorted(set(languages)):
        kind = proto.ModelProto.SentencePiece.CONTROL
        model.pieces.add(piece=f"<|{language}|>", score=0.0, type=kind)
    model.trainer_spec.vocab_size = len(model.pieces)
    return Tokenizer(model.SerializeToString())


def _parsed(tokenizer: Tokenizer) -> Any:
    model = proto.ModelProto()
    model.ParseFromString(tokenizer.model)
    return model
