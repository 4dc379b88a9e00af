"""Finds ids that a source gives twice, in little memory for large corpora."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from pruned_rnnt.data.prepare.entries import Entry


class IdCheck:
    """The entries of a source; those whose id was there before can be told from the others.

    count: how many there are; None until an iteration came to its end.

    The first iteration that comes to its end remembers eight bytes of every id, the ones after it
    only the ids that were there twice.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = entries
        self.count: int | None = None
        self._repeated: frozenset[int] | None = None

    def __iter__(self) -> Iterator[Entry]:
        """The entries as the source has them."""
        if self._repeated is not None:
            yield from self._entries
            return
        digests = array("Q")
        for entry in self._entries:
            digests.append(_digest(entry.id))
            yield entry
        self.count = len(digests)
        ordered = np.sort(np.frombuffer(digests, dtype=np.uint64))
        self._repeated = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())

    def distinct(self) -> Iterator[Entry]:
        """The entries, of which the second and further ones of an id have a problem.

        Reads them all first if no iteration did so before.
        """
        if self._repeated is None:
            deque(self, maxlen=0)
        repeated = self._repeated or frozenset()
        first: dict[str, str] = {}
        for entry in self._entries:
            if repeated and _digest(entry.id) in repeated:
                where = first.setdefault(entry.id, entry.origin)
                if where != entry.origin and not entry.problem:
                    entry = replace(entry, problem="second entry of the same id", details=where)
            yield entry


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
