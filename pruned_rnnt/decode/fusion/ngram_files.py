"""Read n-gram models in ARPA format, and texts that adapt them.

    \\data\\              ngram 1=COUNT ...
    \\1-grams:           LOG10_PROBABILITY <tab> WORD [<tab> LOG10_BACK_OFF]
    \\2-grams:           LOG10_PROBABILITY <tab> WORD WORD [<tab> LOG10_BACK_OFF]
    ...
    \\end\\
"""

from __future__ import annotations

import gzip
import math
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from pruned_rnnt.data.tokens.text_normalisation import normal_form
from pruned_rnnt.data.tokens.tokenizer import WORD_START
from pruned_rnnt.decode.fusion.word_ngram import NgramList, WordNgram

if TYPE_CHECKING:
    from pruned_rnnt.data.input.prepared_folder import PreparedFolder

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
# kenlm's log-probability of unknown words, to the base 10, for models that have none.
_UNKNOWN_SCORE = -100.0
_LN_10 = math.log(10.0)
# In models of symbols, one symbol in 2 to 10 begins a word; in models of words, next to none has
# the mark.
_MOST_MARKED = 0.05
# How files that only kenlm can read begin.
_KENLM_BINARY = b"mmap lm http://kheafield.com/code"
Ngram = tuple[str, ...]


class Entry(NamedTuple):
    """Natural logarithms of the probability of an n-gram's last word and of its back-off weight."""

    log_prob: float
    back_off: float


def read_arpa(path: Path, words: Iterable[str]) -> list[dict[Ngram, Entry]]:
    """The n-grams of a file, by order; those of other words than these are left out.

    `<s>`, `</s>` and `<unk>` are always kept; `<unk>` has an entry in any case.

    Args:
        path: may be compressed by gzip.

    Raises:
        ValueError: the file is not in this format; the message names the line.
        FileNotFoundError: there is no file.
    """
    kept = {*words, BEGIN, END, UNKNOWN}
    orders: list[dict[Ngram, Entry]] = []
    for _, order, log_prob, names, back_off in _arpa_ngrams(path):
        while order > len(orders):
            orders.append({})
        ngram = tuple(names)
        if kept.issuperset(ngram):
            orders[order - 1][ngram] = Entry(log_prob * _LN_10, back_off * _LN_10)
    orders[0].setdefault((UNKNOWN,), Entry(_UNKNOWN_SCORE * _LN_10, 0.0))
    return orders


def _arpa_ngrams(path: Path) -> Iterator[tuple[int, int, float, list[str], float]]:
    """Line, order, logarithm to the base 10 of the probability, words and that of the back-off
    weight; the unknown word is `<unk>`.

    Errors are those of `read_arpa`.
    """
    order = place = found = 0
    try:
        for number, line in _lines(path):
            place = number
            if line.endswith("-grams:") and line.startswith("\\"):
                order += 1
                if int(line[1:].partition("-")[0]) != order:
                    raise ValueError(f"needs \\{order}-grams: here")
            elif line == "\\end\\":
                break
            elif order and line:
                fields = line.split()
                if not order < len(fields) <= order + 2:
                    raise ValueError(
                        f"an {order}-gram needs a probability and {order} words, got {line[:50]!r}"
                    )
                log_prob = float(fields[0])
                back_off = float(fields[order + 1]) if len(fields) > order + 1 else 0.0
                if not (math.isfinite(log_prob) and math.isfinite(back_off)):
                    raise ValueError(
                        f"{line[:50]!r} is not finite: write -99 for the logarithm of 0"
                    )
                found += 1
                names = [UNKNOWN if name == "<UNK>" else name for name in fields[1 : order + 1]]
                yield number, order, log_prob, names, back_off
        else:
            raise ValueError("ends without \\end\\")
    except (ValueError, OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}:{place} is not an ARPA file: {error}") from error
    if not found:
        raise ValueError(f"{path} is not an ARPA file: it has no n-grams")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        start = file.read(len(_KENLM_BINARY))
        if start == _KENLM_BINARY:
            raise ValueError("it is a binary of kenlm; name the ARPA file that it was built from")
        is_compressed = start[:2] == b"\x1f\x8b"
        file.seek(0)
        content = gzip.GzipFile(fileobj=file) if is_compressed else file
        for number, line in enumerate(content, start=1):
            yield number, line.decode("utf-8").strip()


def read_word_ngram(arpa: str, texts: str) -> WordNgram:
    """The model of an ARPA file, of texts, or of the first and the second.

    Args:
        texts: a file with a text per line, or a prepared folder, whose training texts are taken
            once each. Empty for none, as is `arpa`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: `arpa` is no ARPA file, or `texts` has no text.
    """
    orders = read_orders(Path(arpa)) if arpa else []
    return WordNgram(orders, read_texts(Path(texts), "word_texts") if texts else ())


