"""The training loop: fetch, step, log, validate, save."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from pruned_rnnt import backend_summary
from pruned_rnnt.config.load import ConfigError, to_dict
from pruned_rnnt.config.written import to_yaml
from pruned_rnnt.data.input.worker_signals import WorkerDiedError
from pruned_rnnt.model.kernels import prebuilt
from pruned_rnnt.model.kernels.available import set_mode
from pruned_rnnt.run.folder import RunFolder, require_writable
from pruned_rnnt.system.device import start_device
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from pruned_rnnt.system.whole_files import write_lines
from pruned_rnnt.train.engine.average import ParameterMean, RunningAverage
from pruned_rnnt.train.engine.bad_steps import TrainingStopped, dump_bad_step
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.interruptions import (
    BatchGroups,
    StopSignals,
    is_of_exchange,
    stopped_without_process,
    stopped_without_worker,
)
from pruned_rnnt.train.engine.log import EarlyWarnings, RunLog, log_file
from pruned_rnnt.train.engine.loggers import MetricLogger, require_loggers
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY, StateMemory, peak, state_memory
from pruned_rnnt.train.engine.random_state import seed_everything
from pruned_rnnt.train.engine.run_files import add_version
from pruned_rnnt.train.engine.state import TrainingState
from pruned_rnnt.train.engine.step import SCALE_HALVED, Step, Stepper
from pruned_rnnt.train.engine.task import Task
from pruned_rnnt.train.engine.train_config import pick_device
from pruned_rnnt.train.optim.optimiser import build_optimiser
from pruned_rnnt.train.optim.schedule import learning_rate_scale
from pruned_rnnt.train.optim.sharded import build_sharded_optimiser

logger = logging.getLogger(__name__)

Outcome = Literal["finished", "preempted"]


class Trainer:
    """One run, new or continued.

    Args:
        config: the sections of `task.RunConfig` and those that the task reads.
        ranks: rank of this process and number of processes.
        console: shows the progress bar.
        allow_changes: continue although the configuration differs from that of the checkpoint.
        make_task: builds the task from the configuration, the ranks and the device.
        optimiser: of the task's parameters; None for the configured one.
        own_log: another logger of the run.
        keeps_modes: leave the modules of a model in training mode in the modes that they have.

    Raises:
        ConfigError: the run's folder holds checkpoints of another task or configuration.
        FileNotFoundError: the data are not prepared.
        MissingPackageError: the package of a logger is not installed.
    """

    def __init__(
        self,
        config: Any,
        ranks: Ranks | None = None,
        console: Console | None = None,
        *,
        allow_changes: bool = False,
        make_task: Callable[[Any, Ranks, torch.device], Task],
        optimiser: torch.optim.Optimizer | None = None,
        own_log: MetricLogger | None = None,
        keeps_modes: bool = False,
    ) -> None:
        self.config = config
        self.folder = Path(config.train.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"train.folder is {self.folder}, which is no folder: name another")
        require_loggers(config.train.loggers)
        self._own_log = own_log
        self._keeps_modes = keeps_modes
        self.ranks = ranks or Ranks()
        self.console = console or Console()
        # The run's log is opened by `run`, once it is certain that there is a run.
        self.early_warnings = EarlyWarnings()
        with self.early_warnings:
            self._build(make_task, optimiser, allow_changes=allow_changes)

    def _build(
        self,
        make_task: Callable[[Any, Ranks, torch.device], Task],
        optimiser: torch.optim.Optimizer | None,
        *,
        allow_changes: bool,
    ) -> None:
        """Build the parts of the run, and restore its newest checkpoint."""
        config = self.config
        if config.train.threads > 0:
            torch.set_num_threads(config.train.threads)
        set_mode(config.train.fused_kernels)
        # All processes start from the same parameters, but drop out different units.
        seed_everything(config.train.seed)
        device = pick_device(config.train, self.ranks.local_rank)
        start_device(device, compiles=not prebuilt.is_installed())
        self.task = make_task(config, self.ranks, device)
        self.task.check_files(self.folder)
        self.model = self.task.model
        seed_everything(config.train.seed + self.ranks.rank)
        self.optimiser = optimiser or self._new_optimiser()
        if optimiser is not None and config.train.shard != "none":
            raise ValueError(
                f"train.shard is {config.train.shard}, which divides the optimisers of this "
                "package only: leave it out, or give an OptimiserConfig instead of an optimiser"
            )
        self.stepper = Stepper(
            self.task,
            self.optimiser,
            config.train,
            clip_norm=config.optimiser.norm_limit,
            ranks=self.ranks,
        )
        decay = config.train.average_decay
        sharers = self.ranks if config.train.shard == "optimiser" else Ranks()
        self.average = RunningAverage(self.model, decay, sharers) if decay > 0 else None
        # All processes have the same parameters.
        keeps_mean = config.train.mean_every > 0 and (self.ranks.is_first or sharers is self.ranks)
        self.mean = ParameterMean(self.model, ranks=sharers) if keeps_mean else None
        self.state = TrainingState(
            config,
            self.task,
            self.optimiser,
            self.stepper.scaler,
            self.average,
            self.mean,
            self.task.train_loader(),
            self.ranks,
        )
        self.checkpoints = CheckpointFolder(
            RunFolder(self.folder).checkpoints, config.train.keep_last, config.train.keep_best
        )
        self._known_checkpoints = self.checkpoints.paths()
        self.state.restore_newest(self.checkpoints, allow_changes=allow_changes)
        self.stop_signals = StopSignals(show_note=self.ranks.is_first)
        self.groups = BatchGroups(self.state.loader, config.train.accumulate, self.ranks)
        # The newest step, until its result is recorded.
        self._unrecorded: Step | None = None

    def _new_optimiser(self) -> torch.optim.Optimizer:
        """The configured optimiser; one process has nothing to divide."""
        config, groups = self.config.optimiser, self.task.parameter_groups()
        if self.config.train.shard == "none" or self.ranks.world_size == 1:
            return build_optimiser(self.model, config, groups)
        ranks = self.ranks
        return build_sharded_optimiser(self.model, config, groups, ranks.rank, ranks.world_size)

    def memory(self) -> StateMemory:
        """The memory that this process keeps from step to step."""
        averages = (self.average, self.mean)
        return state_memory(self.model, self.stepper.gradients, self.optimiser, averages)

    def run(self) -> Outcome:
        """Train until `train.steps`, or until validations no longer improve for as long as
        `train.early_stopping_patience`, or until `stop_signals` receives a signal in some process.

        Raises:
            TrainingStopped: training cannot continue.
            CheckpointError: another process has trained the run since this trainer was built.
            KeyboardInterrupt: a second Ctrl-C.
        """
        with ExitStack() as stack:
            stack.enter_context(self.stop_signals)
            self._open_logs(stack)
            try:
                return self._train(stack)
            except WorkerDiedError as error:
                if self.ranks.world_size == 1:
                    self._record()
                    self.state.save(self.checkpoints, score=None)
                    if self.stop_signals.received is not None:  # it may have reached the worker
                        return self._preempted()
                reason = self.groups.reason(error)
                raise stopped_without_worker(self.state.counters.step, reason) from error
            except RuntimeError as error:
                if self.ranks.world_size == 1 or not is_of_exchange(error):
                    raise
                raise stopped_without_process(self.state.counters.step, error) from error

    def _train(self, stack: ExitStack) -> Outcome:
        config, counters = self.config.train, self.state.counters
        if counters.validation_due:
            self._validate_and_save()
        while counters.step < config.steps and not self._stops_early():
            for batches in self._steps_of_epoch(stack):
                self._set_learning_rate()
                stop = self.stop_signals.received is not None or bool(self.groups.lost_worker)
                self._unrecorded = step = self.stepper(
                    batches, counters.step, stop_requested=stop, before_update=self._record
                )
                counters.step += 1
                at_end = counters.step >= config.steps
                if step.is_finished or step.stop_requested or at_end or self._anything_due():
                    self._record()
                counters.validation_due = at_end or self._due(config.validate_every)
                if self._due(config.log_every):
                    self.state.stop_if_diverged(self.checkpoints)
                    with self._saved_on_errors():
                        self._write_log()
                if step.stop_requested:
                    return self._stop()
                if counters.validation_due:
                    self._save_and_validate()
                else:
                    if self._due(config.picture_every):
                        with self._saved_on_errors():
                            self._show()
                    if self._due(config.save_every):
                        self.state.save(self.checkpoints, score=None)
                if at_end or self._stops_early():
                    break
            else:
                self._record()
                self._end_epoch()
        if counters.step < config.steps and self.ranks.is_first:
            logger.info(
                "training ends at step %d: no better validation than %.4f in the last %d",
                counters.step,
                counters.best_score,
                counters.validations_since_best,
            )
        return "finished"

    def _record(self) -> None:
        """Record the newest step, if it is not recorded yet; waits for its result.

        Log it, and average the parameters if it was good. It must be called before the next update,
        and before anything that depends on the result of the step: checkpoints, validations, logs.

        Raises:
            TrainingStopped: too many consecutive steps were skipped, or training has diverged.
        """
        if self._unrecorded is None:
            return
        step, self._unrecorded = self._unrecorded, None
        report, counters = step.report(), self.state.counters
        self.log.add(report)
        if not report.problem:
            counters.consecutive_bad_steps = 0
            if self.average is not None:
                self.average.update()
            if self.mean is not None and self._due(self.config.train.mean_every):
                self.mean.add()
            return
        counters.bad_steps += 1
        # The halvings have a limit of their own, after which the problem is another one.
        counters.consecutive_bad_steps += report.problem != SCALE_HALVED
        if not report.problem.startswith(OUT_OF_MEMORY):
            # With broken parameters, the utterances are not the cause. Of a result that is read
            # late, the buffers are those after the passes of the next step, which may be undone.
            self.state.stop_if_diverged(self.checkpoints, buffers=not self.stepper.reads_late)
        folder = RunFolder(self.folder).bad_steps
        shapes = [self.task.shapes(batch) for batch in step.batches]
        dump_bad_step(folder, counters.step, self.ranks.rank, report, shapes)
        if counters.consecutive_bad_steps >= self.config.train.max_bad_steps:
            raise TrainingStopped(
                f"training stopped at step {counters.step}: {counters.consecutive_bad_steps} steps "
                f"in a row were skipped, the last one because of: {report.problem}; see {folder}"
            )

    @contextmanager
    def _saved_on_errors(self) -> Iterator[None]:
        """Save before an error in a log ends the run, as the steps until then are good.

        Of several processes, none saves: saving needs all.
        """
        try:
            yield
        except Exception:
            if self.ranks.world_size == 1:
                try:
                    self.state.save(self.checkpoints, score=None)
                except Exception as error:  # the first one is the one to show
                    logger.warning("the last steps could not be saved: %s", error)
            raise

    def _write_log(self) -> None:
        """Log the averages since the last call; all processes must call."""
        values = self.log.averages()
        if not self.ranks.is_first:
            return
        counters, scaler = self.state.counters, self.stepper.scaler
        values["learning_rate"] = float(self.optimiser.param_groups[0]["lr"])
        values["epoch"] = counters.epoch
        values["bad_steps"] = counters.bad_steps
        if scaler.is_enabled():
            values["grad_scale"] = float(scaler.get_scale())
        if self.stepper.device.type == "cuda":
            values["gpu_memory_gib"] = peak(self.stepper.device) / 2**30
        self.log.write(counters.step, values)

    def _stops_early(self) -> bool:
        """Whether enough validations have passed without a better score."""
        patience: int = self.config.train.early_stopping_patience
        return 0 < patience <= self.state.counters.validations_since_best

    def _stop(self) -> Outcome:
        """Save between two steps, in all processes, as one of them was requested to stop."""
        self.state.save(self.checkpoints, score=None)
        if self.groups.lost_worker:
            raise stopped_without_worker(self.state.counters.step, self.groups.lost_worker)
        return self._preempted()

    def _preempted(self) -> Outcome:
        if self.ranks.is_first:
            logger.warning("stopped %s after step %d", self.stop_signals, self.state.counters.step)
        return "preempted"

    def _steps_of_epoch(self, stack: ExitStack) -> Iterator[list[Any]]:
        """The batches of each remaining step of this epoch."""
        self.state.loader.set_epoch(self.state.counters.epoch)
        # Starting workers draws from torch's generator; the run must not depend on when they start.
        with torch.random.fork_rng(devices=[]):
            batches = iter(self.state.loader)
        self.groups.watch_workers(stack)
        self.state.restore_random()
        if not (self._keeps_modes and self.model.training):
            self.model.train()
        for group, count in self.groups.groups(batches):
            self.state.counters.batch += count
            yield group

    def _set_learning_rate(self) -> None:
        counters = self.state.counters
        scale = learning_rate_scale(
            self.config.schedule, counters.step, counters.epoch, self.config.train.steps
        )
        for number, group in enumerate(self.optimiser.param_groups):
            if "rate" not in group:
                raise ValueError(
                    f"group {number} of the optimiser, with the learning rate {group['lr']:g}, was "
                    "added or loaded after the Trainer was built, so that it has no peak of the "
                    "schedule: give the optimiser all groups and states before"
                )
            group["lr"] = self.config.optimiser.learning_rate * scale * group["rate"]

    def _due(self, every: int) -> bool:
        """Whether something is due that is done every `every` steps; never for 0."""
        return every > 0 and self.state.counters.step % every == 0

    def _anything_due(self) -> bool:
        """Whether a log line, validation, checkpoint or picture follows this step."""
        config = self.config.train
        periods = (config.log_every, config.validate_every, config.save_every, config.picture_every)
        return any(map(self._due, periods))

    def _end_epoch(self) -> None:
        counters = self.state.counters
        if counters.batch == 0:
            raise TrainingStopped(
                f"training stopped in epoch {counters.epoch}: the training set has no batch"
            )
        counters.epoch += 1
        counters.batch = 0
        self.state.loader.set_epoch(counters.epoch)
        at_epochs = self.config.train.validate_every == 0
        if at_epochs and counters.validated_step != counters.step:
            self._save_and_validate()
        elif at_epochs or self.config.train.save_every == 0:
            # Also after a validation: its checkpoint would read the whole epoch again.
            self.state.save(self.checkpoints, score=None)

    def _save_and_validate(self) -> None:
        """Save before the validation, so that no training is lost if it fails.

        A continued run repeats the validation; see `Counters.validation_due`.
        """
        if self.task.validates:
            self.state.counters.validation_due = True
            self.state.save(self.checkpoints, score=None)
        self._validate_and_save()

    def _validate_and_save(self) -> None:
        with self._averaged():
            log = self.log if self.ranks.is_first else None
            score = self.task.validate(self.state.counters.step, log)
        self.state.counters.validation_due = False
        self.state.counters.validated_step = self.state.counters.step
        if score is not None and not math.isfinite(score):
            if self.ranks.is_first:
                logger.warning(
                    "step %d validation: the score is %s, which counts as no improvement",
                    self.state.counters.step,
                    score,
                )
            self.state.counters.add_score(math.inf)
            score = None  # infinity and NaN cannot be compared
        elif score is not None:
            self.state.counters.add_score(score)
        self.state.save(self.checkpoints, score=score)

    def _show(self) -> None:
        with self._averaged():
            if self.ranks.is_first:
                self.task.show(self.state.counters.step, self.log)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Swap in the averaged parameters; leave the time of the context out of the speeds."""
        applied: AbstractContextManager[None] = (
            self.average.applied() if self.average is not None else nullcontext()
        )
        with self.log.paused(), applied:
            yield

    def _open_logs(self, stack: ExitStack) -> None:
        step = self.state.counters.step
        if self.ranks.is_first:
            require_writable(self.folder, "choose another train.folder")
            stack.enter_context(exclusive_folder_lock(self.folder, "is being trained"))
            self.checkpoints.refuse_newer(step, self._known_checkpoints)
        stack.enter_context(log_file(self.folder, self.ranks.rank, self.early_warnings))
        if self.ranks.is_first:
            write_lines(RunFolder(self.folder).config, [to_yaml(self.config).removesuffix("\n")])
            add_version(self.folder, step)
            self.task.save_files(self.folder)
        self.log = stack.enter_context(
            RunLog(
                self.folder,
                step,
                ("valid",) if self.state.counters.validation_due else (),
                loggers=self.config.train.loggers,
                settings=to_dict(self.config),
                own=self._own_log,
                ranks=self.ranks,
                steps=self.config.train.steps,
                console=self.console,
            )
        )
        logger.info(
            "%s at step %d of %d: %.2f M parameters, %s, processes: %d",
            "continuing" if step else "starting",
            step,
            self.config.train.steps,
            sum(p.numel() for p in self.model.parameters()) / 1e6,
            self.stepper.device,
            self.ranks.world_size,
        )
        device = self.stepper.device
        logger.info("kernels of the losses on %s: %s", device.type, backend_summary(device.type))
        if self.optimiser.state:  # one of the user's own may allocate it in its first step
            logger.info("keeps %s", self.memory())
        for note in self.task.notes():
            logger.info(note)
        warm_up = self.config.schedule.warm_up_steps
        if warm_up >= self.config.train.steps and self.ranks.is_first:
            logger.warning(
                "schedule.warm_up_steps is %d and train.steps %d, so that the learning rate never "
                "reaches optimiser.learning_rate: lower schedule.warm_up_steps",
                warm_up,
                self.config.train.steps,
            )
