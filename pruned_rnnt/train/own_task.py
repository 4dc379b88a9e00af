"""The user's own model, loss and batches as a task of the training engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.train.engine.log import RunLog
from pruned_rnnt.train.engine.report import BatchSize, Utterance
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.parameter_groups import ParameterGroup
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
class OwnTask:
    """`engine.task.Task` of the user's own objects; see `pruned_rnnt.train.Trainer`.

    has_names: a batch has shown that `batch_ids` gives names.
    """

    model: nn.Module
    batches: OwnBatches
    loss: LossFunction
    batch_size: Callable[[Any], BatchSize]
    validation: Callable[[Any], float] | None
    batch_ids: Callable[[Any], Sequence[str]] | None
    has_names: bool = False

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        return ()

    def train_loader(self) -> OwnBatches:
        return self.batches

    def size(self, batch: OwnBatch) -> BatchSize:
        found = self.batch_size(batch.content)
        if not isinstance(found, BatchSize):
            raise TypeError(f"size returned {_name(found)}, needs a BatchSize")
        for name in ("utterances", "frames", "symbols"):
            if not isinstance(value := getattr(found, name), Integral):
                raise TypeError(f"size returned {name}={value!r}, needs a whole number")
        if found.utterances < 1 or found.frames < 1:
            raise ValueError(f"size returned {found}, needs at least one utterance and one frame")
        return found

    def losses(self, batch: OwnBatch, step: int) -> OwnLosses:
        if not self.has_names:
            self._names(batch)
            self.has_names = True
        found = self.loss(self.model, batch.content, step)
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
        return OwnLosses(
            objective=total.sum(),
            total=total.detach(),
            parts={name: each.detach() for name, each in parts.items() if name != "total"},
        )

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
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                score = self.validation(self.model)
        finally:
            self.model.train(training)
        if not isinstance(score, Real):
            raise TypeError(f"validate returned {_name(score)}, needs a number, lower for better")
        if log is not None:
            log.scalars("valid", step, {"score": float(score)})
        return float(score)

    def show(self, step: int, log: RunLog) -> None: ...

    def release_memory(self) -> None: ...

    def notes(self) -> list[str]:
        return []

    def checkpoint_values(self) -> dict[str, Any]:
        return {"vocab_size": None}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def check_files(self, folder: Path) -> None: ...

    def save_files(self, folder: Path) -> None: ...


def _name(value: object) -> str:
    return f"an object of type {type(value).__name__}"
