"""Extends a tokenizer by the symbols of another one."""

from __future__ import annotations

from typing import Any

from sentencepiece import sentencepiece_model_pb2

from pruned_rnnt.data.tokens.tokenizer import Tokenizer

# protobuf creates the classes of this module at import, so type checkers do not see them.
proto: Any = sentencepiece_model_pb2

_WORD_START = "▁"


def extended_tokenizer(tokenizer: Tokenizer, more: Tokenizer) -> Tokenizer:
    """`tokenizer` with the symbols of `more` that it lacks, after its own, which keep their ids.

    It splits texts as `tokenizer` does: one of characters gets only the single characters of
    `more`, and one of words only its symbols that start a word.
    """
    model, other = (_parsed(each) for each in (tokenizer, more))
    kinds, kind = proto.TrainerSpec, model.trainer_spec.model_type
    ordinary = proto.ModelProto.SentencePiece.NORMAL
    known = {piece.piece for piece in model.pieces}
    scores = [piece.score for piece in model.pieces if piece.type == ordinary]
    lowest = min(scores, default=0.0)
    comparable = (
        kind == kinds.UNIGRAM
        and other.trainer_spec.model_type == kinds.UNIGRAM
        and len(set(scores)) > 1
    )
    for piece in other.pieces:
        text = piece.piece
        usable = (
            len(text) == 1
            if kind == kinds.CHAR
            else text.startswith(_WORD_START)
            if kind == kinds.WORD
            else True
        )
        if piece.type != ordinary or text in known or not usable:
            continue
        if kind == kinds.BPE:
            lowest -= 1.0  # BPE merges pairs in the order of the scores
        score = piece.score if comparable else lowest
        model.pieces.add(piece=text, score=score, type=ordinary)
    model.trainer_spec.vocab_size = len(model.pieces)
    return Tokenizer(model.SerializeToString())


def _parsed(tokenizer: Tokenizer) -> Any:
    model = proto.ModelProto()
    model.ParseFromString(tokenizer.model)
    return model
