"""Estimate of a training's duration and memory, from real steps, a validation and a checkpoint.

Everything is measured on a model of its own, in a temporary folder, so that no run is affected.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from pruned_rnnt.model.encoder_graphs import Captures
from pruned_rnnt.model.training_shapes import TrainingShapes
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.interruptions import BatchGroups
from pruned_rnnt.train.engine.memory import StateMemory, peak, reset_peak
from pruned_rnnt.train.engine.state import TrainingState
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.dry_run import DryRun, Scan, SpeechTaskMaker, Trial
from pruned_rnnt.train.tasks.speech_task import SpeechTask

# Steps that are not measured: kernels are compiled and most CUDA graphs captured in them.
_WARM_UP = {"cpu": 2, "cuda": 30}
_FEWEST_STEPS = 4
# Batches whose sizes are drawn to count CUDA graphs; later ones rarely need new graphs.
_SIZES = 5000
# Numbers of processes for which an estimate has the memory.
_DIVIDED_AMONG = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured.

    seconds_per_step: with the time for loading, scaled to the mean batch of an epoch.
    steps: number of measured steps.
    start_seconds: what happens once: from the start of the process to the first measured step,
        beyond the time of the steps before it.
    captures: of CUDA graphs after that, in the whole training.
    epoch_seconds: from the beginning of an epoch to its first batches; steps wait for it.
    validation_seconds, checkpoint_seconds: of one validation, of writing one checkpoint.
    peak: largest memory in bytes, of tensors on a GPU, on a CPU that of the process.
    """

    seconds_per_step: float
    steps: int
    start_seconds: float
    captures: Captures
    epoch_seconds: float
    validation_seconds: float
    checkpoint_seconds: float
    peak: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a training consists of: steps, steps of an epoch, validations, written checkpoints."""

    steps: int
    steps_per_epoch: float
    validations: int
    checkpoints: int

    @property
    def epochs(self) -> int:
        """Epochs that the training begins."""
        return math.ceil(self.steps / self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A prediction.

    memory: what a process keeps from step to step, by the number of processes; without train.shard
        for one process, as any number of them keep the same.
    failed: the trials of batches that cannot be trained on.
    """

    measured: Measured
    memory: dict[int, StateMemory]
    counts: Counts
    scan: Scan
    failed: tuple[Trial, ...]

    @property
    def seconds(self) -> float:
        """Duration of the whole training."""
        measured, counts = self.measured, self.counts
        return (
            measured.start_seconds
            + measured.captures.seconds
            + counts.steps * measured.seconds_per_step
            # The start has the first one.
            + (counts.epochs - 1) * measured.epoch_seconds
            + counts.validations * measured.validation_seconds
            + counts.checkpoints * measured.checkpoint_seconds
        )


def estimate(
    config: ExperimentConfig,
    make_task: SpeechTaskMaker = SpeechTask,
    *,
    scan_batches: int,
    seconds: float,
    imports: float = 0.0,
) -> Estimate:
    """Predict a training with this configuration.

    Args:
        make_task: see `DryRun`.
        scan_batches: number of batches of the first epoch among which the largest are searched.
        seconds: measure steps for about so long.
        imports: seconds from the start of a process to the training.
    """

    def make(changed: ExperimentConfig, ranks: Ranks, device: torch.device) -> SpeechTask:
        # Built with the run's own folder, where a continued fine-tuning finds its tokens; it writes
        # into the temporary one.
        task = make_task(config, ranks, device)
        task.config = changed
        return task

    with _elsewhere(config) as changed:
        started = time.perf_counter()
        trials = DryRun(changed, make)
        built = time.perf_counter() - started
        scan = trials.scan(changed.data.max_duration, scan_batches)
        counts = count(changed, scan, trials.loader.utterances)
        tried = [
            trials.try_batch(batch)
            for batch in {id(batch): batch for batch in scan.largest.values()}.values()
        ]
        measured = _Measurement(trials, counts, scan).measure(seconds)
        highest = max([measured.peak, *(trial.peak for trial in tried)])
        return Estimate(
            measured=dataclasses.replace(
                measured, peak=highest, start_seconds=measured.start_seconds + built + imports
            ),
            memory={n: trials.memory(n) for n in _processes(trials)},
            counts=counts,
            scan=scan,
            # With float16 the first loss scale may be too large, which is not an error.
            failed=tuple(t for t in tried if t.problem and "float16" not in t.problem),
        )


