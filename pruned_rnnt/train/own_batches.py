"""A loader of the user's own batches, which continues in the middle of an epoch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.train.engine.random_state import RandomStream

logger = logging.getLogger(__name__)

_END = object()
# Values at each end of a tensor that tell batches apart, and levels of containers.
_COMPARED = 1024
_LEVELS = 8


@dataclass(frozen=True)
class OwnBatch:
    """A batch of the user's, which the loss function moves to the device."""

    content: Any

    def to(self, device: torch.device) -> OwnBatch:
        return self


class OwnBatches:
    """Iterates over batches as the training engine needs it.

    `set_epoch` of the batches is called before each epoch, if they have it. What they draw from the
    generators of Python, numpy and torch depends on the seed and the epoch alone, so that a
    continued run gets the same batches: it reads the earlier ones of the epoch again, and compares
    the last of them with that of the checkpoint.

    Args:
        batches: each iteration gives the batches of an epoch.
        allow_changes: continue although the batches differ from those before.
    """

    def __init__(self, batches: Iterable[Any], seed: int, *, allow_changes: bool) -> None:
        self._batches = batches
        self._seed = seed
        self._allow_changes = allow_changes
        self._epoch = 0
        # Where the epoch continues: after so many batches, the last of which has this digest.
        self._skipped = 0
        self._digest = ""

    def set_epoch(self, epoch: int) -> None:
        """Select an epoch; the epoch of a loaded state keeps the place in it."""
        if epoch != self._epoch:
            self._epoch, self._skipped, self._digest = epoch, 0, ""

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(self._epoch)
        stream = RandomStream(1_000_003 * self._seed + self._epoch)
        with stream.used():
            batches = iter(self._batches)
        return self._remaining(batches, stream)

    def _remaining(self, batches: Iterator[Any], stream: RandomStream) -> Iterator[OwnBatch]:
        """The batches after those that the run was trained on before."""
        skipped = self._skipped
        for count in itertools.count(1):
            with stream.used():
                batch = next(batches, _END)
            if batch is _END:
                if count <= skipped:
                    self._refuse_or_warn(skipped)
                return
            if count >= skipped:
                found = digest(batch)
                if count == skipped and found != self._digest:
                    self._refuse_or_warn(skipped)
                self._digest = found
            if count > skipped:
                yield OwnBatch(batch)

    def _refuse_or_warn(self, skipped: int) -> None:
        message = (
            f"batch {skipped} of epoch {self._epoch} differs from the one that the run was trained "
            "on before: batches must be the same each time, given the epoch (set_epoch) and the "
            "global generators of Python, numpy and torch; a generator of their own must be seeded "
            "in __iter__"
        )
        if not self._allow_changes:
            raise ValueError(f"{message}. Pass allow_changes=True to continue with other batches")
        logger.warning("%s", message)

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        """The state after `consumed_batches` batches, which are all that were given out."""
        return {"epoch": self._epoch, "batches": consumed_batches, "digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of a state."""
        self._epoch, self._skipped = state["epoch"], state["batches"]
        self._digest = state["digest"]

    def agree_without_fetching(self, batches: int) -> None:
        """Nothing to agree on: one process trains."""


def digest(batch: Any) -> str:
    """A hash that tells batches apart: by values of tensors and arrays on the CPU, and other
    values, in containers and objects."""
    hashed = hashlib.sha256()
    _add(hashed, batch, _LEVELS)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any, levels: int) -> None:
    hashed.update(f"{type(value).__name__}:".encode())
    several: Iterable[Any] = ()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
    if isinstance(value, Tensor):
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # A copy from a device would wait for it.
        if value.device.type == "cpu" and value.layout == torch.strided:
            flat = value.detach().reshape(-1)
            for part in (flat[:_COMPARED], flat[-_COMPARED:]):
                hashed.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        several = itertools.chain.from_iterable(value.items())
    elif isinstance(value, list | tuple):
        several = value
    elif isinstance(value, str | bytes | int | float | complex | None):
        hashed.update(repr(value).encode())
    elif dataclasses.is_dataclass(value):
        several = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        several = vars(value).values()
    for each in several if levels > 0 else ():
        _add(hashed, each, levels - 1)
