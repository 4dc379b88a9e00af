"""What the engine needs to know of the thing that it trains: data, losses, validation.

The engine (trainer, steps, checkpoints, logs) is the same for all; a task brings its own model,
batches and measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from pruned_rnnt.train.engine.log import RunLog
    from pruned_rnnt.train.experiment import TrainConfig
    from pruned_rnnt.train.optim.optimiser import OptimiserConfig
    from pruned_rnnt.train.optim.schedule import ScheduleConfig


class RunConfig(Protocol):
    """Sections that the engine reads; a task's configuration has more."""

    @property
    def train(self) -> TrainConfig: ...
    @property
    def optimiser(self) -> OptimiserConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...


class Losses(Protocol):
    """objective: (), the sum over the utterances, minimised. total: (N,), the same of each
    utterance, and parts: (N,) each, shown beside it; both without gradient."""

    @property
    def objective(self) -> Tensor: ...
    @property
    def total(self) -> Tensor: ...
    @property
    def parts(self) -> Mapping[str, Tensor]: ...


class Loader(Protocol):
    """Batches of an epoch, which can go on in the middle of one; see `data.loader.BatchLoader`."""

    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Any: ...
    def state_dict(self, consumed_batches: int) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def agree_without_fetching(self, batches: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How much is in some batches; the loss that is minimised is the sum divided by `frames`.

    frames: encoder frames (or whatever the task counts its loss by); symbols: of the references.
    """

    utterances: int
    frames: int
    symbols: int
    audio_seconds: float


def total_size(sizes: Iterable[BatchSize]) -> BatchSize:
    """Of several batches together."""
    several = list(sizes)
    return BatchSize(
        utterances=sum(size.utterances for size in several),
        frames=sum(size.frames for size in several),
        symbols=sum(size.symbols for size in several),
        audio_seconds=sum(size.audio_seconds for size in several),
    )


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """An utterance of a batch, as a report about the batch names it; loss: NaN if unknown."""

    id: str
    frames: int
    symbols: int
    loss: float = math.nan


class Task(Protocol):
    """Data and model of one training process.

    A batch is the task's own; it has `to(device)` and a length.
    """

    @property
    def model(self) -> nn.Module: ...

    def train_loader(self) -> Loader: ...

    def losses(self, batch: Any, step: int) -> Losses:
        """Losses of a batch on the model's device; `step` counts the steps before."""

    def size(self, batch: Any) -> BatchSize: ...

    def utterances(self, batch: Any) -> list[Utterance]:
        """What is in a batch, in the order of its losses."""

    def shapes(self, batch: Any) -> dict[str, Any]:
        """What a report says of the size of a batch: plain values that JSON can hold."""

    def validate(self, step: int, log: RunLog | None) -> float | None:
        """The score of the model as it is now (lower is better), None if nothing could be measured;
        writes to the log if there is one. Every process calls it, at the same step."""

    def show(self, step: int, log: RunLog) -> None:
        """Write pictures and samples of a few validation utterances; one process alone."""

    def checkpoint_values(self) -> dict[str, Any]:
        """What a checkpoint needs besides the states, to make the model again."""

    def check_files(self, folder: Path) -> None:
        """Refuse a run's folder whose files do not go with the task's data; it may not exist."""

    def save_files(self, folder: Path) -> None:
        """Files that the run's folder needs, to be used without the data."""
