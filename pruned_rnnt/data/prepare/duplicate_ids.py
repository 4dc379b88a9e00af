"""Finds ids that occur twice in a source, in little memory for large corpora."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry


class DuplicateIdMarker:
    """Iterates over the entries of a source and can mark those whose id occurred before.

    count: number of entries; None until the first complete iteration.

    The first complete iteration collects a hash of eight bytes per id. Afterwards only the hashes
    of repeated ids are kept.
    """

    def __init__(self, entries: Iterable[CorpusEntry]) -> None:
        self._entries = entries
        self.count: int | None = None
        self._repeated: frozenset[int] | None = None

    def __iter__(self) -> Iterator[CorpusEntry]:
        """The entries as they are in the source."""
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

    def marked(self) -> Iterator[CorpusEntry]:
        """The entries; all but the first entry of an id have `problem` set.

        Reads the whole source first if no iteration was complete before.
        """
        if self._repeated is None:
            deque(self, maxlen=0)
        repeated = self._repeated or frozenset()
        first: dict[str, str] = {}
        for entry in self._entries:
            if repeated and _digest(entry.id) in repeated:
                origin = first.setdefault(entry.id, entry.origin)
                if origin != entry.origin and not entry.problem:
                    entry = replace(entry, problem="second entry of the same id", details=origin)
            yield entry


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
