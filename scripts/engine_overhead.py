"""Overhead of the training engine in a step, and efficiency of several processes.

    python -m scripts.engine_overhead [--profile] [--json FILE] [section.key=value ...]
    torchrun --standalone --nproc-per-node 2 -m scripts.engine_overhead ...

Trains a model of about 20 M parameters on random features with the durations and text lengths of
read English books, in short runs over the same batches, after a warm-up with every shape:

- forward_backward: only the passes, by the first process;
- bare: with clipping and the optimiser's update;
- engine: the whole engine with its checks, counters, logs and running average;
- side_by_side (under torchrun): every process runs the engine by itself at the same time, which
  shows the cost of shared power, memory and processors without communication;
- together (under torchrun): all processes train one model, each on batches of the same shapes.

Idle processes sleep in a socket. The kinds of runs alternate, in reverse order in every other turn,
and ratios are taken within a turn, as the speed of a host drifts by more than the differences to be
measured. Prints one line of JSON: medians over the turns, and their minimum and maximum in `range`.
With several processes, the slowest one counts. `cpu_share` is processor time divided by wall-clock
time of each kind of run; below 1, other programs used the processor. 1000 s of audio per step keep
a large GPU busy; with 300 s the host limits the speed of such a model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.config import load_config
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.train.engine.distributed import Ranks, process_group
from pruned_rnnt.train.engine.task import Loader
from pruned_rnnt.train.engine.trainer import Trainer
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.speech_task import SpeechTask, prepare_encoder

WARM_UP = 2
VOCABULARY = 500
DEFAULTS = [
    "data.max_duration=1000",
    "model.encoder.layers=12",
    "model.encoder.dim=256",
    "model.encoder.heads=4",
    "model.encoder.feedforward_dim=1024",
    "model.encoder.kernel_size=31",
    "model.encoder.subsampling_channels=32",
    "model.predictor.dim=256",
    "model.joiner_dim=256",
    "optimiser.learning_rate=1e-4",
    "train.precision=bfloat16",
    "train.log_every=20",
]


def random_batches(config: ExperimentConfig, steps: int, rank: int) -> list[Batch]:
    """Batches whose shapes are the same for every rank."""
    shapes = torch.distributions.Beta(torch.tensor(3.2), torch.tensor(1.3))
    torch.manual_seed(0)
    batches = []
    for _ in range(steps):
        # Utterances of a batch come from one bucket and have similar lengths.
        longest = 17.0 * float(shapes.sample())
        count = max(1, int(config.data.max_duration / longest))
        seconds_N = (longest * (1 - 0.1 * torch.rand(count))).sort(descending=True).values
        frames_N = (100 * seconds_N).long().clamp(min=100)
        symbols_N = (3.8 * seconds_N).int().clamp(min=1)
        generator = torch.Generator().manual_seed(rank)
        size = (count, int(frames_N.max()), config.model.encoder.num_mel_bins)
        symbols = (count, int(symbols_N.max()))
        batch = Batch(
            features_NTF=torch.randn(size, generator=generator) * 3 - 7,
            feature_lengths_N=frames_N,
            targets_NU=torch.randint(1, VOCABULARY, symbols, generator=generator).int(),
            target_lengths_N=symbols_N,
            texts=("",) * count,
            ids=("",) * count,
            durations=tuple(seconds_N.tolist()),
            words=((),) * count,
        )
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


class RunOver(Exception):
    """The batches of one short run are used up; the next `run` of a trainer continues."""


class TimedBatches(Loader):
    """The batches of one run, at the end of which `RunOver` is raised.

    Attributes:
        seconds, cpu_seconds: wall-clock and processor time of a step after the warm-up.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.seconds = self.cpu_seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches[:WARM_UP]
        synchronise()
        started, started_cpu = time.perf_counter(), time.process_time()
        yield from self.batches[WARM_UP:]
        synchronise()
        steps = len(self.batches) - WARM_UP
        self.seconds = (time.perf_counter() - started) / steps
        self.cpu_seconds = (time.process_time() - started_cpu) / steps
        raise RunOver

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        return {}


class RandomTask(SpeechTask):
    """The transducer on random batches, without data, validation and files."""

    def __init__(
        self,
        config: ExperimentConfig,
        ranks: Ranks,
        device: torch.device,
        *,
        batches: Sequence[Batch],
    ) -> None:
        self.config, self.ranks = config, ranks
        self.model = TransducerModel(config.model, VOCABULARY, config.loss).to(device)
        prepare_encoder(self.model, config.train)
        self.loader = TimedBatches(batches)

    def train_loader(self) -> TimedBatches:  # type: ignore[override]
        return self.loader

    def validate(self, step: int, log: object) -> float:
        return 0.0

    def check_files(self, folder: Path) -> None: ...

    def save_files(self, folder: Path) -> None: ...


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_bare(trainer: Trainer, *, update: bool) -> None:
    """Steps of forward and backward, with or without an update, without the engine."""
    stepper, optimiser, task = trainer.stepper, trainer.optimiser, trainer.task
    task.model.train()
    for step, batch in enumerate(task.train_loader()):
        optimiser.zero_grad(set_to_none=True)
        dtype, device = stepper.dtype, stepper.device
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            losses = task.losses(batch.to(device), step)
        (losses.objective / task.size(batch).frames).backward()
        if update:
            torch.nn.utils.clip_grad_norm_(stepper.parameters, stepper.clip_norm or math.inf)
            optimiser.step()


