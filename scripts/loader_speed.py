"""Speed of the data loader, and the workers and cores that keep up with a training step.

    python -m scripts.loader_speed --data data/own data/own_shar --workers 2

Loads whole epochs of the training split of each prepared folder, for a training step that does
nothing, after an epoch that is not measured. On a busy machine the CPU time is the fairer measure,
unless the loader waits for a disk: `worker` and `main` are seconds of audio per second of CPU time
of one worker, and of the training process, which samples and receives the batches. `workers` is the
number of workers, each on a core of its own, that load `--target` times real time, and `cores` what
all processes together use then.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig, SpecAugmentConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.loader import BatchLoader
from scripts.benchmark.results import commit, machine
from scripts.documented_parser import documented_parser

AUGMENTATIONS = {
    "none": AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False)),
    "SpecAugment": AugmentationConfig(),
}
FEATURES = ("stored", "waveform")
_COLUMNS = ("storage", "features", "augmentation", "clock", "worker", "main", "workers", "cores")


class Epochs(NamedTuple):
    """Seconds of audio, of wall-clock time, and of CPU time of this process and of all workers."""

    audio: float
    clock: float
    main: float
    workers: float


def load_epochs(loader: BatchLoader, first: int, count: int) -> Epochs:
    """Load `count` whole epochs, from epoch `first`; start and end of the workers included."""
    audio = 0.0
    clock, main, workers = time.perf_counter(), time.process_time(), _seconds_of_ended_children()
    for epoch in range(first, first + count):
        loader.set_epoch(epoch)
        # The workers have ended when the iteration ends.
        audio += sum(sum(batch.durations) for batch in loader)
    return Epochs(
        audio=audio,
        clock=time.perf_counter() - clock,
        main=time.process_time() - main,
        workers=_seconds_of_ended_children() - workers,
    )


def _seconds_of_ended_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def storage_of(module: DataModule) -> str:
    """`shar` if the features or the audio of the training split are in tar files, else `files`."""
    (cut,) = islice(module.folder.cuts(module.config.train, lazy=True), 1)
    stored = module.config.features == "stored"
    path = cut.features.storage_path if stored else cut.recording.sources[0].source
    return "shar" if str(path).endswith(".tar") else "files"


def measure(module: DataModule, epochs: int, target: float) -> dict[str, float]:
    """The speeds of a row, as multiples of real time; the workers and cores for `target`."""
    loader = module.train_loader()
    load_epochs(loader, 0, 1)
    done = load_epochs(loader, 1, epochs)
    return {
        "clock": done.audio / done.clock,
        "worker": done.audio / done.workers,
        "main": done.audio / done.main,
        "target": target,
        "workers": math.ceil(target * done.workers / done.audio),
        "cores": target * (done.workers + done.main) / done.audio,
    }


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    about = {
        "machine": machine("cpu"),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "measured_workers": options.workers,
        "max_duration": options.max_duration,
    }
    for folder in options.data:
        for features in options.features:
            config = DataConfig(
                path=str(folder),
                train=options.split,
                features=features,
                max_duration=options.max_duration,
                num_workers=options.workers,
            )
            try:
                DataModule(config).train_loader()
            except ValueError as error:
                print(error)
                continue
            for name, augmentation in AUGMENTATIONS.items():
                module = DataModule(replace(config, augmentation=augmentation))
                if options.profile:
                    profile(replace(module.config, num_workers=0))
                kind = {"features": features, "augmentation": name, "storage": storage_of(module)}
                yield {**about, **kind, **measure(module, options.epochs, options.target)}


def profile(config: DataConfig) -> None:
    """Print a profile of an epoch that this process loads without workers."""
    import cProfile
    import pstats

    loader = DataModule(config).train_loader()
    with cProfile.Profile() as profiler:
        load_epochs(loader, 0, 1)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def line(row: dict[str, Any]) -> str:
    kind = [row[name] for name in ("storage", "features", "augmentation")]
    speeds = [f"{row[name]:,.0f}x" for name in ("clock", "worker", "main")]
    cells = [*kind, *speeds, row["workers"], f"{row['cores']:.1f}"]
    return "".join(f"{cell:>13}" for cell in cells)


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.loader_speed", __doc__)
    options.add_argument("--data", type=Path, nargs="+", required=True, help="prepared folders")
    options.add_argument("--split", default="train")
    options.add_argument("--features", nargs="+", choices=FEATURES, default=FEATURES)
    options.add_argument("--max-duration", type=float, default=551.0, help="seconds in a batch")
    options.add_argument("--workers", type=int, default=2, help="data.num_workers, at least 1")
    options.add_argument("--epochs", type=int, default=1, help="measured epochs")
    options.add_argument("--target", type=float, default=8000.0, help="times real time")
    options.add_argument("--profile", action="store_true", help="print profiles of a worker's work")
    options.add_argument("--json", type=Path, metavar="FILE", help="append the rows to FILE")
    return options


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parser().parse_args(arguments)
    for name in ("workers", "epochs"):
        if getattr(options, name) < 1:
            parser().error(f"--{name} is {getattr(options, name)}, needs at least 1")
    print("".join(f"{column:>13}" for column in _COLUMNS))
    rows = []
    for row in rows_of(options):
        rows.append(row)
        print(line(row), flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return rows


if __name__ == "__main__":
    main()
