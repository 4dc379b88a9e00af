"""The user's own model, loss and batches as a task of the training engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.train.engine.log import RunLog
from pruned_rnnt.train.engine.random_state import RandomStream
from pruned_rnnt.train.engine.report import BatchSize, Utterance
from pruned_rnnt.train.engine.task import TaskDefaults
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig
from pruned_rnnt.train.own_batches import OwnBatch, OwnBatches

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any, int], Tensor | Mapping[str, Tensor]]


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
