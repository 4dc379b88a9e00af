"""Run a recipe of a public corpus from download to export on a fabricated corpus.

    python -m scripts.recipe_end_to_end librispeech FOLDER --hours 100 --jobs 16 --steps 2000

Fabricates the corpus (`scripts.fabricate`), then runs the commands of the recipe's README, each in
a process of its own, and decodes the average of checkpoints as well. Prints the time and the
largest memory of every command, the speed of training, and the speed of the loader alone. Settings
such as `model.encoder.size=small` follow the options, and `prepare` options go into --prepare.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.results import measurement_path, read_measurement
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.run import run_config
from scripts.benchmark.results import commit, machine
from scripts.documented_parser import documented_parser
from scripts.fabricate.corpora import CORPORA, scaled_parts, train_hours
from scripts.fabricate.layouts import fabricate
from scripts.loader_speed import measure as measure_loader

GIB = 2**30
CHECKPOINTS = 3
# Lines of the log that are left out: kernels are compiled and graphs captured then.
_WARM_UP_LINES = 1
_LOG_LINES = 20


class Folders(NamedTuple):
    """Where the corpus, the prepared data and the run are."""

    download: Path
    data: Path
    run: Path


class Spent(NamedTuple):
    """What a command took. peak: memory in bytes of its largest process."""

    command: str
    seconds: float
    cpu_seconds: float
    peak: int


def folders(parent: Path, recipe: str) -> Folders:
    return Folders(
        download=parent / "download", data=parent / "data" / recipe, run=parent / "exp" / recipe
    )


def commands(
    recipe: str,
    places: Folders,
    *,
    jobs: int,
    steps: int,
    settings: Sequence[str] = (),
    prepare: Sequence[str] = (),
    export_format: str = "onnx",
) -> list[list[str]]:
    """The arguments of `pruned-rnnt`, one command after the other."""
    run = str(places.run)
    # Two spans between three checkpoints, see `pruned-rnnt average`.
    average = str(RunFolder(places.run).span_average(CHECKPOINTS - 1))
    training = [
        f"data.path={places.data}",
        f"train.folder={run}",
        f"train.steps={steps}",
        f"train.save_every={max(1, steps // CHECKPOINTS)}",
        f"train.keep_last={CHECKPOINTS}",
        f"train.mean_every={max(1, steps // (10 * CHECKPOINTS))}",
        f"train.validate_every={steps}",
        f"train.log_every={max(1, steps // _LOG_LINES)}",
        # The noises of musan are a corpus of their own.
        "data.augmentation.noise_cuts=",
        *settings,
    ]
    source = ["--download", str(places.download), "--output", str(places.data)]
    return [
        ["prepare", recipe, *source, "--jobs", str(jobs), *prepare],
        ["train", "--config", recipe, *training],
        ["decode", run],
        ["average", run, "--last", str(CHECKPOINTS - 1), "--over", "steps"],
        ["decode", run, f"decode.checkpoint={average}"],
        ["export", run, "--format", export_format, f"decode.checkpoint={average}"],
    ]


def run_command(arguments: Sequence[str]) -> Spent:
    """Run a command in a process of its own.

    Raises:
        CalledProcessError: it failed.
    """
    line = [sys.executable, "-m", "pruned_rnnt", *arguments]
    print(f"$ pruned-rnnt {shlex.join(arguments)}", flush=True)
    started = time.perf_counter()
    process = subprocess.Popen(line)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, line)
    unit = 1 if sys.platform == "darwin" else 1024
    return Spent(
        command=arguments[0],
        seconds=time.perf_counter() - started,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak=usage.ru_maxrss * unit,
    )


def training_figures(run: Path) -> dict[str, float]:
    """Throughput and memory of the run's log, without its first line."""
    lines = [line for line in read_metrics(run) if line["group"] == "train"]
    steady = lines[_WARM_UP_LINES:] or lines
    figures = {
        "seconds_per_step": median(line["seconds_per_step"] for line in steady),
        "steps_per_second": median(line["steps_per_second"] for line in steady),
        "times_real_time": 3600 * median(line["audio_hours_per_second"] for line in steady),
        "skipped_steps": lines[-1]["bad_steps"],
        "last_loss_per_frame": lines[-1]["total_per_frame"],
    }
    if "gpu_memory_gib" in lines[-1]:
        figures["gpu_memory_gib"] = lines[-1]["gpu_memory_gib"]
    return figures