def gpu_work(trainer: Trainer) -> dict[str, float]:
    """Number and total time of the kernels and copies of a bare step on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    loader = trainer.task.loader  # type: ignore[attr-defined]
    loader.batches = loader.batches[: WARM_UP + 1]
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled, suppress(RunOver):
        run_bare(trainer, update=True)
    done = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    seconds = sum(event.time_range.elapsed_us() for event in done) / 1e6
    steps = len(loader.batches)
    return {"gpu_launches": len(done) / steps, "gpu_seconds": seconds / steps}


class Turns:
    """Short runs of several kinds in turns, by one or by all processes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.seconds: dict[str, list[float]] = {}
        self.cpu_share: dict[str, list[float]] = {}

    def run(self, name: str, work: Callable[[], object], trainer: Trainer, *, all_: bool) -> None:
        """One run by all processes, or by the first while the others wait."""
        self.ranks.gather(0)
        seconds, share = 0.0, 1.0
        if all_ or self.ranks.is_first:
            with suppress(RunOver):
                work()
            loader = trainer.task.loader  # type: ignore[attr-defined]
            seconds, share = loader.seconds, loader.cpu_seconds / loader.seconds
        self.seconds.setdefault(name, []).append(max(self.ranks.gather(seconds)))
        self.cpu_share.setdefault(name, []).append(min(self.ranks.gather(share)))

    def ratio(self, above: str, below: str) -> list[float]:
        """Ratios of the times of two kinds of runs, turn by turn."""
        return [a / b for a, b in zip(self.seconds[above], self.seconds[below], strict=True)]


def measure(
    config: ExperimentConfig, ranks: Ranks, steps: int, repetitions: int, *, profiled: bool
) -> dict[str, Any]:
    """The row, the same in every process."""
    batches = random_batches(config, steps + WARM_UP, ranks.rank)
    make_task = functools.partial(RandomTask, batches=batches)

    def make_trainer(name: str, who: Ranks) -> Trainer:
        # A separate folder for each, so that none continues another's run.
        train = dataclasses.replace(config.train, folder=f"{config.train.folder}/{name}")
        return Trainer(dataclasses.replace(config, train=train), who, make_task=make_task)

    own = make_trainer("alone", Ranks(local_rank=ranks.local_rank))
    kinds: list[tuple[str, Callable[[], object], Trainer, bool]] = [
        ("forward_backward", lambda: run_bare(own, update=False), own, False),
        ("bare", lambda: run_bare(own, update=True), own, False),
        ("engine", own.run, own, False),
    ]
    if ranks.world_size > 1:
        common = make_trainer("together", ranks)
        kinds.append(("side_by_side", own.run, own, True))
        kinds.append(("together", common.run, common, True))
    turns = Turns(ranks)
    # Warm-up with every shape in every process: memory is allocated, kernels are planned.
    turns.run("unseen_shapes", lambda: run_bare(own, update=True), own, all_=True)
    if ranks.world_size > 1:
        turns.run("first_together", common.run, common, all_=True)  # opens connections
    for turn in range(repetitions):
        for name, work, trainer, all_ in reversed(kinds) if turn % 2 else kinds:
            turns.run(name, work, trainer, all_=all_)
    device = own.stepper.device
    row: dict[str, Any] = {
        "world_size": ranks.world_size,
        "precision": config.train.precision,
        "max_duration": config.data.max_duration,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in own.model.parameters()),
        "steps": steps,
        "turns": repetitions,
    }
    values = {f"{name}_step_seconds": seconds for name, seconds in turns.seconds.items()}
    values["overhead"] = [ratio - 1 for ratio in turns.ratio("engine", "bare")]
    if ranks.world_size > 1:
        values["efficiency"] = turns.ratio("engine", "together")
        values["side_by_side_efficiency"] = turns.ratio("engine", "side_by_side")
        values["together_against_side_by_side"] = turns.ratio("side_by_side", "together")
    row.update({name: statistics.median(several) for name, several in values.items()})
    row["range"] = {name: [min(several), max(several)] for name, several in values.items()}
    row["cpu_share"] = {k: statistics.median(several) for k, several in turns.cpu_share.items()}
    if profiled:
        row.update(gpu_work(own))
    return row


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a run")
    parser.add_argument("--turns", type=int, default=5, help="runs of each kind")
    parser.add_argument(
        "--profile", action="store_true", help="count the kernels and copies of a step on the GPU"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the row to FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, process_group() as ranks:
        # More steps than batches: only RunOver ends a run.
        settings = ["train.steps=1000000", f"train.folder={folder}"]
        config = load_config(ExperimentConfig, None, [*DEFAULTS, *options.overrides, *settings])
        measured = measure(config, ranks, options.steps, options.turns, profiled=options.profile)
        row = {"torch": torch.__version__, **measured}
    if ranks.is_first:
        print(json.dumps(row))
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return row


if __name__ == "__main__":
    main()