def _processes(trials: DryRun) -> list[int]:
    """Numbers of processes among which train.shard can divide the optimiser."""
    if trials.config.train.shard == "none":
        return [1]
    trained = sum(p.requires_grad for p in trials.task.model.parameters())
    return [n for n in _DIVIDED_AMONG if n <= trained]


def count(config: ExperimentConfig, scan: Scan, utterances: int | None) -> Counts:
    """How often a training does what, without early stopping.

    Args:
        utterances: in an epoch; None if unknown, which takes the scanned batches for an epoch.
    """
    train = config.train
    batches = float(scan.batches)
    if not scan.complete and utterances is not None:
        batches *= utterances / scan.utterances
    steps_per_epoch = max(1.0, batches / train.accumulate)
    # A run ends with a validation.
    interval = train.validate_every or steps_per_epoch
    validations = math.ceil(train.steps / interval)
    # Each validation writes a checkpoint before and after it.
    checkpoints = 2 * validations
    if train.save_every:
        checkpoints += sum(
            not train.validate_every or step % train.validate_every > 0
            for step in range(train.save_every, train.steps, train.save_every)
        )
    elif train.validate_every:
        checkpoints += math.ceil(train.steps / steps_per_epoch) - 1  # after each epoch
    return Counts(
        steps=train.steps,
        steps_per_epoch=steps_per_epoch,
        validations=validations,
        checkpoints=checkpoints,
    )


