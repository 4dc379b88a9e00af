"""Records the results of steps; that of the last step may still be on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pruned_rnnt.train.engine.bad_steps import BAD_STEPS, TrainingStopped, dump_bad_step
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY
from pruned_rnnt.train.engine.state import TrainingState
from pruned_rnnt.train.engine.step_report import LaunchedStep, StepReport
from pruned_rnnt.train.engine.training_log import TrainingLog


class StepRecorder:
    """Counts and logs steps, and averages the parameters after each good one.

    Attributes:
        log: takes the reports.
    """

    def __init__(
        self, state: TrainingState, checkpoints: CheckpointFolder, log: TrainingLog
    ) -> None:
        self.state = state
        self.checkpoints = checkpoints
        self.log = log
        self._last: tuple[LaunchedStep, list[Any]] | None = None

    def add(self, step: LaunchedStep, batches: list[Any]) -> None:
        """Count a step; the one before must be recorded. Records it if its result is known."""
        assert self._last is None
        self.state.counters.step += 1
        self._last = (step, batches)
        if step.is_finished:
            self.record_last()

    def record_last(self) -> None:
        """Record the last step, if it is not recorded yet; waits for its result.

        It must be called before the next update, and before anything that depends on the result of
        the step: checkpoints, validations, logs.

        Raises:
            TrainingStopped: too many consecutive steps were skipped, or training has diverged.
        """
        if self._last is not None:
            step, batches = self._last
            self._last = None
            self._record(step.report(), batches)

    def _record(self, report: StepReport, batches: list[Any]) -> None:
        """Log the step; report a skipped one, and stop after too many consecutive ones."""
        state, counters = self.state, self.state.counters
        self.log.add(report)
        if not report.problem:
            counters.consecutive_bad_steps = 0
            if state.average is not None:
                state.average.update()
            return
        counters.bad_steps += 1
        counters.consecutive_bad_steps += 1
        if not report.problem.startswith(OUT_OF_MEMORY):
            # With broken parameters, the utterances are not the cause.
            state.stop_if_diverged(self.checkpoints)
        folder = Path(state.config.train.folder) / BAD_STEPS
        shapes = [state.task.shapes(batch) for batch in batches]
        dump_bad_step(folder, counters.step, state.ranks.rank, report, shapes)
        if counters.consecutive_bad_steps >= state.config.train.max_bad_steps:
            raise TrainingStopped(
                f"training stopped at step {counters.step}: {counters.consecutive_bad_steps} steps "
                f"in a row were skipped, the last one because of: {report.problem}; see {folder}"
            )
