"""The training loop: fetch, step, log, validate, save."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Literal

import torch
from rich.console import Console

from pruned_rnnt.config import to_yaml
from pruned_rnnt.data.batch import Batch
from pruned_rnnt.data.datamodule import DataModule
from pruned_rnnt.model.transducer import TransducerModel
from pruned_rnnt.train.average import RunningAverage
from pruned_rnnt.train.bad_steps import TrainingStopped, dump_bad_step
from pruned_rnnt.train.checkpoint import CheckpointFolder
from pruned_rnnt.train.distributed import Ranks
from pruned_rnnt.train.experiment import CONFIG_NAME, ExperimentConfig, pick_device
from pruned_rnnt.train.log import RunLog, progress_bar
from pruned_rnnt.train.optimiser import build_optimiser
from pruned_rnnt.train.pictures import band_scalars, lattice_of_example, samples_as_markdown
from pruned_rnnt.train.random_state import seed_everything
from pruned_rnnt.train.schedule import learning_rate_scale
from pruned_rnnt.train.state import TrainingState
from pruned_rnnt.train.steps import Stepper, StepReport
from pruned_rnnt.train.totals import Totals
from pruned_rnnt.train.validate import validate

logger = logging.getLogger(__name__)

Outcome = Literal["finished", "preempted"]


class Trainer:
    """One run, new or continued.

    Args:
        config: of the experiment.
        ranks: this process among all.
        console: where the progress bar goes.
        allow_changes: go on although the configuration differs from the one in the checkpoint.

    Raises:
        ConfigError: the run's folder holds checkpoints of another configuration.
        FileNotFoundError: the data are not prepared.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        ranks: Ranks | None = None,
        console: Console | None = None,
        *,
        allow_changes: bool = False,
    ) -> None:
        self.config = config
        self.ranks = ranks or Ranks()
        self.console = console or Console()
        if config.train.threads > 0:
            torch.set_num_threads(config.train.threads)
        self.data = DataModule(config.data, rank=self.ranks.rank, world_size=self.ranks.world_size)
        # All processes start from the same parameters, and drop out different units.
        seed_everything(config.train.seed)
        device = pick_device(config.train, self.ranks.local_rank)
        self.model = TransducerModel(config.model, len(self.data.tokenizer), config.loss).to(device)
        seed_everything(config.train.seed + self.ranks.rank)
        self.optimiser = build_optimiser(self.model, config.optimiser)
        self.stepper = Stepper(
            self.model,
            self.optimiser,
            config.train,
            clip_norm=config.optimiser.clip_norm,
            ranks=self.ranks,
        )
        decay = config.train.average_decay
        self.average = RunningAverage(self.model, decay) if decay > 0 else None
        self.state = TrainingState(
            config,
            self.model,
            self.optimiser,
            self.stepper.scaler,
            self.average,
            self.data.train_loader(),
            self.ranks,
        )
        self.checkpoints = CheckpointFolder(
            config.folder / "checkpoints", config.train.keep_last, config.train.keep_best
        )
        newest = self.checkpoints.load_newest()
        if newest is not None:
            self.state.restore(newest, allow_changes=allow_changes)
        self.totals = Totals()
        self.log: RunLog | None = None
        self._stop_requested = False

    def run(self) -> Outcome:
        """Train until `train.steps`, or until SIGTERM asks to stop."""
        config, counters = self.config.train, self.state.counters
        with ExitStack() as stack:
            stack.enter_context(self._stopping_at_sigterm())
            self._open_logs(stack)
            while counters.step < config.steps:
                for batches in self._steps_of_epoch():
                    self._set_learning_rate()
                    report = self.stepper(batches, counters.step)
                    self._account(report, batches)
                    if self._due(config.log_every):
                        self._log_training()
                    if self._due(config.validate_every):
                        self._validate_and_save()
                    elif self._due(config.save_every):
                        self.state.save(self.checkpoints, score=None)
                    if self._stop_agreed():
                        self.state.save(self.checkpoints, score=None)
                        return "preempted"
                    if counters.step >= config.steps:
                        break
                else:
                    self._end_epoch()
            if not self.checkpoints.path(counters.step).is_file():
                self._validate_and_save()
        return "finished"

    def _steps_of_epoch(self) -> Iterator[list[Batch]]:
        """Batches of each step which is left of this epoch."""
        self.state.loader.set_epoch(self.state.counters.epoch)
        # Making workers draws from torch's generator; the run must not depend on when that is.
        with torch.random.fork_rng(devices=[]):
            batches = iter(self.state.loader)
        self.state.restore_random()
        self.model.train()
        while group := list(itertools.islice(batches, self.config.train.accumulate)):
            self.state.counters.batch += len(group)
            yield group

    def _set_learning_rate(self) -> None:
        counters = self.state.counters
        scale = learning_rate_scale(
            self.config.schedule, counters.step, counters.epoch, self.config.train.steps
        )
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.optimiser.learning_rate * scale

    def _account(self, report: StepReport, batches: list[Batch]) -> None:
        """Count the step; report one that was not made, and give up after too many in a row."""
        counters = self.state.counters
        counters.step += 1
        self.progress.advance(self.task)
        if not report.problem:
            counters.bad_in_row = 0
            self.totals.add(report)
            if self.average is not None:
                self.average.update()
            return
        counters.bad_steps += 1
        counters.bad_in_row += 1
        folder = self.config.folder / "bad_steps"
        dump_bad_step(folder, counters.step, self.ranks.rank, report, batches)
        if counters.bad_in_row >= self.config.train.max_bad_steps:
            raise TrainingStopped(
                f"training stopped at step {counters.step}: {counters.bad_in_row} steps in a row "
                f"had {report.problem}; see {folder}"
            )

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps is due; 0 is left to the end of epochs."""
        return every > 0 and self.state.counters.step % every == 0

    def _end_epoch(self) -> None:
        counters = self.state.counters
        counters.epoch += 1
        counters.batch = 0
        self.state.loader.set_epoch(counters.epoch)
        if self.config.train.validate_every == 0:
            self._validate_and_save()
        elif self.config.train.save_every == 0:
            self.state.save(self.checkpoints, score=None)

    def _log_training(self) -> None:
        counters = self.state.counters
        values = self.totals.averages(self.ranks)
        self.totals = Totals()
        if self.log is None:
            return
        values["learning_rate"] = float(self.optimiser.param_groups[0]["lr"])
        values["epoch"] = counters.epoch
        if self.stepper.scaler.is_enabled():
            values["grad_scale"] = float(self.stepper.scaler.get_scale())
        self.log.scalars("train", counters.step, values)
        line = (
            f"epoch {counters.epoch} loss {values.get('total_per_frame', float('nan')):.4f} "
            f"lr {values['learning_rate']:.2e} {values['steps_per_second']:.2f} steps/s"
        )
        self.progress.update(self.task, status=line)
        logger.info("step %d/%d %s", counters.step, self.config.train.steps, line)

    def _validate_and_save(self) -> None:
        step = self.state.counters.step
        with (
            self.totals.paused(),
            self.average.applied() if self.average is not None else nullcontext(),
        ):
            report = validate(
                self.model,
                self.data.valid_loader(),
                self.data.tokenizer,
                step=step,
                ranks=self.ranks,
            )
        if self.log is not None:
            band = band_scalars(report, self.config.loss.rnnt_type)
            self.log.scalars("valid", step, {**report.losses, "wer": report.errors.rate, **band})
            logger.info(
                "step %d validation: loss %.4f WER %s", step, report.losses["total"], report.errors
            )
            figure = lattice_of_example(report, self.data.tokenizer, f"step {step}")
            if figure is not None:
                self.log.figure("valid/lattice", step, figure)
            self.log.text("valid/samples", step, samples_as_markdown(report.samples))
        self.state.save(self.checkpoints, score=report.errors.rate)

    def _open_logs(self, stack: ExitStack) -> None:
        folder, step = self.config.folder, self.state.counters.step
        if self.ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_NAME).write_text(to_yaml(self.config), encoding="utf-8")
            self.data.tokenizer.save(folder / "tokens")
            self.log = stack.enter_context(RunLog(folder, step))
        self.progress = stack.enter_context(progress_bar(self.console, enabled=self.ranks.is_first))
        self.task = self.progress.add_task(
            "training", total=self.config.train.steps, completed=step, status=""
        )
        self.totals = Totals()
        logger.info(
            "%s at step %d of %d: %.2f M parameters on %s, %d process(es)",
            "continuing" if step else "starting",
            step,
            self.config.train.steps,
            sum(p.numel() for p in self.model.parameters()) / 1e6,
            self.stepper.device,
            self.ranks.world_size,
        )

    def _stop_agreed(self) -> bool:
        """Whether any process was asked to stop; all of them learn it after the same step."""
        (requests,) = self.ranks.sum([float(self._stop_requested)])
        return requests > 0

    @contextmanager
    def _stopping_at_sigterm(self) -> Iterator[None]:
        def request_stop(signum: int, frame: FrameType | None) -> None:
            self._stop_requested = True

        before = signal.signal(signal.SIGTERM, request_stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
