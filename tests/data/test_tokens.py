"""Tokenizers of every kind: round trips, special symbols, unknown text, files, errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import (
    TOKENIZER_KINDS,
    TokenizerConfig,
    train_tokenizer,
)

TEXTS = ["turn on the light", "turn off the lamp", "go to the kitchen", "stop the music now"]


def make(kind: str, vocab_size: int = 60, texts: list[str] = TEXTS) -> Tokenizer:
    return train_tokenizer(texts, TokenizerConfig(kind=kind, vocab_size=vocab_size))


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_round_trip(kind: str) -> None:
    tokenizer = make(kind)
    for text in [*TEXTS, "stop the light", ""]:
        ids = tokenizer.encode(text)
        assert all(3 <= index < len(tokenizer) for index in ids)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_many_sequences_are_decoded_in_one_call(kind: str) -> None:
    tokenizer = make(kind)
    sequences = [[], *map(tokenizer.encode, TEXTS), [0, 1], [UNKNOWN_ID], ()]
    assert tokenizer.decode_all(sequences) == [tokenizer.decode(ids) for ids in sequences]
    assert tokenizer.decode_all([]) == []
    with pytest.raises(ValueError, match=rf"\[0, {len(tokenizer)}\), got 1000"):
        tokenizer.decode_all([[3], [4, 1000]])


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_special_symbols_come_first_and_no_text_encodes_to_them(kind: str) -> None:
    tokenizer = make(kind)
    assert tokenizer.symbols[:3] == ["<blk>", "<sos/eos>", "<unk>"]
    assert not {0, 1} & set(tokenizer.encode("<blk> the <sos/eos>"))
    assert tokenizer.decode([0, 1]) == ""


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_unknown_text_is_unk(kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode("stop ЖЖ now")
    assert UNKNOWN_ID in ids
    assert tokenizer.decode(ids) == "stop <unk> now"


def test_word_kind_has_one_symbol_per_word() -> None:
    tokenizer = make("word", vocab_size=5)
    words = {word for text in TEXTS for word in text.split()}
    assert len(tokenizer) == 3 + len(words)
    assert len(tokenizer.encode("turn the music now")) == 4


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_vocab_size_is_an_upper_bound(kind: str) -> None:
    texts = [f"{a}{b} {b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
    assert len(make(kind, 30, texts)) <= 30
    assert len(make(kind, 30, texts)) <= len(make(kind, 5000, texts)) < 5000


def test_same_text_same_model() -> None:
    assert make("unigram").symbols == make("unigram").symbols


def test_files(tmp_path: Path) -> None:
    tokenizer = make("unigram")
    tokenizer.save(tmp_path / "tokens")
    loaded = Tokenizer.load(tmp_path / "tokens")
    assert loaded.symbols == tokenizer.symbols
    lines = (tmp_path / "tokens" / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:3] == ["<blk> 0", "<sos/eos> 1", "<unk> 2"]
    assert [line.rsplit(" ", 1) for line in lines] == [
        [symbol, str(index)] for index, symbol in enumerate(tokenizer.symbols)
    ]
    copied = pickle.loads(pickle.dumps(loaded))
    assert copied.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokens\.model"):
        Tokenizer.load(tmp_path)
    good = make("char").model
    for content in (b"", b"no tokenizer", good[:50], good[:-30]):
        (tmp_path / "tokens.model").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"tokens\.model is damaged or not a tokenizer"
        ) as caught:
            Tokenizer.load(tmp_path)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ValueError, match="at least one text"):
        make("char", texts=[" ", ""])
    with pytest.raises(ValueError, match="kind must be one of"):
        make("syllable")
    with pytest.raises(ValueError, match=r"vocab_size must be at least \d+.*got 10"):
        make("bpe", vocab_size=10)
    tokenizer = make("char")
    for bad in (-1, len(tokenizer)):
        with pytest.raises(ValueError, match=f"got {bad}"):
            tokenizer.decode([3, bad])


def test_texts_of_any_length_train_the_tokenizer() -> None:
    long = "\u0e01" * 2000 + "\u0e02"  # 6,003 bytes
    for texts in (["hello"] * 50 + [long], [long]):
        tokenizer = train_tokenizer(texts, TokenizerConfig(kind="char"))
        assert UNKNOWN_ID not in tokenizer.encode(long)
