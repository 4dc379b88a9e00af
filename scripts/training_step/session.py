"""A trainer of one version of pruned_rnnt on random batches, trained in short timed runs.

The version is the one that `import pruned_rnnt` finds; older ones keep classes in other modules.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from scripts.training_step.batches import FRAMES_PER_SECOND, BatchLengths
from scripts.training_step.kernels import Kernel, read_trace

VOCABULARY = 500
# Steps before the timed ones of a run: the GPU may have been idle before.
LEAD = 2
# The modules that define each name: in this version, then in 6cd4554.
_MODULES = {
    "load_config": ("pruned_rnnt.config.load",),
    "ExperimentConfig": ("pruned_rnnt.train.experiment",),
    "Batch": ("pruned_rnnt.data.input.batch", "pruned_rnnt.data.batch"),
    "TransducerModel": ("pruned_rnnt.model.speech_model", "pruned_rnnt.model.transducer"),
    "Ranks": ("pruned_rnnt.train.engine.distributed", "pruned_rnnt.train.distributed"),
    "SpeechTask": ("pruned_rnnt.train.tasks.speech_task", "pruned_rnnt.train.speech"),
    "add_adapters": ("pruned_rnnt.model.lora",),
    "Trainer": ("pruned_rnnt.train.engine.trainer", "pruned_rnnt.train.trainer"),
}


def imported(name: str) -> Any:
    """A class or function of the version, by its name.

    Raises:
        ImportError: no module has it.
    """
    for module in _MODULES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
    import pruned_rnnt

    raise ImportError(
        f"{pruned_rnnt.__file__} has no {name} in {' or '.join(_MODULES[name])}; add the module "
        "of this version to _MODULES"
    )


def _count_batches(graphs: Any, lengths: Sequence[BatchLengths], steps: int) -> None:
    """Let a trainer pad its batches as after so many steps with them."""
    if graphs is None or "step" in signature(graphs.shapes.shape_of).parameters:
        return  # before b054498e, shapes followed from the number of the step
    for step in range(steps):
        utterances, frames, _ = lengths[step % len(lengths)].shape
        graphs.shapes.shape_of(utterances, frames)


class RunOver(Exception):
    """The batches of one run are used up; the next `run` of the trainer continues."""


class TimedBatches:
    """The loader of the trainer: batches of one run, at the end of which `RunOver` is raised.

    batches: of the next run. lead: number of them before the timed ones.
    seconds: wall-clock time of a timed step of the last run.
    """

    def __init__(self) -> None:
        self.batches: Sequence[Any] = ()
        self.lead = 0
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches[: self.lead]
        synchronise()
        started = time.perf_counter()
        yield from self.batches[self.lead :]
        synchronise()
        self.seconds = (time.perf_counter() - started) / (len(self.batches) - self.lead)
        raise RunOver

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        return {}


class RecordingStepper:
    """The trainer's stepper, which keeps what it returns for the steps of a run."""

    def __init__(self, stepper: Any) -> None:
        self.wrapped = stepper
        self.steps: list[Any] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.steps.append(self.wrapped(*arguments, **options))
        return self.steps[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class Run(NamedTuple):
    """seconds: of a timed step. losses: of every step, per encoder frame."""

    seconds: float
    losses: list[float]


class Profile(NamedTuple):
    """Steps of `seconds` each, measured without the profiler; their kernels, measured with it.

    busy_seconds: time of a step in which at least one kernel ran.
    kernels: calls and seconds of each kernel in a step.
    """

    seconds: float
    busy_seconds: float
    kernels: list[Kernel]

    @classmethod
    def read(cls, values: Sequence[Any]) -> Profile:
        """The profile that a worker has sent as JSON."""
        seconds, busy_seconds, kernels = values
        return cls(seconds, busy_seconds, [Kernel(*kernel) for kernel in kernels])


class Session:
    """A trainer, its model and its batches.

    Args:
        overrides: `section.key=value` of the experiment.
        lengths: of each batch.
        folder: an empty folder for the files of the run.
        at_step: the number of steps that the trainer counts as done before, all with these batches.
        ranks: processes that train together; default: this process alone.
        loader: of batches, which raises `RunOver` at its end; default: random ones for `run`.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        lengths: Sequence[BatchLengths],
        folder: Path,
        *,
        at_step: int,
        ranks: Any = None,
        loader: Any = None,
    ) -> None:
        # More steps than will be made: only RunOver ends a run.
        last = ["train.steps=100000000", f"train.folder={folder}"]
        config = imported("load_config")(imported("ExperimentConfig"), None, [*overrides, *last])
        if config.train.accumulate != 1:
            raise ValueError(
                f"train.accumulate is {config.train.accumulate}, needs 1: a step is timed by batch"
            )
        rank = 0 if ranks is None else ranks.rank
        bins = config.model.encoder.num_mel_bins
        self.batches = [
            random_batch(batch, bins, seed=len(lengths) * rank + index)
            for index, batch in enumerate(lengths if loader is None else ())
        ]
        self.folder = folder
        self.loader = loader or TimedBatches()
        self.trainer = imported("Trainer")(
            config,
            ranks,
            Console(quiet=True),
            make_task=partial(_task_class(), loader=self.loader),
        )
        self.trainer.state.counters.step = at_step
        _count_batches(self.trainer.task.model.encoder_graphs, lengths, at_step)
        self.stepper = self.trainer.stepper = RecordingStepper(self.trainer.stepper)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.stepper.device
        return device

    def run(self, count: int | None = None, lead: int = LEAD) -> Run:
        """Train on the first `count` batches (default: all), after `lead` steps without timing."""
        self.loader.batches = [*self.batches[:lead], *self.batches[:count]]
        self.loader.lead = min(lead, len(self.batches))
        self.stepper.steps.clear()
        with suppress(RunOver):
            raise RuntimeError(f"training ended before its batches did: {self.trainer.run()}")
        # 6cd4554 returns the report itself.
        reports = [
            step.report() if hasattr(step, "report") else step for step in self.stepper.steps
        ]
        losses = [float(report.sums["total"]) / report.size.frames for report in reports]
        return Run(self.loader.seconds, losses)

    def profile(self, count: int) -> Profile:
        """Profile a run over the first `count` batches on the GPU."""
        seconds = self.run(count).seconds
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.run(count, lead=0)
        path = self.folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        busy_seconds, kernels = read_trace(path, steps=count)
        path.unlink()
        return Profile(seconds, busy_seconds, kernels)

    def about(self) -> dict[str, Any]:
        """Facts for the row: device, model, memory used so far, and skipped steps.

        `losses`: `native` or `fallback`, the kernels that compute them.
        """
        from pruned_rnnt import backend_report

        losses = backend_report().partition(f"\n{self.device.type}: ")[2].split()[0]
        on_gpu = self.device.type == "cuda"
        peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
        allocated, reserved = (peak() / 2**30 if on_gpu else None for peak in peaks)
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            "losses": losses,
            "parameters": sum(p.numel() for p in self.trainer.model.parameters()),
            "peak_allocated_gib": allocated,
            "peak_reserved_gib": reserved,
            "skipped_steps": self.trainer.state.counters.bad_steps,
        }


def _task_class() -> Any:
    class RandomTask(imported("SpeechTask")):  # type: ignore[misc]
        """The transducer on random batches, without data, validation and files."""

        def __init__(
            self, config: Any, ranks: Any, device: torch.device, *, loader: TimedBatches
        ) -> None:
            self.config, self.ranks, self.loader = config, ranks, loader
            self.model = imported("TransducerModel")(config.model, VOCABULARY, config.loss)
            if config.finetune.lora.rank > 0:
                imported("add_adapters")(self.model.encoder, config.finetune.lora)
            self.model.to(device)
            self.model.batch_seconds = config.data.max_duration * ranks.world_size
            module = importlib.import_module(imported("SpeechTask").__module__)
            # 6cd4554 does not have it; it only compiled encoders, which is not measured.
            if hasattr(module, "prepare_encoder"):
                module.prepare_encoder(self.model, config.train)

        def train_loader(self) -> TimedBatches:
            return self.loader

        def validate(self, step: int, log: object) -> float:
            return 0.0

        def check_files(self, folder: Path) -> None: ...

        def save_files(self, folder: Path) -> None: ...

    return RandomTask


def random_batch(
    lengths: BatchLengths, bins: int, seed: int, features_NTF: torch.Tensor | None = None
) -> Any:
    """A batch with these features, by default random ones, and random tokens."""
    generator = torch.Generator().manual_seed(seed)
    count, frames, tokens = lengths.shape
    if features_NTF is None:
        features_NTF = torch.randn((count, frames, bins), generator=generator) * 3 - 7
    batch = imported("Batch")(
        features_NTF=features_NTF,
        feature_lengths_N=torch.from_numpy(lengths.frames_N),
        targets_NU=torch.randint(1, VOCABULARY, (count, tokens), generator=generator).int(),
        target_lengths_N=torch.from_numpy(lengths.tokens_N).int(),
        texts=("",) * count,
        ids=tuple(f"{seed}-{index}" for index in range(count)),
        durations=tuple((lengths.frames_N / FRAMES_PER_SECOND).tolist()),
        words=((),) * count,
    )
    return batch.pin_memory() if torch.cuda.is_available() else batch


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
