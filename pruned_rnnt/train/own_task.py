"""The user's own model, loss and batches as a task of the training engine.

The loader of the batches continues in the middle of an epoch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pruned_rnnt.data.input.worker_signals import worker_deaths_named
from pruned_rnnt.train.engine.log import RunLog
from pruned_rnnt.train.engine.random_state import RandomStream
from pruned_rnnt.train.engine.report import BatchSize, Utterance
from pruned_rnnt.train.engine.task import TaskDefaults
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any, int], Tensor | Mapping[str, Tensor]]
_END = object()
# What tells batches apart: values at each end of a tensor or text, the first ones of a container,
# levels of containers, and values in all, which the main thread hashes while a GPU may wait.
_COMPARED = 1024
_MEMBERS = 100
_LEVELS = 8
_MOST_VALUES = 500


@dataclass(frozen=True, kw_only=True)
class OwnExperiment:
    """The settings of a run of the user's own objects, as its config.yaml has them.

    own_optimiser: class of the user's own optimiser; empty for that of `optimiser`.
    """

    task: Literal["own"] = "own"
    train: TrainConfig = field(default_factory=TrainConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    own_optimiser: str = ""


@dataclass(frozen=True)
class OwnLosses:
    """`engine.task.Losses` of the user's loss function."""

    objective: Tensor
    total: Tensor
    parts: Mapping[str, Tensor]
    measures: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class OwnTask(TaskDefaults):
    """`engine.task.Task` of the user's own objects; see `pruned_rnnt.train.Trainer`.

    part_names: of the losses of the first batch; empty before it.
    """

    model: nn.Module
    batches: OwnBatches
    loss: LossFunction
    batch_size: Callable[[Any], BatchSize]
    validation: Callable[[Any], float] | None
    batch_ids: Callable[[Any], Sequence[str]] | None
    part_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._known = {id(p) for p in self.model.parameters()}
        self._frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}

    @property
    def validates(self) -> bool:
        return self.validation is not None

    def train_loader(self) -> OwnBatches:
        return self.batches

    def size(self, batch: OwnBatch) -> BatchSize:
        if batch.size is not None:
            return batch.size
        found = self.batch_size(batch.content)
        if not isinstance(found, BatchSize):
            raise TypeError(f"size returned {_name(found)}, needs a BatchSize")
        for name in ("utterances", "frames", "symbols"):
            if not isinstance(value := getattr(found, name), Integral):
                raise TypeError(f"size returned {name}={value!r}, needs a whole number")
        try:
            seconds = float(found.audio_seconds)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"size returned audio_seconds={found.audio_seconds!r}, needs a number"
            ) from error
        if found.utterances < 1 or found.frames < 1 or found.symbols < 0 or seconds < 0:
            raise ValueError(
                f"size returned {found}, needs at least one utterance and one frame, and nothing "
                "below 0"
            )
        batch.size = found
        return found

    def losses(self, batch: OwnBatch, step: int) -> OwnLosses:
        if not self.part_names:
            self._names(batch)
        found = self.loss(self.model, batch.content, step)
        self._check_frozen(step)
        parts = {"total": found} if isinstance(found, Tensor) else found
        if not isinstance(parts, Mapping) or "total" not in parts:
            about = (
                f"keys {sorted(map(str, parts))}" if isinstance(parts, Mapping) else _name(found)
            )
            raise TypeError(
                f"loss returned {about}, needs a tensor (N,), or a mapping with one under 'total'"
            )
        count = self.size(batch).utterances
        for name, values in parts.items():
            if not isinstance(name, str):
                raise TypeError(f"loss returned the key {name!r}, needs texts as keys")
            if not isinstance(values, Tensor) or values.shape != (count,):
                shape = tuple(values.shape) if isinstance(values, Tensor) else _name(values)
                raise ValueError(
                    f"loss returned {shape} for {name!r}, needs ({count},): a loss for each of the "
                    f"{count} utterances of the batch's size (in most losses, reduction='none')"
                )
        total = parts["total"]
        if not total.requires_grad or not total.is_floating_point():
            raise ValueError(
                f"loss returned {total.dtype} values that do not depend on the model's parameters, "
                "needs floating-point values computed with gradients"
            )
        if not self.part_names:
            self._check_leaves(total)
            self.part_names = tuple(parts)
        elif parts.keys() != set(self.part_names):
            raise ValueError(
                f"loss returned the keys {sorted(map(str, parts))}, and before "
                f"{sorted(map(str, self.part_names))}; needs the same for each batch: return zeros "
                "for a part that a batch does not have"
            )
        return OwnLosses(
            # Sums over many utterances are beyond float16, and coarse in bfloat16.
            objective=total.sum(dtype=torch.promote_types(total.dtype, torch.float32)),
            total=total.detach(),
            # Always in this order, in which the engine adds them.
            parts={name: parts[name].detach() for name in self.part_names if name != "total"},
        )

    def _check_frozen(self, step: int) -> None:
        """Gradients, averages and the optimiser are set up for the parameters trained at first."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} requires a gradient after {step} steps, but did not when "
                    "the Trainer was built, so that it would not be trained: build the Trainer "
                    "with the part unfrozen, and freeze it in loss while it is not to be trained, "
                    "such as model.part.requires_grad_(step >= 1000)"
                )

    def _check_leaves(self, total: Tensor) -> None:
        """ValueError if a loss has a gradient for a parameter outside of the model."""
        seen = set()
        waiting = [total.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)  # of the nodes that accumulate gradients
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._known:
                raise ValueError(
                    f"loss depends on a parameter of shape {tuple(leaf.shape)} that was not in "
                    "model when the Trainer was built, so that it would not be trained: make its "
                    "module, such as a criterion, a part of the model, or freeze it with "
                    "requires_grad_(False)"
                )
            waiting += [each for each, _ in node.next_functions]

    def utterances(self, batch: OwnBatch) -> list[Utterance]:
        try:
            names = self._names(batch)
        except Exception as error:  # whatever the function raises, the training goes on
            logger.warning("utterances have their positions as names: %s", error)
            names = self._places(batch)
        return [Utterance(id=each) for each in names]

    def _names(self, batch: OwnBatch) -> list[str]:
        """Raises TypeError or ValueError if `batch_ids` does not give a name to each utterance."""
        places = self._places(batch)
        if self.batch_ids is None:
            return places
        found = self.batch_ids(batch.content)
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise TypeError(f"ids returned {_name(found)}, needs {len(places)} names")
        names = list(map(str, found))
        if len(names) != len(places):
            raise ValueError(f"ids returned {len(names)} names, needs {len(places)}")
        return names

    def _places(self, batch: OwnBatch) -> list[str]:
        return list(map(str, range(self.size(batch).utterances)))

    def shapes(self, batch: OwnBatch) -> dict[str, Any]:
        return dataclasses.asdict(self.size(batch))

    def validate(self, step: int, log: RunLog | None) -> float | None:
        if self.validation is None:
            return None
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self._validation_generators():
                score = self.validation(self.model)
        finally:
            # Outer modules come first, as `train` also changes the modules in them.
            for module, mode in modes:
                if module.training != mode:
                    module.train(mode)
        if not isinstance(score, Real):
            raise TypeError(f"validate returned {_name(score)}, needs a number, lower for better")
        if log is not None:
            log.scalars("valid", step, {"score": float(score)})
        return float(score)

    @contextmanager
    def _validation_generators(self) -> Iterator[None]:
        """Seed the generators that a validation uses, for example in a DataLoader: each validation
        gets the same numbers, and the training does not depend on when validations run."""
        device = next(self.model.parameters()).device
        gpus = [device] if device.type == "cuda" else []
        seed = self.batches.seed
        with torch.random.fork_rng(gpus, enabled=bool(gpus)), RandomStream(seed).used():
            if gpus:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield

    def checkpoint_values(self) -> dict[str, Any]:
        return {"vocab_size": None}


def _name(value: object) -> str:
    return f"an object of type {type(value).__name__}"


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
    found = [batches]
    if in_loader and isinstance(batches, DataLoader):
        grouped = batches.batch_sampler
        found += [batches.dataset, batches.sampler, grouped, getattr(grouped, "sampler", None)]
    return {id(each): each for each in found if hasattr(each, "set_epoch")}.values()


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