def graphs_needed(trials: DryRun, steps: int, seconds: float) -> int:
    """How many CUDA graphs a training captures in so many steps.

    In its first `_SIZES` batches, or as many of them as the sampler draws in `seconds`. The model
    then pads batches as after them.
    """
    model = trials.task.model
    if model.encoder_graphs is None:
        return 0
    shapes = TrainingShapes(model.encoder.receptive_field - 1)
    model.encoder_graphs.shapes = shapes
    found = set()
    accumulate = trials.config.train.accumulate
    batches = min(steps * accumulate, _SIZES)
    until = time.perf_counter() + seconds
    for index, (utterances, frames) in enumerate(islice(trials.sizes(), batches)):
        if time.perf_counter() > until:
            break
        model.set_step(index // accumulate)
        found.add(model.encoder_graphs.graph_of(shapes, utterances, frames))
    return len(found)


class _Measurement:
    """Steps as in the middle of a training, with its loader, on the model of a dry run."""

    def __init__(self, trials: DryRun, counts: Counts, scan: Scan) -> None:
        self.trials = trials
        self.counts = counts
        self.mean_frames = scan.frames / scan.batches
        self.config = trials.config.train
        # From the beginning of each epoch to its first batches.
        self.epoch_waits: list[float] = []
        # Random parameters must not diverge; a rate of 0 takes the same time.
        for group in trials.stepper.optimiser.param_groups:
            group["lr"] = 0.0

    def measure(self, seconds: float) -> Measured:
        trials = self.trials
        needed = graphs_needed(trials, self.counts.steps, seconds)
        reset_peak(trials.device)
        begun = time.perf_counter()
        warm_up = min(_WARM_UP[trials.device.type], self.counts.steps)
        frames, steps, others, started = 0, 0, 0.0, begun
        captured = self._captures()
        for index, batches in enumerate(self._groups()):
            if index == warm_up:
                self._wait()
                started, others = time.perf_counter(), self._other_seconds()
                captured = self._captures()
            self._step(batches, index)
            if index >= warm_up:
                steps += 1
                frames += sum(_padded_frames(batch) for batch in batches)
                measured_enough = time.perf_counter() - started >= seconds
                if steps >= _FEWEST_STEPS and measured_enough:
                    break
        self._wait()
        spent = time.perf_counter() - started - (self._other_seconds() - others)
        # A batch of twice as many frames takes about twice as long.
        views = trials.config.loss.views
        of_a_step = self.mean_frames * self.config.accumulate / (views * frames / steps)
        per_step = spent / steps * of_a_step
        captures = self._captures_after(captured, needed)
        validation, checkpoint = self._validate(), self._save()
        return Measured(
            seconds_per_step=per_step,
            steps=steps,
            start_seconds=max(0.0, started - begun - warm_up * per_step),
            captures=captures,
            epoch_seconds=mean(self.epoch_waits),
            validation_seconds=validation,
            checkpoint_seconds=checkpoint,
            peak=peak(trials.device),
        )

    def _groups(self) -> Iterator[list[Any]]:
        """The batches of steps, of as many epochs as are needed."""
        loader = self.trials.task.train_loader()
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            groups = BatchGroups(loader, self.config.accumulate, Ranks())
            begun = time.perf_counter()
            for place, (batches, _) in enumerate(groups.groups(iter(loader))):
                if place == 0:
                    self.epoch_waits.append(time.perf_counter() - begun)
                yield batches

    def _step(self, batches: list[Any], index: int) -> None:
        """A step, with the averages of the parameters."""
        trials = self.trials
        trials.stepper(batches, self.counts.steps // 2)
        if trials.average is not None:
            trials.average.update()
        if trials.mean is not None and index % self.config.mean_every == 0:
            trials.mean.add()

    def _wait(self) -> None:
        if self.trials.device.type == "cuda":
            torch.cuda.synchronize()

    def _other_seconds(self) -> float:
        """Spent so far on what is rare in a training: captures, and the beginning of epochs."""
        return sum(self.epoch_waits) + self._captures().seconds

    def _captures(self) -> Captures:
        graphs = self.trials.task.model.encoder_graphs
        return Captures(0, 0.0) if graphs is None else graphs.captures

    def _captures_after(self, earlier: Captures, needed: int) -> Captures:
        """What a training captures after the first steps, if captures take as long as here.

        Args:
            needed: of the whole training.
        """
        number, seconds = self._captures()
        more = max(0, needed - earlier.number)
        if number > earlier.number:  # the first ones take longer
            number, seconds = number - earlier.number, seconds - earlier.seconds
        return Captures(more, more * seconds / max(number, 1))

    def _validate(self) -> float:
        trials = self.trials
        started = time.perf_counter()
        with trials.average.applied() if trials.average is not None else nullcontext():
            trials.task.validate(self.counts.steps, None)
        return time.perf_counter() - started

    def _save(self) -> float:
        trials = self.trials
        state = TrainingState(
            trials.config,
            trials.task,
            trials.stepper.optimiser,
            trials.stepper.scaler,
            trials.average,
            trials.mean,
            trials.loader,
            Ranks(),
        )
        folder = CheckpointFolder(Path(self.config.folder) / "checkpoints")
        started = time.perf_counter()
        state.save(folder, score=None)
        return time.perf_counter() - started


def _padded_frames(batch: Any) -> int:
    utterances, frames = batch.features_NTF.shape[:2]
    return int(utterances * frames)


@contextmanager
def _elsewhere(config: ExperimentConfig) -> Iterator[ExperimentConfig]:
    """The configuration with a temporary folder, on the disk of the run."""
    folder = Path(config.train.folder).absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.TemporaryDirectory(prefix=".estimate-", dir=folder) as name:
        yield dataclasses.replace(config, train=dataclasses.replace(config.train, folder=name))
