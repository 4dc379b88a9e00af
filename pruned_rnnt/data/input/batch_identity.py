"""The identity of decoded data: what distinguishes utterances with equal ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pruned_rnnt.data.input.batch import Batch


class Audio(NamedTuple):
    """What an utterance's features are recognised by, also on another machine.

    frames: number of feature frames (10 ms).
    mean: of the log-mel energies; rounding moves it by far less than the last of its 4 decimals.
    """

    frames: int
    mean: float


class BatchIdentity:
    """The identity of the utterances in batches that pass through `over`.

    audio: by utterance id.
    """

    def __init__(self) -> None:
        self.audio: dict[str, Audio] = {}
        self._digests: list[bytes] = []

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, and read each of them on the way."""
        for batch in batches:
            self.add(batch)
            yield batch

    @property
    def digest(self) -> str:
        """Hexadecimal digits, equal for equal ids, texts and features, in any order and batches."""
        return hashlib.sha256(b"".join(sorted(self._digests))).hexdigest()

    def add(self, batch: Batch) -> None:
        """Read a batch."""
        lengths = batch.feature_lengths_N.tolist()
        for n, (name, text) in enumerate(zip(batch.ids, batch.texts, strict=True)):
            features_TF = batch.features_NTF[n, : lengths[n]].cpu().contiguous()
            digest = hashlib.sha256(f"{name}\n{text}\n".encode())
            digest.update(features_TF.numpy().data)
            self._digests.append(digest.digest())
            mean = float(features_TF.double().mean()) if features_TF.numel() else 0.0
            self.audio[name] = Audio(lengths[n], round(mean, 4))
