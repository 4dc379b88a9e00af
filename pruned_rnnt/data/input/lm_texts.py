"""Texts as symbols on disk, for language models: written once, mapped into memory, batched.

    DIR/train.symbols.npy   int32, the symbols of all texts one after the other
    DIR/train.offsets.npy   int64, where each text begins, and the end

Axes: N batch, U symbols.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruned_rnnt.data.input.batch import pad_targets

# Texts that are sorted by length together, so that batches have little padding.
_POOL = 8192


@dataclass(frozen=True, kw_only=True)
class TextBatch:
    """texts_NU: int32 symbols, padded with 0. lengths_N: int32, on the CPU. ids: of the texts."""

    texts_NU: Tensor
    lengths_N: Tensor
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> TextBatch:
        """The same batch with its symbols on `device`."""
        return replace(self, texts_NU=self.texts_NU.to(device, non_blocking=True))


class TextFiles:
    """The texts of one split of a folder.

    Raises:
        FileNotFoundError: there is no such split.
    """

    def __init__(self, folder: Path, split: str) -> None:
        symbols, offsets = _paths(folder, split)
        if not offsets.is_file():
            raise FileNotFoundError(f"no texts at {symbols}: run `pruned-rnnt prepare lm`")
        self._symbols = np.load(symbols, mmap_mode="r")
        self._offsets: NDArray[np.int64] = np.load(offsets)
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: NDArray[np.int64]) -> TextBatch:
        """Some texts, padded."""
        texts = [
            self._symbols[self._offsets[index] : self._offsets[index + 1]].tolist()
            for index in indices
        ]
        texts_NU, lengths_N = pad_targets(texts)
        return TextBatch(texts_NU=texts_NU, lengths_N=lengths_N, ids=tuple(indices.tolist()))


def write_texts(folder: Path, split: str, texts: Iterable[list[int]]) -> int:
    """Write the texts of a split, one after the other; returns how many there were."""
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
    """Batches of an epoch for one of `world_size` processes; can go on in the middle of one.

    Every process has the same number of batches: the last ones may be repeated.

    Args:
        batch_symbols: most symbols in a batch, padding and the end of each text counted; a longer
            text is a batch of its own.
        shuffle: in an order that depends on (seed, epoch) alone; else by pools as they are.
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
        """Choose the order; the epoch of a loaded state keeps its place."""
        if epoch != self.epoch:
            self._skip = 0
        self.epoch = epoch

    def __iter__(self) -> Iterator[TextBatch]:
        skip, self._skip = self._skip, 0
        for place, indices in enumerate(self._own()):
            if place >= skip:
                yield self.texts.batch(indices)

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        """State after so many batches of this epoch."""
        return {
            "epoch": self.epoch,
            "batches": consumed_batches,
            "seed": self.seed,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches of `state`.

        Raises:
            ValueError: it is of another seed or number of processes.
        """
        for key, own in (("seed", self.seed), ("world_size", self.world_size)):
            if state[key] != own:
                raise ValueError(
                    f"cannot resume the texts with {key} {own}: the saved state has {state[key]}"
                )
        self.epoch, self._skip = state["epoch"], state["batches"]

    def keep_pace(self, batches: int) -> None:
        """Nothing: processes go through their texts without asking each other."""

    def _own(self) -> Iterator[NDArray[np.int64]]:
        """This process's share: batches are dealt out in rounds."""
        batches: list[NDArray[np.int64]] = []
        for batch in self._all():
            batches.append(batch)
            if len(batches) == self.world_size:
                yield batches[self.rank]
                batches = []
        if batches:
            yield batches[self.rank % len(batches)]

    def _all(self) -> Iterator[NDArray[np.int64]]:
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
    """Names of the splits there are; none where nothing is prepared."""
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.offsets.npy"))


def _paths(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.symbols.npy", folder / f"{split}.offsets.npy"
