"""The whole state of a training run, saved and restored together."""

from __future__ import annotations

import dataclasses
import logging
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.config.load import ConfigError, to_dict
from pruned_rnnt.data.input.batch import OtherBatchesError
from pruned_rnnt.model.parameter_values import describe_broken
from pruned_rnnt.train.engine.average import ParameterMean, RunningAverage
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.checkpoint import CheckpointError, CheckpointFolder
from pruned_rnnt.train.engine.continuation import check_settings, check_task, task_name
from pruned_rnnt.train.engine.counters import Counters
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import log_info
from pruned_rnnt.train.engine.random_state import capture_random_state, restore_random_state
from pruned_rnnt.train.engine.task import Loader, RunConfig, Task
from pruned_rnnt.train.optim.optimiser import load_optimiser_state
from pruned_rnnt.train.optim.sharded import ShardedOptimiser, whole_state

logger = logging.getLogger(__name__)

# Settings that scores of validations depend on: earlier scores cannot be compared.
_SCORE_KEYS = ("data.valid:", "decode.metric:")


@dataclass
class TrainingState:
    """References to all objects with a state.

    average, mean: None when switched off; only the first process has a mean, unless it is divided.
    """

    config: RunConfig
    task: Task
    optimiser: torch.optim.Optimizer
    scaler: Any
    average: RunningAverage | None
    mean: ParameterMean | None
    loader: Loader
    ranks: Ranks
    counters: Counters = dataclasses.field(default_factory=Counters)
    _random: dict[str, Any] | None = None
    _drops_scores: bool = False
    # Of the validation at `counters.validated_step`.
    _score: float | None = None

    def save(self, folder: CheckpointFolder, score: float | None) -> Path | None:
        """Write a checkpoint: all processes call, the first one writes.

        While steps are being skipped, no older checkpoint is removed.

        Args:
            score: error rate of the validation; None if it was not measured, or before in this
                step.

        Raises:
            TrainingStopped: training has diverged; nothing is written.
        """
        self.stop_if_diverged(folder)
        if score is None and self.counters.validated_step == self.counters.step:
            score = self._score
        self._score = score
        # A process whose worker died in the last, smaller group of an epoch counts batches that the
        # epoch does not have.
        self.counters.batch = min(self.ranks.gather(self.counters.batch))
        # Until `restore_random`, the loaded state is that of the run: building the model and the
        # data has drawn from the current generators.
        random_states = self.ranks.gather(self._random or capture_random_state(self._device))
        # Each process updates its buffers by its own batches.
        buffers = []
        if self.ranks.world_size > 1:
            buffers = self.ranks.gather(
                {name: buffer.cpu() for name, buffer in self.task.model.named_buffers()}
            )
        tasks = self.ranks.gather(self.task.state_dict())
        samplers = self.ranks.gather(self.loader.state_dict(self.counters.batch))
        # What several processes keep is gathered in the first one.
        optimiser = whole_state(self.optimiser, is_first=self.ranks.is_first)
        average = self.average.state_dict() if self.average is not None else None
        mean = self.mean.state_dict() if self.mean is not None else None
        if not self.ranks.is_first:
            return None
        path = folder.save(
            self.counters.step,
            {
                "config": to_dict(self.config),
                **self.task.checkpoint_values(),
                "model": self.task.model.state_dict(),
                "average": average,
                "average_updates": self.average.updates if self.average is not None else 0,
                "mean": mean,
                "optimiser": optimiser,
                "optimiser_parameters": self._optimised_names(),
                "scaler": self.scaler.state_dict(),
                "sampler": samplers[0],
                "samplers": samplers if self.ranks.world_size > 1 else [],
                "random": random_states,
                "buffers": buffers,
                "buffer_names": sorted(self._buffer_names()),
                "task": tasks,
                "task_class": task_name(self.task),
                "counters": self.counters.state_dict(),
                "score": score,
            },
            keep_all=self.counters.consecutive_bad_steps > 0,
            drop_scores=self._drops_scores,
        )
        self._drops_scores = self._drops_scores and score is None
        note = "" if score is None else " with its validation"
        log_info(logger, f"saved {path.name}{note}", f"saved {path}{note}")
        return path

    def stop_if_diverged(self, folder: CheckpointFolder, *, buffers: bool = True) -> None:
        """Check the parameters and, with `buffers`, the buffers; all processes must call.

        Raises:
            TrainingStopped: a parameter is NaN, infinite or huge, or a buffer NaN or infinite.
        """
        state, names = self.task.model.state_dict(), self._buffer_names()
        if not buffers:
            state = {name: value for name, value in state.items() if name not in names}
        broken = describe_broken(state, names)
        found = next((text for text in self.ranks.gather(broken) if text), "")
        if not found:
            return
        paths = folder.paths()
        kept = f"the newest checkpoint is {paths[-1]}" if paths else "there is no checkpoint"
        raise TrainingStopped(
            f"training stopped at step {self.counters.step}, because it has diverged: {found}. "
            f"Nothing was saved, {kept}. Lower optimiser.learning_rate (now "
            f"{self.config.optimiser.learning_rate:g}) and continue with --allow-changes "
            "(in Python: allow_changes=True)"
        )

    def restore_newest(self, folder: CheckpointFolder, *, allow_changes: bool) -> None:
        """Restore the newest usable checkpoint, if there is one; see `restore`.

        Raises:
            CheckpointError: the processes do not see the same checkpoints.
        """
        values = folder.load_newest(quiet=not self.ranks.is_first)
        if values is not None:
            self.restore(values, allow_changes=allow_changes)
        steps = self.ranks.gather(self.counters.step)
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes would continue from different steps, {steps} by rank: train.folder "
                f"({self.config.train.folder}) must be on a file system that all machines share"
            )

    def restore(self, values: dict[str, Any], *, allow_changes: bool) -> None:
        """Restore the state of a checkpoint.

        `restore_random` restores the random generators later, when nothing else draws from them.

        Raises:
            ConfigError: the checkpoint is that of another task, or has another configuration (the
                message names the keys) or another model.
            CheckpointError: the checkpoint is that of an imported model.
        """
        if "optimiser" not in values:
            raise CheckpointError(
                f"{self.config.train.folder} holds an imported model: its training cannot be "
                "continued, as it has no optimiser state"
            )
        is_first = self.ranks.is_first
        # Absent in checkpoints of version 0.2.
        task = values.get("task_class", "")
        check_task(task, self.task, self.config, allow_changes=allow_changes, warns=is_first)
        different, changed = check_settings(
            values["config"], self.config, allow_changes=allow_changes, warns=is_first
        )
        self._load_model(values, changed)
        self._load_optimiser(values["optimiser"], values.get("optimiser_parameters", []))
        if values["scaler"]:  # empty unless the checkpoint was trained in float16
            self.scaler.load_state_dict(values["scaler"])
        self.counters = Counters.from_state_dict(values["counters"])
        self._score = values.get("score")
        # Scores that are left are those of other settings: the run ended before a new one.
        self._drops_scores = values["counters"].get("best_score") == math.inf
        self._restart_scores([line for line in different if line.startswith(_SCORE_KEYS)])
        self._restore_position(values, different, allow_changes)
        if self.average is not None and values["average"] is not None:
            self.average.load_state_dict(values["average"], values["average_updates"])
        elif self.average is not None:
            self.average.restart()  # it was switched off before
        if self.mean is not None:
            self._restore_mean(values.get("mean"))  # absent in checkpoints of version 0.2
        # A process without a saved state keeps its own seed.
        if self.ranks.rank < len(values["random"]):
            self._random = values["random"][self.ranks.rank]
        tasks = values.get("task", [])  # absent in checkpoints of version 0.1
        if tasks:
            # A process without a saved state begins with that of the first.
            self.task.load_state_dict(tasks[min(self.ranks.rank, len(tasks) - 1)])
        buffers = values.get("buffers", [])  # absent in checkpoints of version 0.1
        if self.ranks.rank < len(buffers):
            self.task.model.load_state_dict(buffers[self.ranks.rank], strict=False)

    def _restart_scores(self, changed: Sequence[str]) -> None:
        """Choose the best checkpoint anew if settings of the validation have changed.

        Args:
            changed: lines about them; if there are none, nothing is done.
        """
        if not changed:
            return
        if self.ranks.is_first and math.isfinite(self.counters.best_score):
            logger.warning(
                "%s: earlier scores cannot be compared with new ones, so the best checkpoint is "
                "chosen from here on; the best so far is removed after the next validation: copy "
                "it if you need it",
                "; ".join(changed),
            )
        self.counters.best_score, self.counters.validations_since_best = math.inf, 0
        self.counters.validated_step = -1
        self._drops_scores = True

    def _restore_mean(self, saved: dict[str, Any] | None) -> None:
        """Continue the mean of a checkpoint, or begin one there."""
        assert self.mean is not None
        if saved is not None:
            self.mean.load_state_dict(saved)
        else:
            self.mean.since = self.counters.step

    def _load_model(self, values: dict[str, Any], changed: Sequence[str]) -> None:
        """Load the parameters of a checkpoint; ConfigError if the model has other sizes.

        Args:
            changed: lines about settings that have changed since, for the message.
        """
        own = self.task.checkpoint_values()["vocab_size"]
        if values["vocab_size"] != own:
            raise ConfigError(
                f"{self.config.train.folder} holds a run with {values['vocab_size']} symbols, and "
                f"the data have {own}: use the run's own data, or choose another train.folder"
            )
        try:
            self.task.model.load_state_dict(values["model"])
        except RuntimeError as error:
            of_model = [line for line in changed if line.startswith(("model.", "loss."))]
            reason = "; ".join(of_model) or textwrap.shorten(str(error), 300, placeholder=" ...")
            raise ConfigError(
                f"{self.config.train.folder} holds a run of another model, which this one cannot "
                f"continue: choose another train.folder ({reason})"
            ) from error

    def _buffer_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.task.model.named_buffers())

    def _optimised_names(self) -> list[str]:
        """The optimiser's parameters in its order; none if it is divided among processes."""
        if isinstance(self.optimiser, ShardedOptimiser):
            return []
        names = {id(p): name for name, p in self.task.model.named_parameters()}
        return [names[id(p)] for group in self.optimiser.param_groups for p in group["params"]]

    def _load_optimiser(self, values: dict[str, Any], saved: Sequence[str]) -> None:
        """Load the optimiser's state; ConfigError if it is that of another optimiser.

        The settings are those of this configuration, which may have changed.

        Args:
            saved: names of its parameters; empty if unknown, as in checkpoints of version 0.2.
        """
        try:
            load_optimiser_state(self.optimiser, values)
            names = self._optimised_names()
            # Other names may be those of a renamed model, whose sizes have been compared.
            if sorted(saved) == sorted(names) and list(saved) != names:
                places = next(pair for pair in zip(saved, names, strict=True) if len({*pair}) > 1)
                raise ValueError(
                    "its parameters were in another order, {} in the place of {}".format(*places)
                )
        except ValueError as error:
            raise ConfigError(
                f"{self.config.train.folder} holds a run with another optimiser than this "
                f"{type(self.optimiser).__name__}, which cannot continue it: choose another "
                f"train.folder ({error})"
            ) from error

    def _restore_position(
        self, values: dict[str, Any], different: Sequence[str], allow_changes: bool
    ) -> None:
        """Restore the position in the epoch, approximately if the number of processes changed.

        Args:
            different: lines about all settings that have changed since.
        """
        own, processes = self.ranks.world_size, len(values["random"])
        if processes == own:
            # Checkpoints of earlier versions, and of one process, have the first sampler alone.
            samplers = values.get("samplers") or [values["sampler"]] * own
            try:
                self.loader.load_state_dict(samplers[self.ranks.rank])
            except OtherBatchesError as error:
                self._refuse_or_warn(error, different, allow_changes)
                self.counters.batch = error.batches
            return
        if not allow_changes:
            raise ConfigError(
                f"{self.config.train.folder} holds a run of {processes} process(es), and there are "
                f"{own} now: pass --allow-changes (in Python: allow_changes=True) to continue from "
                "about the same place in the epoch, with other batches"
            )
        counters = self.counters
        counters.batch = counters.batch * processes // own
        self.loader.set_epoch(counters.epoch)
        try:
            self.loader.load_state_dict(self.loader.state_dict(counters.batch))
        except OtherBatchesError as error:
            # So many processes have fewer batches in an epoch: the place is its end.
            counters.batch = error.batches
        if self.ranks.is_first:
            logger.warning(
                "%d process(es) instead of %d: continuing after batch %d of the epoch; some "
                "utterances of this epoch are used twice and some not at all",
                own,
                processes,
                counters.batch,
            )

    def _refuse_or_warn(
        self, error: OtherBatchesError, different: Sequence[str], allow_changes: bool
    ) -> None:
        """ConfigError about data that have changed in the middle of an epoch, unless allowed."""
        paths = [line for line in different if line.startswith(("data.path", "data.old_path"))]
        where = f" ({'; '.join(paths)})" if paths else ""
        if not allow_changes:
            raise ConfigError(
                f"{self.config.train.folder}: {error}{where}, or pass --allow-changes (in Python: "
                "allow_changes=True) to continue after as many batches of the new data"
            ) from error
        logger.warning("%s: continuing after as many batches of the new data", error)

    def restore_random(self) -> None:
        """Restore the random generators in the first call after `restore`."""
        if self._random is not None:
            restore_random_state(self._random, self._device)
            self._random = None

    @property
    def _device(self) -> torch.device:
        return next(self.task.model.parameters()).device
