"""Read n-gram models in ARPA format.

    \\data\\              ngram 1=COUNT ...
    \\1-grams:           LOG10_PROBABILITY <tab> WORD [<tab> LOG10_BACK_OFF]
    \\2-grams:           LOG10_PROBABILITY <tab> WORD WORD [<tab> LOG10_BACK_OFF]
    ...
    \\end\\
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
# kenlm's log-probability of unknown words, to the base 10, for models that have none.
_UNKNOWN_SCORE = -100.0
_LN_10 = math.log(10.0)
# How files that only kenlm can read begin.
_KENLM_BINARY = b"mmap lm http://kheafield.com/code"


class Entry(NamedTuple):
    """Natural logarithms of the probability of an n-gram's last word and of its back-off weight."""

    log_prob: float
    back_off: float


Ngram = tuple[str, ...]


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
    for order, log_prob, names, back_off in arpa_ngrams(path):
        while order > len(orders):
            orders.append({})
        ngram = tuple(UNKNOWN if name == "<UNK>" else name for name in names)
        if kept.issuperset(ngram):
            orders[order - 1][ngram] = Entry(log_prob * _LN_10, back_off * _LN_10)
    orders[0].setdefault((UNKNOWN,), Entry(_UNKNOWN_SCORE * _LN_10, 0.0))
    return orders


def arpa_ngrams(path: Path) -> Iterator[tuple[int, float, list[str], float]]:
    """Order, logarithm to the base 10 of the probability, words and that of the back-off weight.

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
                    raise ValueError(f"{line[:50]!r} is not finite")
                found += 1
                yield order, log_prob, fields[1 : order + 1], back_off
        else:
            raise ValueError("ends without \\end\\")
    except (ValueError, OSError, EOFError) as error:
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
