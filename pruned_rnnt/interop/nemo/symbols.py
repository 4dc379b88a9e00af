"""Tokenizers of NeMo and transformers as one of this package, which has other special symbols.

Symbols there are pieces 0 .. V-1 and the blank, V. Here, blank, sos/eos and unknown come first, and
the others follow in their order.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sentencepiece import sentencepiece_model_pb2

from pruned_rnnt.data.tokens.tokenizer import (
    BLANK_SYMBOL,
    SOS_EOS_SYMBOL,
    UNKNOWN_ID,
    WORD_START,
    Tokenizer,
)

# protobuf creates the classes of this module at import, so type checkers do not see them.
proto: Any = sentencepiece_model_pb2

# The pieces of single bytes, of which characters without a piece consist.
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class Symbols(NamedTuple):
    """order: for each of our symbols, the id there; None for sos/eos, which they do not have."""

    tokenizer: Tokenizer
    order: list[int | None]


def symbols_of_sentencepiece(data: bytes) -> Symbols:
    """The symbols of a tokenizer.model.

    Raises:
        ValueError: it is not a SentencePiece model with an unknown symbol.
    """
    model = proto.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's own error types are not part of its interface
        raise ValueError("tokenizer.model is not a SentencePiece model") from error
    return _with_special_symbols(model)


def symbols_of_json(data: bytes) -> Symbols:
    """The symbols of a tokenizer.json with a BPE or unigram model.

    Raises:
        ValueError: another kind of tokenizer.
    """
    try:
        content = json.loads(data)
        model = content["model"]
        kind = model["type"]
        vocab = model["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"tokenizer.json is damaged: {error}") from error
    pieces: dict[int, tuple[str, float]] = {}
    if kind == "BPE":
        ranks = {"".join(_pair(merge)): -rank for rank, merge in enumerate(model["merges"])}
        pieces = {i: (piece, float(ranks.get(piece, -1e6 - i))) for piece, i in vocab.items()}
    elif kind == "Unigram":
        pieces = {i: (piece, float(score)) for i, (piece, score) in enumerate(vocab)}
    else:
        raise ValueError(f"tokenizer.json has model.type {kind!r}; supported: BPE, Unigram")
    special = set()
    for added in content.get("added_tokens") or []:
        pieces.setdefault(added["id"], (added["content"], 0.0))
        if added.get("special"):
            special.add(added["id"])
    # The blank comes last, and is no piece of the text.
    if (blank := max(pieces)) in special and pieces[blank][0] != "<unk>":
        del pieces[blank]
    if sorted(pieces) != list(range(len(pieces))):
        raise ValueError("tokenizer.json has gaps in its ids")
    built = proto.ModelProto()
    kinds = proto.ModelProto.SentencePiece
    bytes_ = _BYTES & {piece for piece, _ in pieces.values()}
    if not model.get("byte_fallback"):
        bytes_ = frozenset()
    # transformers sets the flag for tokenizers without bytes too.
    if bytes_ and (missing := _BYTES - bytes_):
        raise ValueError(
            f"tokenizer.json has model.byte_fallback, but no piece {min(missing)}; needs one for "
            "each of the 256 bytes, or for none"
        )
    for i in range(len(pieces)):
        piece, score = pieces[i]
        type_ = kinds.NORMAL
        if piece == "<unk>":
            type_ = kinds.UNKNOWN
        elif i in special:
            type_ = kinds.CONTROL
        elif piece in bytes_:
            type_ = kinds.BYTE
        built.pieces.add(piece=piece, score=score, type=type_)
    is_bpe = kind == "BPE"
    trainer = proto.TrainerSpec
    built.trainer_spec.model_type = trainer.BPE if is_bpe else trainer.UNIGRAM
    built.trainer_spec.byte_fallback = bool(bytes_)
    built.normalizer_spec.add_dummy_prefix = True
    return _with_special_symbols(built)


def _pair(merge: Any) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _with_special_symbols(model: Any) -> Symbols:
    kinds = proto.ModelProto.SentencePiece
    unknown = [i for i, piece in enumerate(model.pieces) if piece.type == kinds.UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"the tokenizer has {len(unknown)} unknown symbols, needs one")
    others = [i for i in range(len(model.pieces)) if i != unknown[0]]
    pieces = [model.pieces[i] for i in (unknown[0], *others)]
    changed = proto.ModelProto()
    changed.CopyFrom(model)
    del changed.pieces[:]
    for symbol in (BLANK_SYMBOL, SOS_EOS_SYMBOL):
        changed.pieces.add(piece=symbol, score=0.0, type=kinds.CONTROL)
    changed.pieces.extend(pieces)
    changed.pieces[UNKNOWN_ID].piece = "<unk>"
    spec = changed.trainer_spec
    spec.vocab_size = len(changed.pieces)
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = UNKNOWN_ID, -1, -1, -1
    spec.unk_surface = " <unk> "
    return Symbols(
        Tokenizer(changed.SerializeToString()), [len(model.pieces), None, unknown[0], *others]
    )


def sentencepiece_of(tokenizer: Tokenizer) -> bytes:
    """The SentencePiece model without our blank and sos/eos: unknown first, then the others."""
    model = proto.ModelProto()
    model.ParseFromString(tokenizer.model)
    del model.pieces[:UNKNOWN_ID]
    model.trainer_spec.vocab_size = len(model.pieces)
    model.trainer_spec.unk_id = 0
    data: bytes = model.SerializeToString()
    return data


def tokenizer_json_of(tokenizer: Tokenizer) -> bytes:
    """A tokenizer.json with the symbols of a tokenizer, and `<pad>` for the blank behind them.

    Raises:
        ValueError: the symbols are neither BPE nor unigrams.
    """
    model = proto.ModelProto()
    model.ParseFromString(sentencepiece_of(tokenizer))
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    kinds = proto.TrainerSpec
    written: dict[str, Any]
    if model.trainer_spec.model_type == kinds.BPE:
        vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
        ranked = sorted(pieces, key=lambda each: -each[1])
        merges = [
            [piece[:i], piece[i:]]
            for piece, _ in ranked
            for i in range(1, len(piece))
            if piece[:i] in vocab and piece[i:] in vocab
        ]
        written = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>"}
    elif model.trainer_spec.model_type == kinds.UNIGRAM:
        written = {"type": "Unigram", "vocab": [list(piece) for piece in pieces], "unk_id": 0}
    else:
        raise ValueError("the tokenizer is neither BPE nor unigram; transformers supports these")
    space = {
        "type": "Metaspace",
        "replacement": WORD_START,
        "prepend_scheme": "always",
        "split": True,
    }
    decoder: dict[str, Any] = space
    if tokenizer.has_bytes:
        written["byte_fallback"] = True
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, space]}
    blank = {"id": len(pieces), "content": "<pad>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**blank, **flags}],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": decoder,
        "model": written,
    }
    return json.dumps(content, ensure_ascii=False).encode()
