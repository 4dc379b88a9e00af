"""Log lines, metrics and progress bar of a training run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import RunLog, log_info, progress_bar, progress_line, step_line
from pruned_rnnt.train.engine.metric_accumulator import MetricAccumulator
from pruned_rnnt.train.engine.state import Counters
from pruned_rnnt.train.engine.step_report import StepReport
from pruned_rnnt.train.engine.train_step import Stepper

logger = logging.getLogger(__name__)


@dataclass
class TrainingLog:
    """Collects the reports of steps and logs their averages.

    Args:
        steps: of the whole run.
        loggers, settings: as for `RunLog`.

    Attributes:
        run_log: files of the run; None before `open`, and in all processes but the first one.
    """

    steps: int
    ranks: Ranks
    console: Console
    _: KW_ONLY
    loggers: Sequence[str]
    settings: Mapping[str, Any]
    run_log: RunLog | None = field(default=None, init=False)
    _metrics: MetricAccumulator = field(default_factory=MetricAccumulator, init=False)

    def open(self, stack: ExitStack, folder: Path, counters: Counters) -> None:
        """Open the files and show the progress bar until `stack` closes."""
        if self.ranks.is_first:
            redo = ("valid",) if counters.validation_due else ()
            run_log = RunLog(
                folder, counters.step, redo, loggers=self.loggers, settings=self.settings
            )
            self.run_log = stack.enter_context(run_log)
        bar = progress_bar(self.console, enabled=self.ranks.is_first)
        self._progress = stack.enter_context(bar)
        self._bar = self._progress.add_task(
            "training", total=self.steps, completed=counters.step, status=""
        )
        self._metrics = MetricAccumulator()

    def add(self, report: StepReport) -> None:
        """Count a step; the averages leave skipped steps out."""
        self._progress.advance(self._bar)
        if not report.problem:
            self._metrics.add(report)

    def paused(self) -> AbstractContextManager[None]:
        """Exclude the time of the context (a validation) from the speeds."""
        return self._metrics.paused()

    def write(self, counters: Counters, stepper: Stepper) -> None:
        """Log the averages since the last call; all processes must call."""
        values = self._metrics.averages(self.ranks)
        self._metrics = MetricAccumulator()
        if self.run_log is None:
            return
        values["learning_rate"] = float(stepper.optimiser.param_groups[0]["lr"])
        values["epoch"] = counters.epoch
        values["bad_steps"] = counters.bad_steps
        if stepper.scaler.is_enabled():
            values["grad_scale"] = float(stepper.scaler.get_scale())
        if stepper.device.type == "cuda":
            values["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.run_log.scalars("train", counters.step, values)
        status = progress_line(values)
        self._progress.update(self._bar, status=status)
        short = step_line(counters.step, self.steps, values)
        log_info(logger, short, f"step {counters.step}/{self.steps} {status}")