def read_texts(path: Path, key: str) -> list[str]:
    """The texts of a file, one per line, or the training texts of a prepared folder, once each.

    key: of the setting, for messages.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: there is no text, or the file is not UTF-8; the message names the line.
    """
    lines: Sequence[str]
    if path.is_dir():
        lines = _training_texts(path)
    elif path.is_file():
        try:
            lines = path.read_bytes().decode("utf-8").splitlines()
        except UnicodeDecodeError as error:
            number = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(
                f"decode.fusion.{key}: {path}:{number} is not UTF-8: save the file as UTF-8"
            ) from error
    else:
        raise FileNotFoundError(f"decode.fusion.{key}: there is nothing at {path}")
    if not any(line.strip() for line in lines):
        raise ValueError(f"decode.fusion.{key}: {path} has no text")
    return [text for text in map(normal_form, lines) if text]


def _training_texts(path: Path) -> tuple[str, ...]:
    # Imported here because it loads lhotse, which transcribing needs for nothing else.
    from pruned_rnnt.data.input.prepared_folder import PreparedFolder

    folder = PreparedFolder(path, allow_commands=True)
    changed_ns = tuple(file.stat().st_mtime_ns for file in folder.manifests("train"))
    return _texts_of_cuts(folder, changed_ns)


# Several settings may name one folder, and each is read for its model and for its digest. A line of
# a manifest takes a tenth of a millisecond.
@lru_cache(maxsize=1)
def _texts_of_cuts(folder: PreparedFolder, changed_ns: tuple[int, ...]) -> tuple[str, ...]:
    from pruned_rnnt.data.input.filters import cut_text

    # Copies at other speeds have the same text.
    return tuple(dict.fromkeys(map(cut_text, folder.cuts("train", lazy=True))))


def symbol_bigrams(texts: Iterable[Sequence[str]]) -> list[dict[Ngram, Entry]]:
    """The bigram model of texts of symbols, smoothed as by Witten and Bell (1991):

        p(b | a) = (count(a b) + kinds(a) p(b)) / (count(a) + kinds(a))

    where kinds(a) is the number of different symbols after a; p(b) has one more of each symbol.
    """
    after: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text in texts:
        for one, other in pairwise((BEGIN, *text, END)):
            after[one][other] += 1
    counts = Counter({UNKNOWN: 1})
    for following in after.values():
        counts += following
    total = counts.total() + len(counts)
    unigrams: dict[Ngram, Entry] = {(BEGIN,): Entry(math.log(1 / total), 0.0)}
    bigrams: dict[Ngram, Entry] = {}
    for symbol, count in counts.items():
        unigrams[symbol,] = Entry(math.log((count + 1) / total), 0.0)
    for one, following in after.items():
        kinds, whole = len(following), len(following) + following.total()
        unigrams[one,] = unigrams[one,]._replace(back_off=math.log(kinds / whole))
        for other, count in following.items():
            single = math.exp(unigrams[other,].log_prob)
            bigrams[one, other] = Entry(math.log((count + kinds * single) / whole), 0.0)
    return [unigrams, bigrams]


def read_orders(path: Path) -> list[NgramList]:
    """The n-grams of each order of an ARPA file.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: the file is no ARPA file, or lacks a 1-gram of a word that its other n-grams
            have (the message names the line), or is a model of symbols.
    """
    logs: list[array[float]] = []
    words: list[list[str]] = []
    single: set[str] = {BEGIN, END, UNKNOWN}
    marked = 0.0  # probability of words that begin with the mark of symbols
    for number, order, log_prob, names, back_off in _arpa_ngrams(path):
        while order > len(words):
            # The 1-grams are complete once another order begins.
            single.update(*words[:1])
            logs.append(array("d"))
            words.append([])
        if order == 1 and names[0].startswith(WORD_START):
            marked += 10.0 ** min(log_prob, 0.0)
        names = [normal_form(name) for name in names]
        if order > 1 and not single.issuperset(names):
            name = next(name for name in names if name not in single)
            raise ValueError(
                f"{path}:{number}: {name} is not among the 1-grams of this file, which an n-gram "
                "model of words needs: add it there, or leave out the n-grams with it"
            )
        logs[order - 1].extend((log_prob, back_off))
        words[order - 1].extend(names)
    if marked > _MOST_MARKED:
        raise ValueError(
            f"decode.fusion.word_ngram: {path} is a model of symbols ({marked:.0%} of them, by "
            "probability, begin with U+2581), not of words: set decode.fusion.ngram to it"
        )
    orders = []
    for order, (pairs, names) in enumerate(zip(logs, words, strict=True), 1):
        values = 10.0 ** torch.tensor(pairs, dtype=torch.float64).view(-1, 2)
        columns = [names[column::order] for column in range(order)]
        orders.append(NgramList(columns, values[:, 0], values[:, 1]))
    return orders
