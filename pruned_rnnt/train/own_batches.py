"""The user's own batches for the training engine: they continue in the middle of an epoch."""

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
from torch.utils.data import DataLoader

from pruned_rnnt.data.input.worker_signals import worker_deaths_named
from pruned_rnnt.train.engine.random_state import RandomStream
from pruned_rnnt.train.engine.report import BatchSize

logger = logging.getLogger(__name__)

_END = object()
# What tells batches apart: values at each end of a tensor or text, the first ones of a container,
# levels of containers, and values in all, which the main thread hashes while a GPU may wait.
_COMPARED = 1024
_MEMBERS = 100
_LEVELS = 8
_MOST_VALUES = 500


@dataclass
class OwnBatch:
    """A batch of the user's, which the loss function moves to the device.

    size: None until it is first needed.
    """

    content: Any
    size: BatchSize | None = None

    def to(self, device: torch.device) -> OwnBatch:
        return self


class OwnBatches:
    """Iterates over batches as the training engine needs it.

    `set_epoch` of the batches is called before each epoch, if they have it, and so are those of the
    samplers and of the dataset of a DataLoader. What they draw from the generators of Python, numpy
    and torch depends on the seed and the epoch alone, so that a continued run gets the same
    batches: it reads the earlier ones of the epoch again, and compares the last of them with that
    of the checkpoint.

    Args:
        batches: each iteration gives the batches of an epoch.
        allow_changes: continue although the batches differ from those before.
    """

    def __init__(self, batches: Iterable[Any], seed: int, *, allow_changes: bool) -> None:
        self._batches = batches
        if isinstance(batches, DataLoader) and batches.persistent_workers:
            logger.warning(
                "batches has persistent_workers=True: its workers keep the dataset of the first "
                "epoch, whatever set_epoch says later, and continue their random numbers, so that "
                "a continued run may get other batches. Leave it out if the dataset has set_epoch "
                "or draws random numbers"
            )
        generators = (getattr(each, "generator", None) for each in _drawn_from(batches))
        if any(isinstance(each, torch.Generator) for each in generators):
            logger.warning(
                "batches has a generator of its own: a continued run may get other batches, "
                "because the trainer cannot restore that generator, and does not notice this if "
                "the run continues at the end of an epoch. Leave it out (the trainer seeds torch's "
                "global generator for each epoch), or seed it in set_epoch"
            )
        self.seed = seed
        self._allow_changes = allow_changes
        self._epoch = 0
        # Where the epoch continues: after so many batches.
        self._skipped = 0
        # Number and digest of the newest batch, or of the last one of a loaded state.
        self._digested = 0
        self._digest = ""
        # Whether samplers and datasets of a loader know the epoch: not in an epoch that was begun
        # by an earlier version, as its order must not change in the middle.
        self._tells_loader = True

    def set_epoch(self, epoch: int) -> None:
        """Select an epoch; the epoch of a loaded state keeps the place in it."""
        if epoch != self._epoch:
            self._epoch, self._skipped, self._digested, self._digest = epoch, 0, 0, ""
            self._tells_loader = True

    def __iter__(self) -> Iterator[Any]:
        for each in _with_epochs(self._batches, in_loader=self._tells_loader):
            each.set_epoch(self._epoch)
        seed = 1_000_003 * self.seed + self._epoch
        # torch takes seeds of at most 64 bits.
        stream = RandomStream(seed if -(2**63) <= seed < 2**64 else seed % 2**63)
        with stream.used():
            batches = iter(self._batches)
        return self._remaining(batches, stream)

    def _remaining(self, batches: Iterator[Any], stream: RandomStream) -> Iterator[OwnBatch]:
        """The batches after those that the run was trained on before."""
        skipped = self._skipped
        for count in itertools.count(1):
            with stream.used(), worker_deaths_named():
                batch = next(batches, _END)
            if batch is _END:
                if count <= skipped:
                    self._refuse_or_warn(skipped)
                elif count == 1 and self._epoch > 0:
                    raise ValueError(
                        f"batches gives no batch in epoch {self._epoch}, although it did in "
                        "earlier epochs: it must be an object whose __iter__ starts a new epoch "
                        "each time, such as a list or a DataLoader"
                    )
                return
            if count >= skipped:
                found = _digest_of(batch)
                if count == skipped and self._digest not in ("", found):
                    self._refuse_or_warn(skipped)
                self._digested, self._digest = count, found
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
        """The state after `consumed_batches` batches.

        Further batches, given out for a step that was not finished, are given out again.
        """
        # The batch before them is then not compared.
        digest = self._digest if self._digested == consumed_batches else ""
        return {
            "epoch": self._epoch,
            "batches": consumed_batches,
            "short_digest": digest,
            "tells_loader": self._tells_loader,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of a state."""
        self._epoch, self._skipped = state["epoch"], state["batches"]
        # Earlier versions had digests of more values of a batch; such a batch is not compared.
        self._digested, self._digest = self._skipped, state.get("short_digest", "")
        # Absent in checkpoints of version 0.2.
        self._tells_loader = state.get("tells_loader", self._skipped == 0)

    def agree_without_fetching(self, batches: int) -> None:
        """Nothing to agree on: one process trains."""


def _with_epochs(batches: Any, *, in_loader: bool) -> Iterable[Any]:
    """The objects with a `set_epoch`: the batches, and what a DataLoader draws from."""
    found = _drawn_from(batches) if in_loader else [batches]
    return {id(each): each for each in found if hasattr(each, "set_epoch")}.values()


def _drawn_from(batches: Any) -> list[Any]:
    """The batches, and the dataset and samplers of a DataLoader."""
    if not isinstance(batches, DataLoader):
        return [batches]
    grouped = batches.batch_sampler
    sampler = getattr(grouped, "sampler", None)
    return [batches, batches.dataset, batches.sampler, grouped, sampler]


def _digest_of(batch: Any) -> str:
    """A hash that tells batches apart: by values of tensors and arrays on the CPU, and other
    values, in containers and objects. Its time is bounded."""
    hashed = hashlib.sha256()
    # Containers and objects around the next value, with their remaining values.
    around: list[tuple[Any, Iterator[Any]]] = [(None, iter([batch]))]
    for _ in range(_MOST_VALUES):
        while (value := next(around[-1][1], _END)) is _END:
            around.pop()
            if not around:
                return hashed.hexdigest()
        several = _add(hashed, value)
        # Utterances may refer to their batch.
        if len(around) <= _LEVELS and not any(value is outer for outer, _ in around):
            around.append((value, itertools.islice(several, _MEMBERS)))
    return hashed.hexdigest()


def _add(hashed: Any, value: Any) -> Iterable[Any]:
    """Hash a value without the values in it, which it returns."""
    hashed.update(f"{type(value).__name__}:".encode())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
    if isinstance(value, Tensor):
        # A copy from a device would wait for it.
        on_cpu = value.device.type == "cpu"
        if value.is_nested:
            return value.unbind() if on_cpu else ()
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if on_cpu and value.layout == torch.strided:
            flat = value.detach().reshape(-1)
            for part in (flat[:_COMPARED], flat[-_COMPARED:]):
                whole = part.resolve_conj().resolve_neg().contiguous()
                hashed.update(whole.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        return itertools.chain.from_iterable(value.items())
    elif isinstance(value, list | tuple):
        return value
    elif isinstance(value, str | bytes):
        hashed.update(repr((len(value), value[:_COMPARED], value[-_COMPARED:])).encode())
    elif isinstance(value, int | float | complex | None):
        hashed.update(repr(value).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, each.name, None) for each in dataclasses.fields(value))
    elif hasattr(value, "__dict__"):
        several: Iterable[Any] = vars(value).values()
        return several
    return ()
