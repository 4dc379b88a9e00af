"""Conversion of pocketsphinx's binary language models: a small one, packed here, and its ARPA."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from pruned_rnnt.decode.fusion.ngram_files import read_orders
from scripts.pocketsphinx_arpa import in_capitals, read_model, write_arpa

LOG_BASE = np.log10(1.0001)
WORDS = ["<s>", "a", "b"]
# (log10 probability, log10 back-off) of words; bigrams by the word after; trigrams by bigram.
UNIGRAMS = [(-9.0, -0.5), (-0.5, -0.25), (-1.0, 0.0)]
BIGRAMS = [(0, 1, -0.25, -0.125), (2, 1, -0.75, 0.0), (1, 2, -0.5, -1.0)]
TRIGRAMS = [(1, 1, -1.5), (0, 2, -0.25)]


def packed(entries: list[tuple[tuple[int, int], ...]]) -> bytes:
    """Entries of (value, bits), from the lowest bit; one empty entry and padding at the end."""
    value = place = 0
    for entry in entries:
        for number, bits in entry:
            value |= number << place
            place += bits
    total = sum(bits for _, bits in entries[0])
    return value.to_bytes(((len(entries)) * total + 7) // 8 + 8, "little")


def write_binary(path: Path) -> None:
    tables = np.zeros((3, 1 << 16), dtype="<f4")
    for index, (_, _, prob, backoff) in enumerate(BIGRAMS):
        tables[0, index], tables[1, index] = prob / LOG_BASE, backoff / LOG_BASE
    for index, (*_, prob) in enumerate(TRIGRAMS):
        tables[2, index] = prob / LOG_BASE
    firsts = [sum(after < word for _, after, *_ in BIGRAMS) for word in range(len(WORDS) + 1)]
    data = struct.pack("<19sB3Ii", b"Trie Language Model", 3, 3, 3, 2, 1)
    data += tables.tobytes()
    for (prob, backoff), first in zip([*UNIGRAMS, (0.0, 0.0)], firsts, strict=True):
        data += struct.pack("<ffI", prob / LOG_BASE, backoff / LOG_BASE, first)
    starts = [sum(bigram < place for _, bigram, _ in TRIGRAMS) for place in range(4)]
    bigrams = [(word, i, i, starts[i]) for i, (word, *_) in enumerate(BIGRAMS)]
    bigrams.append((0, 0, 0, starts[3]))
    widths = (2, 16, 16, 2)
    data += packed([tuple(zip(entry, widths, strict=True)) for entry in bigrams])
    trigrams = [((word, 2), (i, 16)) for i, (word, *_) in enumerate(TRIGRAMS)]
    data += packed([*trigrams, ((0, 2), (0, 16))])
    strings = b"".join(word.encode() + b"\0" for word in WORDS)
    path.write_bytes(data + struct.pack("<i", len(strings)) + strings)


def test_ngrams_are_those_of_the_binary_model(tmp_path: Path) -> None:
    write_binary(tmp_path / "model.bin")
    file = io.StringIO()
    write_arpa(read_model(tmp_path / "model.bin"), file)
    sections = file.getvalue().split("\n\n")
    assert sections[0] == "\\data\\\nngram 1=3\nngram 2=3\nngram 3=2"
    assert sections[1].splitlines()[1:] == [
        f"{prob:.4f}\t{word}\t{backoff:.4f}"
        for word, (prob, backoff) in zip(WORDS, UNIGRAMS, strict=True)
    ]
    assert sections[2].splitlines()[1:] == [
        f"{prob:.4f}\t{WORDS[first]} {WORDS[after]}\t{backoff:.4f}"
        for first, after, prob, backoff in BIGRAMS
    ]
    assert sections[3].splitlines()[1:] == ["-1.5000\ta b a", "-0.2500\t<s> a b"]
    capitals = in_capitals(read_model(tmp_path / "model.bin"))
    assert capitals.words == ["<s>", "A", "B"]
    with pytest.raises(ValueError, match="one word of two"):
        in_capitals(capitals._replace(words=["a", "A"]))
    arpa = tmp_path / "words.arpa"
    arpa.write_text(file.getvalue(), encoding="utf-8")
    assert len(read_orders(arpa)) == 3


@pytest.mark.parametrize("content", [b"", b"\\data\\" * 20, b"Trie Language Model\x02" + bytes(40)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.bin is no"):
        read_model(tmp_path / "model.bin")
