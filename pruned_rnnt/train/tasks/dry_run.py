"""Dry run: find the largest batches of a configuration, and train on them before training starts.

Axes: N batch, T frames, U symbols.

A dry run has its own sampler, model and optimiser and writes nothing, so that it affects no run.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import lattice_size
from pruned_rnnt.model.kernels.available import set_mode
from pruned_rnnt.train.engine.average import ParameterMean, RunningAverage
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.memory import (
    OUT_OF_MEMORY,
    StateMemory,
    divided_memory,
    peak,
    release_memory,
    reset_peak,
    state_memory,
)
from pruned_rnnt.train.engine.random_state import seed_everything
from pruned_rnnt.train.engine.step import Stepper
from pruned_rnnt.train.engine.train_config import pick_device
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.optim.optimiser import build_optimiser
from pruned_rnnt.train.tasks.speech_task import SpeechTask

SpeechTaskMaker = Callable[[ExperimentConfig, Ranks, torch.device], SpeechTask]

GIB = 2**30
# Fraction of GPU memory for a batch; the rest is for fragmentation, NCCL and the CUDA context.
USABLE_SHARE = 0.9
# The search ends at this ratio of the smallest value that does not fit to the largest that fits.
_PRECISION = 1.05
# The first pass plans kernels and fills caches; the second one is like those of training.
_PASSES = 2
# Epochs of which a batch with data.joining is tried: each has other silences and joined utterances.
_DRAWN_EPOCHS = 8


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """A batch of the sampler, without features.

    frames: padded feature frames, N T, of both views with CR-CTC.
    lattice: padded lattice nodes, of both views, as data.max_lattice counts them.
    symbols: symbols of all references.
    longest, seconds: duration of the longest utterance and of all.
    """

    cuts: Any
    utterances: int
    frames: int
    lattice: int
    symbols: int
    longest: float
    seconds: float


# Measures of batch size, by their names in the table.
MEASURES: dict[str, Callable[[SampledBatch], float]] = {
    "padded frames": lambda batch: batch.frames,
    "longest utterance": lambda batch: batch.longest,
    "lattice nodes": lambda batch: batch.lattice,
    "symbols": lambda batch: batch.symbols,
}


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Batches of the first epoch that are the largest by each of `MEASURES`.

    batches, seconds, utterances, frames: number of scanned batches, the speech in them, its
        utterances and padded frames, see `SampledBatch`.
    complete: the epoch has no more batches.
    """

    largest: dict[str, SampledBatch]
    batches: int
    seconds: float
    utterances: int
    frames: int
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One step on a batch.

    seconds: duration of the step.
    peak: peak memory in bytes, on a CPU that of the whole process.
    problem: reason why the step was skipped, else empty.
    fits: memory did not run out.
    """

    batch: SampledBatch
    seconds: float
    peak: int
    problem: str
    fits: bool


class DryRun:
    """Model, optimiser and average of a configuration, for trial steps.

    Args:
        config: of the experiment; the argument of `scan` replaces data.max_duration.
        make_task: builds the task of the training; default: `SpeechTask`.
    """

    def __init__(self, config: ExperimentConfig, make_task: SpeechTaskMaker = SpeechTask) -> None:
        if config.train.threads > 0:
            torch.set_num_threads(config.train.threads)
        set_mode(config.train.fused_kernels)
        seed_everything(config.train.seed)
        self.config = config
        self.device = pick_device(config.train)
        self.task = make_task(config, Ranks(), self.device)
        groups = self.task.parameter_groups()
        optimiser = build_optimiser(self.task.model, config.optimiser, groups)
        clip_norm = config.optimiser.norm_limit
        self.stepper = Stepper(
            self.task, optimiser, config.train, clip_norm=clip_norm, ranks=Ranks()
        )
        # Never used, but they take memory, as in training.
        decay = config.train.average_decay
        self.average = RunningAverage(self.task.model, decay) if decay > 0 else None
        self.mean = ParameterMean(self.task.model) if config.train.mean_every > 0 else None
        self.task.model.train()

    def memory(self, processes: int = 1) -> StateMemory:
        """What a process keeps from step to step; of several with train.shard, the largest one."""
        averages, optimiser = (self.average, self.mean), self.stepper.optimiser
        if self.config.train.shard == "none":
            return state_memory(self.task.model, self.stepper.gradients, optimiser, averages)
        return divided_memory(self.task.model, optimiser, averages, processes)

    def scan(self, max_duration: float, limit: int) -> Scan:
        """The largest of the first `limit` batches of a sampler with this bound."""
        largest: dict[str, SampledBatch] = {}
        batches, seconds, utterances, frames = 0, 0.0, 0, 0
        sampled = self._sampled(max_duration)
        for batch in islice(sampled, limit):
            batches += 1
            seconds += batch.seconds
            utterances += batch.utterances
            frames += batch.frames
            for name, measure in MEASURES.items():
                if name not in largest or measure(batch) > measure(largest[name]):
                    largest[name] = batch
        return Scan(
            largest=largest,
            batches=batches,
            seconds=seconds,
            utterances=utterances,
            frames=frames,
            complete=next(sampled, None) is None,
        )

    def _sampled(self, max_duration: float) -> Iterator[SampledBatch]:
        data = dataclasses.replace(self.config.data, max_duration=max_duration)
        self.task.data.config = data
        self.loader = self.task.train_loader()
        self.loader.set_epoch(0)
        size = lattice_size(data, self.task.data.tokenizer)
        views = self.config.loss.views
        for cuts in self.loader.sampler:
            frames = [_frames(cut) for cut in cuts]
            sizes = [size(cut) for cut in cuts]
            symbols = [columns - 1 for _, columns in sizes]
            durations = [float(cut.duration) for cut in cuts]
            yield SampledBatch(
                cuts=cuts,
                utterances=len(frames),
                frames=views * len(frames) * max(frames),
                lattice=views * len(frames) * max(rows for rows, _ in sizes) * (max(symbols) + 1),
                symbols=sum(symbols),
                longest=max(durations),
                seconds=sum(durations),
            )

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Utterances, of both views with CR-CTC, and longest frames of a training's batches."""
        views = self.config.loss.views
        for epoch in count():
            self.loader.set_epoch(epoch)
            for cuts in self.loader.sampler:
                yield views * len(cuts), max(_frames(cut) for cut in cuts)

    def try_batch(self, sampled: SampledBatch) -> Trial:
        """Run forward, backward and update on a batch, in its largest forms with data.joining."""
        problem, fits, seconds, used = "", True, math.nan, 0
        for batch in self._drawn(sampled):
            release_memory()
            if (graphs := self.task.model.encoder_graphs) is not None:
                graphs.shapes.clear()  # those of larger batches would hold this one
            reset_peak(self.device)
            try:
                for _ in range(_PASSES):
                    started = time.perf_counter()
                    latest = self.stepper([batch], step=0).report().problem
                    fits = fits and not latest.startswith(OUT_OF_MEMORY)
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    seconds = time.perf_counter() - started
                problem = latest or problem
            except TrainingStopped as error:
                problem, fits = str(error), False
            used = max(used, peak(self.device))
            if not fits:
                break
        return Trial(batch=sampled, seconds=seconds, peak=used, problem=problem, fits=fits)

    def _drawn(self, sampled: SampledBatch) -> list[Batch]:
        """The batch, or those of several epochs with the most frames and the largest lattice."""
        joining = self.config.data.joining
        changes = joining.probability > 0 or joining.silence_probability > 0
        longest = largest = self.loader.dataset[(0, sampled.cuts)]
        for epoch in range(1, _DRAWN_EPOCHS if changes else 1):
            drawn = self.loader.dataset[(epoch, sampled.cuts)]
            longest = max(longest, drawn, key=_padded_frames)
            largest = max(largest, drawn, key=_padded_lattice)
        return [longest] if longest is largest else [longest, largest]

    def fits(self, max_duration: float, limit_bytes: float, scan_batches: int) -> bool:
        """Whether the largest batches with this bound take at most `limit_bytes` of memory."""
        scan = self.scan(max_duration, scan_batches)
        for batch in {id(batch): batch for batch in scan.largest.values()}.values():
            trial = self.try_batch(batch)
            if trial.peak > limit_bytes or not trial.fits:
                return False
        return True


def search_largest(fits: Callable[[float], bool], start: float, enough: float) -> float | None:
    """The largest value that fits, to 5%: doubles or halves `start`, then bisects.

    Args:
        fits: whether a value fits; if one fits, all smaller ones must fit.
        enough: larger values are not tried.

    Returns:
        None if not even 1/64 of `start` fits.
    """
    low, high = start, start
    if fits(start):
        while True:
            if low >= enough:
                return low
            high = 2 * low
            if not fits(high):
                break
            low = high
    else:
        while not fits(low / 2):
            low /= 2
            if low <= start / 64:
                return None
        low, high = low / 2, low
    while high / low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _padded_frames(batch: Batch) -> int:
    return batch.features_NTF.size(0) * batch.features_NTF.size(1)


def _padded_lattice(batch: Batch) -> int:
    return _padded_frames(batch) * (batch.targets_NU.size(1) + 1)


def _frames(cut: Any) -> int:
    """Feature frames of 10 ms, also for a cut without stored features."""
    return int(cut.num_frames) if cut.has_features else round(cut.duration * 100)
