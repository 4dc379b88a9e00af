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
    place = 0
    try:
        for number, line in _lines(path):
            place = number
            if line.endswith("-grams:") and line.startswith("\\"):
                if int(line[1:].partition("-")[0]) != len(orders) + 1:
                    raise ValueError(f"needs \\{len(orders) + 1}-grams: here")
                orders.append({})
            elif line == "\\end\\":
                break
            elif orders and line:
                _add(line, orders[-1], len(orders), kept)
        else:
            raise ValueError("ends without \\end\\")
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}:{place} is not an ARPA file: {error}") from error
    if not orders:
        raise ValueError(f"{path} is not an ARPA file: it has no n-grams")
    orders[0].setdefault((UNKNOWN,), Entry(_UNKNOWN_SCORE * _LN_10, 0.0))
    return orders


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content = gzip.GzipFile(fileobj=file) if is_compressed else file
        for number, line in enumerate(content, start=1):
            yield number, line.decode("utf-8").strip()


def _add(line: str, entries: dict[Ngram, Entry], order: int, kept: set[str]) -> None:
    fields = line.split()
    if len(fields) not in (order + 1, order + 2):
        raise ValueError(
            f"an {order}-gram needs a probability and {order} words, got {line[:50]!r}"
        )
    ngram = tuple(UNKNOWN if word == "<UNK>" else word for word in fields[1 : order + 1])
    if kept.issuperset(ngram):
        back_off = float(fields[order + 1]) if len(fields) > order + 1 else 0.0
        entry = Entry(float(fields[0]) * _LN_10, back_off * _LN_10)
        if not (math.isfinite(entry.log_prob) and math.isfinite(entry.back_off)):
            raise ValueError(f"{line[:50]!r} is not finite")
        entries[ngram] = entry
