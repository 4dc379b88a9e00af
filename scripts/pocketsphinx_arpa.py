"""Convert a binary trigram model of words, such as that of the package pocketsphinx, to ARPA.

    pip install pocketsphinx
    python -m scripts.pocketsphinx_arpa words.arpa            # --upper for recognisers of capitals

The English model in the package has 72,547 words, in small letters. The program is for models in
the trie format with quantised probabilities; the package's own converter stops at them with an
error.

Axes: W words, B bigrams, T trigrams.
"""

from __future__ import annotations

import argparse
import importlib.util
import struct
import sys
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

_MAGIC = b"Trie Language Model"
_TABLE = 1 << 16
_QUANTISED_16_BITS = 1
# Probabilities are logarithms of this base.
_LOG_BASE = np.log10(1.0001)
_UNIGRAM = np.dtype([("prob", "<f4"), ("backoff", "<f4"), ("first_bigram", "<u4")])

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class Trigrams(NamedTuple):
    """The n-grams with decadic logarithms. A bigram is (word, the word after it), a trigram
    (word, bigram after it); both are in the order of what comes after."""

    words: list[str]
    prob_W: _Floats
    backoff_W: _Floats
    bigram_B2: _Integers
    prob_B: _Floats
    backoff_B: _Floats
    trigram_T2: _Integers
    prob_T: _Floats


def read_model(path: Path) -> Trigrams:
    """The n-grams of a model.

    Raises:
        ValueError: the file has another format.
    """
    data = path.read_bytes()
    header = struct.Struct(f"<{len(_MAGIC)}sB3Ii")
    if len(data) < header.size:
        raise ValueError(f"{path} is no binary language model of pocketsphinx")
    magic, order, *counts, quantised = header.unpack_from(data)
    if magic != _MAGIC or order != 3 or quantised != _QUANTISED_16_BITS:
        raise ValueError(f"{path} is no quantised trigram model in pocketsphinx's trie format")
    place = header.size
    tables = np.frombuffer(data, "<f4", 3 * _TABLE, place).reshape(3, _TABLE) * _LOG_BASE
    place += 3 * _TABLE * 4
    unigrams = np.frombuffer(data, _UNIGRAM, counts[0] + 1, place)
    place += unigrams.nbytes
    word_bits, next_bits = counts[0].bit_length(), counts[2].bit_length()
    # From the lowest bit: word, quantised numbers, and in bigrams the first trigram.
    bigrams = _Packed(data, place, (word_bits, 16, 16, next_bits))
    trigrams = _Packed(data, place + bigrams.size(counts[1]), (word_bits, 16))
    strings = place + bigrams.size(counts[1]) + trigrams.size(counts[2])
    words = data[strings + 4 :].split(b"\0")[: counts[0]]
    # The first child of each parent; one more entry has the end of the last one.
    starts_W = unigrams["first_bigram"].astype(np.int64)
    word_B, backoff_B, prob_B, first_B = bigrams.columns(int(starts_W[-1]) + 1)
    word_T, prob_T = trigrams.columns(int(first_B[-1]))
    word_B, backoff_B, prob_B = word_B[:-1], backoff_B[:-1], prob_B[:-1]
    return Trigrams(
        words=[word.decode() for word in words],
        prob_W=unigrams["prob"][:-1] * _LOG_BASE,
        backoff_W=unigrams["backoff"][:-1] * _LOG_BASE,
        bigram_B2=np.stack([word_B, np.repeat(np.arange(counts[0]), np.diff(starts_W))], axis=1),
        prob_B=tables[0][prob_B],
        backoff_B=tables[1][backoff_B],
        trigram_T2=np.stack([word_T, np.repeat(np.arange(len(word_B)), np.diff(first_B))], axis=1),
        prob_T=tables[2][prob_T],
    )


class _Packed:
    """Entries of several integers, packed without gaps between bits."""

    def __init__(self, data: bytes, place: int, widths: tuple[int, ...]) -> None:
        self.bytes = np.frombuffer(data, np.uint8, offset=place)
        self.widths = widths

    def size(self, entries: int) -> int:
        """Bytes of so many entries, with the one after the last and padding."""
        return ((1 + entries) * sum(self.widths) + 7) // 8 + 8

    def columns(self, entries: int) -> list[_Integers]:
        """Each integer of the first entries."""
        offsets = np.cumsum([0, *self.widths[:-1]])
        return [
            self._column(np.arange(entries) * sum(self.widths) + offset, width)
            for offset, width in zip(offsets, self.widths, strict=True)
        ]

    def _column(self, bits: _Integers, width: int) -> _Integers:
        value = np.zeros(len(bits), dtype=np.int64)
        for byte in range(5):  # up to 32 bits that begin anywhere in a byte
            value |= self.bytes[(bits >> 3) + byte].astype(np.int64) << (8 * byte)
        return (value >> (bits & 7)) & ((1 << width) - 1)


def write_arpa(model: Trigrams, file: TextIO) -> None:
    """Write the model in ARPA format."""
    bigrams, trigrams = model.bigram_B2.tolist(), model.trigram_T2.tolist()
    words = model.words
    counts = (len(words), len(bigrams), len(trigrams))
    file.write("\\data\\\n")
    file.writelines(f"ngram {order}={count}\n" for order, count in enumerate(counts, start=1))
    file.write("\n\\1-grams:\n")
    file.writelines(
        f"{prob:.4f}\t{word}\t{backoff:.4f}\n"
        for prob, word, backoff in zip(model.prob_W, words, model.backoff_W, strict=True)
    )
    file.write("\n\\2-grams:\n")
    file.writelines(
        f"{prob:.4f}\t{words[first]} {words[second]}\t{backoff:.4f}\n"
        for prob, (first, second), backoff in zip(
            model.prob_B, bigrams, model.backoff_B, strict=True
        )
    )
    file.write("\n\\3-grams:\n")
    for prob, (first, bigram) in zip(model.prob_T, trigrams, strict=True):
        second, third = bigrams[bigram]
        file.write(f"{prob:.4f}\t{words[first]} {words[second]} {words[third]}\n")
    file.write("\n\\end\\\n")


def in_capitals(model: Trigrams) -> Trigrams:
    """The model with its words in capitals, except marks such as <s>.

    Raises:
        ValueError: two words become one.
    """
    words = [word if word.startswith("<") else word.upper() for word in model.words]
    if len(set(words)) < len(words):
        raise ValueError("--upper makes one word of two: the model has capitals already")
    return model._replace(words=words)


def packaged_model() -> Path:
    """The English model in the package pocketsphinx."""
    spec = importlib.util.find_spec("pocketsphinx")
    if spec is None or spec.origin is None:
        sys.exit("the package pocketsphinx is not installed: pip install pocketsphinx")
    return Path(spec.origin).parent / "model" / "en-us" / "en-us.lm.bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="ARPA file to write")
    parser.add_argument("--model", type=Path, help="binary model (default: that of pocketsphinx)")
    parser.add_argument("--upper", action="store_true", help="write the words in capitals")
    options = parser.parse_args()
    model = read_model(options.model or packaged_model())
    if options.upper:
        model = in_capitals(model)
    with options.output.open("w", encoding="utf-8") as file:
        write_arpa(model, file)
    print(f"{options.output}: {len(model.words):,} words")


if __name__ == "__main__":
    main()
