"""The interface between the training engine and a task: model, data, losses, validation.

The engine (trainer, steps, checkpoints, logs) is the same for all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from pruned_rnnt.train.engine.report import BatchSize, Utterance

if TYPE_CHECKING:
    from pruned_rnnt.train.engine.log import RunLog
    from pruned_rnnt.train.engine.train_config import TrainConfig
    from pruned_rnnt.train.optim.optimiser import OptimiserConfig, ParameterGroup
    from pruned_rnnt.train.optim.schedule import ScheduleConfig


class RunConfig(Protocol):
    """The sections that the engine reads; a task's configuration may have more."""

    @property
    def train(self) -> TrainConfig: ...
    @property
    def optimiser(self) -> OptimiserConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...


class Losses(Protocol):
    """Losses of a batch.

    objective: (), sum over the utterances, which is minimised.
    total: (N,), the objective of each utterance, detached.
    parts: (N,) each, components for the log, detached.
    measures: (N,) each, other quantities whose means over utterances are logged, detached.
    """

    @property
    def objective(self) -> Tensor: ...
    @property
    def total(self) -> Tensor: ...
    @property
    def parts(self) -> Mapping[str, Tensor]: ...
    @property
    def measures(self) -> Mapping[str, Tensor]: ...


class Loader(Protocol):
    """Batches of an epoch, resumable within an epoch; see `data.input.loader.BatchLoader`."""

    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Any: ...
    def state_dict(self, consumed_batches: int) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def agree_without_fetching(self, batches: int) -> None: ...


class Task(Protocol):
    """Data and model of one training process.

    The type of a batch is the task's own; it has `to(device)` and a length.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def validates(self) -> bool:
        """Whether `validate` measures anything."""

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """The parameters to train, by learning rate; without any, all that require a gradient."""

    def train_loader(self) -> Loader: ...

    def begin_step(self, step: int) -> None:
        """Called once in each training step, before `losses`, in all processes.

        A process may have no batch in a step, so what the processes agree on belongs here."""

    def losses(self, batch: Any, step: int) -> Losses:
        """Losses of a batch on the model's device; `step` is the number of steps done before.

        Validations of a recogniser call it too, in evaluation mode and without gradients."""

    def size(self, batch: Any) -> BatchSize: ...

    def utterances(self, batch: Any) -> list[Utterance]:
        """The utterances of a batch, in the order of its losses."""

    def shapes(self, batch: Any) -> dict[str, Any]:
        """Shapes of a batch for a report, as JSON values."""

    def validate(self, step: int, log: RunLog | None) -> float | None:
        """Measure the score of the model (lower is better), None if nothing could be measured.

        Writes to the log if there is one. All processes call it, at the same step."""

    def show(self, step: int, log: RunLog) -> None:
        """Log pictures and samples of a few validation utterances; called by one process."""

    def release_memory(self) -> None:
        """Release memory that the model keeps between steps; called when a step ran out of it."""

    def notes(self) -> list[str]:
        """Lines about the model for the log at the start."""

    def checkpoint_values(self) -> dict[str, Any]:
        """Values of a checkpoint, besides the states, that building the model needs."""

    def state_dict(self) -> dict[str, Any]:
        """What the task's next losses depend on, besides the model; each process has its own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def check_files(self, folder: Path) -> None:
        """Raise an error if the files of a run's folder, if any, do not match the task's data."""

    def save_files(self, folder: Path) -> None:
        """Write the files with which the run can be used without the data."""


class TaskDefaults:
    """What a task need not define; see `Task`."""

    @property
    def validates(self) -> bool:
        return True

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        return ()

    def begin_step(self, step: int) -> None: ...

    def show(self, step: int, log: RunLog) -> None: ...

    def release_memory(self) -> None: ...

    def notes(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def check_files(self, folder: Path) -> None: ...

    def save_files(self, folder: Path) -> None: ...
