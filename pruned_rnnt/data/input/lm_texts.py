"""Texts for language models, stored as symbol ids, mapped into memory and batched.

    DIR/train.symbols.npy   int32, the symbols of all texts, concatenated
    DIR/train.offsets.npy   int64, the start of each text, and the end of the last one

Axes: N batch, U symbols.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruned_rnnt.data.input.batch import OtherBatchesError, check_seed_and_processes, pad_targets

# Number of texts that are sorted by length together, so that batches have little padding.
_POOL = 8192
# Number of symbols at each end of the texts that tell them apart.
_COMPARED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class TextBatch:
    """texts_NU: int32 symbols, padded with 0. lengths_N: int32, on the CPU. ids: text numbers."""

    texts_NU: Tensor
    lengths_N: Tensor
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> TextBatch:
        """This batch with its symbols on `device`."""
        return replace(self, texts_NU=self.texts_NU.to(device, non_blocking=True))


class TextFiles:
    """The texts of one split of a folder.

    Raises:
        FileNotFoundError: the folder has no such split.
    """

    def __init__(self, folder: Path, split: str) -> None:
        symbols, offsets = _paths(folder, split)
        if not offsets.is_file():
            raise FileNotFoundError(f"no texts at {symbols}; run `pruned-rnnt prepare lm`")
        self._symbols = np.load(symbols, mmap_mode="r")
        self._offsets: NDArray[np.int64] = np.load(offsets)
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def digest(self) -> str:
        """Of the lengths of all texts, and of the symbols at both ends."""
        ends = (self._symbols[:_COMPARED], self._symbols[-_COMPARED:])
        hashed = hashlib.sha256(self._offsets.tobytes() + b"".join(end.tobytes() for end in ends))
        return hashed.hexdigest()[:32]

    def batch(self, indices: NDArray[np.int64]) -> TextBatch:
        """The texts with these numbers, padded."""
        texts = [
            self._symbols[self._offsets[index] : self._offsets[index + 1]].tolist()
            for index in indices
        ]
        texts_NU, lengths_N = pad_targets(texts)
        return TextBatch(texts_NU=texts_NU, lengths_N=lengths_N, ids=tuple(indices.tolist()))


def write_texts(folder: Path, split: str, texts: Iterable[list[int]]) -> int:
    """Writes the texts of a split; returns their number."""
    symbols_path, offsets_path = _paths(folder, split)
    raw = symbols_path.with_suffix(".raw")
    offsets = array("q", [0])
    with raw.open("wb") as file:
        for text in texts:
            file.write(np.asarray(text, dtype=np.int32).tobytes())
            offsets.append(offsets[-1] + len(text))
    stored = np.lib.format.open_memmap(
        symbols_path, mode="w+", dtype=np.int32, shape=(offsets[-1],)
    )
    if offsets[-1]:
        stored[:] = np.memmap(raw, dtype=np.int32, mode="r")
    stored.flush()
    raw.unlink()
    np.save(offsets_path, np.frombuffer(offsets, dtype=np.int64))
    return len(offsets) - 1


class TextLoader:
    """Batches of an epoch for one of `world_size` processes; can resume in the middle of it.

    Every process has the same number of batches; for this the last ones may be repeated.

    Args:
        batch_symbols: largest number of symbols in a batch, including padding and the end of each
            text; a longer text is a batch of its own.
        shuffle: use a random order that depends on (seed, epoch) only.
    """

    def __init__(
        self,
        texts: TextFiles,
        batch_symbols: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.texts = texts
        self.batch_symbols = batch_symbols
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Selects the order; setting the epoch of a loaded state keeps the position."""
        if epoch != self.epoch:
            self._skip = 0
        self.epoch = epoch

    def __iter__(self) -> Iterator[TextBatch]:
        skip, self._skip = self._skip, 0
        for indices in islice(self._batches_of_rank(), skip, None):
            yield self.texts.batch(indices)

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        """The state after `consumed_batches` batches of this epoch."""
        return {
            "epoch": self.epoch,
            "batches": consumed_batches,
            "digest": self.texts.digest,
            "batch_symbols": self.batch_symbols,
            "seed": self.seed,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes after the batches of `state`.

        Raises:
            ValueError: the state has another seed or world size.
            OtherBatchesError: some batches of the epoch were of other texts or of another size.
        """
        check_seed_and_processes(state, self.seed, self.world_size, "texts")
        self.epoch, self._skip = state["epoch"], state["batches"]
        if self._skip == 0:
            return
        change = ""
        # Checkpoints of earlier versions have neither a digest nor, later, a size.
        symbols = state.get("batch_symbols", self.batch_symbols)
        if state.get("digest") not in (None, self.texts.digest):
            change = "the texts have changed; use the texts that the run began with"
        elif symbols != self.batch_symbols:
            change = (
                f"data.batch_symbols was {symbols} and is now {self.batch_symbols}, so that some "
                "texts would be used twice and others not at all"
            )
        if change:
            raise OtherBatchesError(
                f"cannot resume after batch {self._skip} of epoch {self.epoch}: {change}",
                self._skip,
            )

    def agree_without_fetching(self, batches: int) -> None:
        """Does nothing, because loading texts needs no collective operations."""

    def _batches_of_rank(self) -> Iterator[NDArray[np.int64]]:
        """The batches of this process: one of every `world_size` batches."""
        batches: list[NDArray[np.int64]] = []
        for batch in self._all_batches():
            batches.append(batch)
            if len(batches) == self.world_size:
                yield batches[self.rank]
                batches = []
        if batches:
            yield batches[self.rank % len(batches)]

    def _all_batches(self) -> Iterator[NDArray[np.int64]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = np.arange(len(self.texts))
        if self.shuffle:
            order = rng.permutation(order)
        for begin in range(0, len(order), _POOL):
            pool = order[begin : begin + _POOL]
            batches = self._split(pool[np.argsort(-self.texts.lengths[pool], kind="stable")])
            chosen = rng.permutation(len(batches)) if self.shuffle else range(len(batches))
            yield from (batches[index] for index in chosen)

    def _split(self, longest_first: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        batches, begin = [], 0
        while begin < len(longest_first):
            longest = int(self.texts.lengths[longest_first[begin]]) + 1
            count = max(1, self.batch_symbols // longest)
            batches.append(longest_first[begin : begin + count])
            begin += count
        return batches


def text_splits(folder: Path) -> list[str]:
    """The names of the splits in `folder`."""
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.offsets.npy"))


def _paths(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.symbols.npy", folder / f"{split}.offsets.npy"
