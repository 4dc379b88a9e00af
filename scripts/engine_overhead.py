"""What the training engine adds to a step, and what several processes lose to each other.

    python -m scripts.engine_overhead [--steps 60] [--json FILE] [section.key=value ...]
    torchrun --nproc-per-node 2 -m scripts.engine_overhead ...

A model of some 20 M parameters is trained on random features with the durations and text lengths
of read English books, several times over the same batches: with clipping and the optimiser's
update, while every shape is new; forward and backward alone; with the update again; the whole
engine with its checks, counters, logs and running average. Under torchrun the first process does
this alone, then all of them train together on batches of the same shapes. One line of JSON; times
are means over the steps after the warm-up, of repeated runs the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.config import load_config
from pruned_rnnt.data.batch import Batch
from pruned_rnnt.model.transducer import TransducerModel
from pruned_rnnt.train.distributed import Ranks, process_group
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.speech import SpeechTask
from pruned_rnnt.train.task import Loader
from pruned_rnnt.train.trainer import Trainer

WARM_UP = 10
VOCABULARY = 500
DEFAULTS = [
    "data.max_duration=300",
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
        # Utterances of a batch come from one bucket: they are about as long as each other.
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


class TimedBatches(Loader):
    """The batches of one epoch; `seconds`: of a step, from the warm-up's end to the last batch."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        started, last = 0.0, len(self.batches) - 1
        for index, batch in enumerate(self.batches):
            if index in (WARM_UP, last):
                synchronise()
                self.seconds = (time.perf_counter() - started) / (last - WARM_UP)
                started = time.perf_counter()
            yield batch

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        return {}


class RandomTask(SpeechTask):
    """The transducer on random batches, without data, validation and files."""

    def __init__(self, config: ExperimentConfig, ranks: Ranks, device: torch.device) -> None:
        self.config, self.ranks = config, ranks
        self.model = TransducerModel(config.model, VOCABULARY, config.loss).to(device)
        self.loader = TimedBatches(random_batches(config, config.train.steps, ranks.rank))

    def train_loader(self) -> TimedBatches:  # type: ignore[override]
        return self.loader

    def validate(self, step: int, log: object) -> float:
        return 0.0

    def save_files(self, folder: Path) -> None: ...


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_seconds(trainer: Trainer, *, update: bool) -> float:
    """Of a step of forward and backward, with or without an update, that nobody watches."""
    stepper, optimiser, task = trainer.stepper, trainer.optimiser, trainer.task
    task.model.train()
    for step, batch in enumerate(task.train_loader()):
        optimiser.zero_grad(set_to_none=True)
        dtype, device = stepper.dtype, stepper.device
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            losses = task.losses(batch.to(device), step)
        (losses.total.sum() / task.size(batch).frames).backward()
        if update:
            torch.nn.utils.clip_grad_norm_(stepper.parameters, stepper.clip_norm)
            optimiser.step()
    return task.loader.seconds  # type: ignore[attr-defined]


def engine_seconds(config: ExperimentConfig, ranks: Ranks, repetition: int) -> float:
    # A folder of its own for each run: none continues what another did.
    folder = f"{config.train.folder}/{ranks.world_size}-{repetition}"
    train = dataclasses.replace(config.train, folder=folder)
    trainer = Trainer(dataclasses.replace(config, train=train), ranks, make_task=RandomTask)
    trainer.run()
    return trainer.task.loader.seconds  # type: ignore[attr-defined]


def measure(config: ExperimentConfig, ranks: Ranks, repetitions: int) -> dict[str, Any]:
    """The row of this process; the times of the first one count."""
    row: dict[str, Any] = {"world_size": ranks.world_size, "precision": config.train.precision}
    alone = Ranks(local_rank=ranks.local_rank)
    trainer = Trainer(config, alone, make_task=RandomTask)
    # Every process meets every shape here: memory is taken, kernels are planned.
    row["unseen_shapes_step_seconds"] = bare_seconds(trainer, update=True)
    ranks.gather(0)
    if ranks.is_first:
        device = trainer.stepper.device
        row["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        row["parameters"] = sum(p.numel() for p in trainer.model.parameters())
        row["forward_backward_seconds"] = bare_seconds(trainer, update=False)
        # In turns, so that what disturbs the machine disturbs both.
        turns = [
            (bare_seconds(trainer, update=True), engine_seconds(config, alone, repetition))
            for repetition in range(repetitions)
        ]
        bare, engine = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
        row["bare_step_seconds"], row["engine_step_seconds"] = bare, engine
        row["overhead"] = engine / bare - 1
    ranks.gather(0)
    if ranks.world_size > 1:
        together = statistics.median(
            max(ranks.gather(engine_seconds(config, ranks, repetition)))
            for repetition in range(repetitions)
        )
        if ranks.is_first:
            row["together_step_seconds"] = together
            row["efficiency"] = row["engine_step_seconds"] / together
    return row


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=3, help="medians are over so many runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the row to FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, process_group() as ranks:
        settings = [f"train.steps={options.steps + WARM_UP + 1}", f"train.folder={folder}"]
        config = load_config(ExperimentConfig, None, [*DEFAULTS, *options.overrides, *settings])
        row = {"torch": torch.__version__, **measure(config, ranks, options.repetitions)}
    if ranks.is_first:
        print(json.dumps(row))
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return row


if __name__ == "__main__":
    main()