def loader_figures(run: Path, target: float) -> dict[str, float]:
    """The loader's speeds with the augmentation of the run; see `scripts.loader_speed`."""
    data = run_config(run).data
    module = DataModule(replace(data, num_workers=max(1, data.num_workers)))
    return measure_loader(module, 1, target)


def error_rates(run: Path) -> dict[str, float]:
    """The error rate of every result of the run, by metric, split and checkpoint."""
    rates = {}
    folder = RunFolder(run).results
    for path in sorted(folder.glob(measurement_path(folder, "*").name)):
        found = read_measurement(path)
        errors = found.words if found.metric == "wer" else found.characters
        rates[f"{found.metric} {found.split} {found.checkpoint}"] = errors.counts.rate
    return rates


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.recipe_end_to_end", __doc__)
    options.add_argument("recipe", choices=sorted(CORPORA))
    options.add_argument("folder", type=Path, metavar="FOLDER", help="for everything written")
    options.add_argument("--hours", type=float, required=True, help="of speech for training")
    options.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options.add_argument("--steps", type=int, default=300, help="of training (default 300)")
    options.add_argument("--prepare", default="", metavar="OPTIONS", help="options of `prepare`")
    options.add_argument("--format", choices=("onnx", "torch"), default="onnx", help="of `export`")
    options.add_argument("--json", type=Path, metavar="FILE", help="append the figures to FILE")
    options.add_argument("settings", nargs="*", metavar="section.key=value")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser().parse_intermixed_args(arguments)
    recipe, places = options.recipe, folders(options.folder, options.recipe)
    started = time.perf_counter()
    parts = scaled_parts(recipe, options.hours / train_hours(recipe))
    hours = fabricate(recipe, places.download, parts, jobs=options.jobs, seed=0)
    seconds = time.perf_counter() - started
    print(f"fabricated {hours:.2f} hours, {sum(p.utterances for p in parts)} utterances")
    spent = [Spent(command="fabricate", seconds=seconds, cpu_seconds=float("nan"), peak=0)]
    for line in commands(
        recipe,
        places,
        jobs=options.jobs,
        steps=options.steps,
        settings=options.settings,
        prepare=shlex.split(options.prepare),
        export_format=options.format,
    ):
        spent.append(run_command(line))
    training = training_figures(places.run)
    loader = loader_figures(places.run, training["times_real_time"])
    row = {
        "recipe": recipe,
        "hours": round(hours, 3),
        "utterances": sum(part.utterances for part in parts),
        "jobs": options.jobs,
        "steps": options.steps,
        "settings": options.settings,
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": str(torch.__version__),
        "commit": commit(),
        "commands": [each._asdict() for each in spent],
        "training": training,
        "loader": loader,
        "error_rates": error_rates(places.run),
    }
    show(row, spent)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


def show(row: dict[str, Any], spent: Sequence[Spent]) -> None:
    print(f"\n{row['recipe']}: {row['hours']} hours, {row['utterances']} utterances")
    print(f"{'command':<12}{'seconds':>10}{'CPU s':>10}{'GiB':>8}{'x real time':>14}")
    for command, seconds, cpu_seconds, peak in spent:
        speed = f"{row['hours'] * 3600 / seconds:,.0f}" if command in _WHOLE_CORPUS else ""
        print(f"{command:<12}{seconds:>10.1f}{cpu_seconds:>10.1f}{peak / GIB:>8.2f}{speed:>14}")
    for title in ("training", "loader", "error_rates"):
        print(f"{title}:")
        for name, value in row[title].items():
            print(f"  {name} {value:.4g}")


_WHOLE_CORPUS = ("fabricate", "prepare")


if __name__ == "__main__":
    main()
