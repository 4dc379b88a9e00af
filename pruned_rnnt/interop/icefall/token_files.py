"""Read the tokenizers of icefall's recipes: bpe.model and tokens.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from pruned_rnnt.data.tokens.tokenizer import (
    BLANK_ID,
    BLANK_SYMBOL,
    SOS_EOS_ID,
    SOS_EOS_SYMBOL,
    UNKNOWN_ID,
    UNKNOWN_SYMBOL,
    Tokenizer,
)

# protobuf creates the classes of this module at import, so type checkers do not see them.
proto: Any = sentencepiece_model_pb2

_WORD_START = "▁"
_SPECIAL = [BLANK_SYMBOL, SOS_EOS_SYMBOL, UNKNOWN_SYMBOL]


def read_token_file(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model with `vocab_size` outputs.

    Args:
        path: a SentencePiece model (`*.model`), or a text file of `SYMBOL ID` lines. The text file
            has all that decoding needs, but not how training split texts into symbols; texts are
            then split into as few symbols as possible. Symbols beyond `vocab_size` are ignored.

    Raises:
        ValueError: another kind of file, special symbols other than `<blk>`, `<sos/eos>` and
            `<unk>` at 0, 1 and 2, or another number of symbols.
        FileNotFoundError: `path` does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no tokens at {path}")
    model = _sentencepiece(path) if path.suffix == ".model" else _lines(path, vocab_size)
    if len(model.pieces) != vocab_size:
        raise ValueError(f"{path} has {len(model.pieces)} symbols, the model {vocab_size}")
    special = [piece.piece for piece in model.pieces[:3]]
    if special != _SPECIAL:
        raise ValueError(f"{path} has the symbols {special} at 0, 1 and 2, needs {_SPECIAL}")
    for index in (BLANK_ID, SOS_EOS_ID):
        model.pieces[index].type = proto.ModelProto.SentencePiece.CONTROL
    model.trainer_spec.unk_surface = f" {UNKNOWN_SYMBOL} "
    return Tokenizer(model.SerializeToString())


def _sentencepiece(path: Path) -> Any:
    model = proto.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own error types are not part of its interface
        raise ValueError(f"{path} is not a SentencePiece model") from error
    return model


def _lines(path: Path, vocab_size: int) -> Any:
    symbols: dict[int, str] = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            symbol, _, id_text = line.rpartition(" ")
            if not symbol or not id_text.isdecimal():
                raise ValueError(f"{path}:{number}: needs `SYMBOL ID`, got {line!r}")
            symbols[int(id_text)] = symbol.strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file of `SYMBOL ID` lines") from error
    missing = [index for index in range(vocab_size) if index not in symbols]
    if missing:
        raise ValueError(
            f"{path} has no symbol {missing[0]}, but the model has {vocab_size} symbols from 0 on"
        )
    model = proto.ModelProto()
    kinds = proto.ModelProto.SentencePiece
    for index in range(vocab_size):
        kind = kinds.UNKNOWN if index == UNKNOWN_ID else kinds.NORMAL
        model.pieces.add(piece=symbols[index], score=-1.0, type=kind)
    model.trainer_spec.model_type = proto.TrainerSpec.UNIGRAM
    model.trainer_spec.vocab_size = vocab_size
    model.trainer_spec.unk_id = UNKNOWN_ID
    model.trainer_spec.bos_id = model.trainer_spec.eos_id = model.trainer_spec.pad_id = -1
    # If no symbol starts a word, the symbols are characters of a language without spaces.
    model.normalizer_spec.add_dummy_prefix = any(_WORD_START in s for s in symbols.values())
    return model
