"""Seconds of whole processes, from their start to their end, on a new machine and again.

    python -m scripts.cold_start train --shapes SHAPES.npz --folder WORK
    python -m scripts.cold_start train transcribe --shapes SHAPES.npz --folder WORK \\
        --models medium small --other old=CHECKOUT --library old=BUILD

    train        the first 200 steps of a trainer on random batches (see scripts.training_step)
    transcribe   `pruned-rnnt transcribe`, a random model of 66 million parameters: 704 files of 15
                 to 30 s (many), ten of 10 s (ten), one on the CPU (one)
    help         `pruned-rnnt --help`, and `import numpy` for comparison

Each process runs twice for each system: with an empty folder for compiled kernels (first), and with
what it left there (second). Systems come one after the other, this version first, so its first
process on a new machine also reads all libraries from the disk; this process imports none of them.
CPU seconds include those of child processes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from scripts.documented_parser import documented_parser
from scripts.training_step.batches import make_batches, read_lengths, save_batches
from scripts.training_step.systems import LIBRARY, ROOT, System, read_systems

_AUDIO = {"many": {}, "ten": {}, "one": {"CUDA_VISIBLE_DEVICES": ""}}


class Process(NamedTuple):
    """What is measured. key: names its cache of kernels; processes with one key share it."""

    name: str
    key: str
    command: list[str]
    environment: dict[str, str]


def processes(part: str, system: System, options: argparse.Namespace) -> list[Process]:
    """The processes of a part, in their order."""
    python = [sys.executable]
    if part == "help":
        return [
            Process("help", "help", [*python, "-m", "pruned_rnnt", "--help"], {}),
            Process("import numpy", "help", [*python, "-c", "import numpy"], {}),
        ]
    if part == "train":
        setup = {
            "paths": [str(path) for path in system.paths],
            "batches": str(options.folder / "batches.npz"),
            "overrides": [*options.overrides, *system.overrides],
        }
        return [
            Process(
                f"train {model}",
                f"train-{model}",
                [*python, "-m", "scripts.cold_start.train", json.dumps({**setup, "model": model})],
                {},
            )
            for model in options.models
        ]
    model, output = str(options.folder / "model.pt"), str(options.folder / "texts")
    command = [*python, "-m", "pruned_rnnt", "transcribe", "--output", output]
    if system.paths[0] == ROOT:
        # A random model's texts of noise say nothing, and would have most of it decoded again.
        command.append("--lost-speech=ignore")
    command.append(model)
    return [
        Process(
            f"transcribe {audio}",
            "transcribe",
            [*command, str(options.folder / audio), *options.decode],
            environment,
        )
        for audio, environment in _AUDIO.items()
        if audio in options.audio
    ]


def _machine() -> dict[str, str]:
    """Fields of a row: the GPU, or the processor without one; torch's version, and the date.

    Nothing here imports torch, whose files the measured processes must read from the disk.
    """
    name = platform.processor() or platform.machine()
    with suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        name = subprocess.check_output(query, text=True).splitlines()[0]
    return {
        "machine": name,
        "torch": importlib.metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
    }


def measure(process: Process, system: System, folder: Path) -> dict[str, Any]:
    """Run a process; the row has what it prints as JSON."""
    cache = folder / "caches" / system.name / process.key
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, system.paths), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        **process.environment,
    }
    if system.library is not None:
        environment[LIBRARY] = str(system.library)
    elif system.paths[0] != ROOT:
        environment.pop(LIBRARY, None)
    # Python looks for modules in the folder where it starts first.
    command, folder = list(process.command), system.paths[0]
    if command[-1].startswith("{"):
        # `scripts` is this version's for all systems; the process finds its own pruned_rnnt.
        folder = ROOT
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        command[-1] = json.dumps({**json.loads(command[-1]), "started": time.time()})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"process": process.name, "system": system.name, "commit": system.commit, **_machine()}
    row |= {"wall_s": round(seconds, 2), "cpu_s": round(cpu, 2)}
    if done.returncode:
        row["failed"] = done.returncode
    last = (done.stdout.splitlines() or [""])[-1]
    return {**row, **(json.loads(last) if last.startswith("{") else {})}


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.cold_start", __doc__)
    options.add_argument("parts", nargs="+", choices=("train", "transcribe", "help"))
    options.add_argument("--folder", type=Path, required=True, help="for inputs and caches")
    options.add_argument("--shapes", type=Path, metavar="FILE.npz", help="for train")
    options.add_argument("--steps", type=int, default=200, help="of each training")
    options.add_argument("--seconds", type=float, default=551.0, help="of audio in a batch")
    options.add_argument("--models", nargs="+", default=["medium"], metavar="MODEL")
    options.add_argument("--overrides", nargs="*", default=[], metavar="section.key=value")
    options.add_argument("--audio", nargs="+", default=list(_AUDIO), choices=_AUDIO)
    options.add_argument("--decode", nargs="*", default=[], metavar="decode.key=value")
    options.add_argument("--other", action="append", default=[], metavar="NAME=PATH[:PATH...]")
    options.add_argument("--library", action="append", default=[], metavar="NAME=PATH")
    options.add_argument("--only", metavar="NAME", help="measure only this system")
    options.add_argument("--json", type=Path, metavar="FILE", help="append the rows to FILE")
    return options


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parser().parse_args(arguments)
    if "train" in options.parts and options.shapes is None:
        parser().error("train needs --shapes")
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    systems, overrides = read_systems(options.other, options.library, options.overrides)
    options.overrides = overrides
    rows = []
    for part in options.parts:
        if part == "train":
            lengths = read_lengths(options.shapes)
            batches = make_batches(lengths, seconds=options.seconds, count=options.steps, seed=0)
            save_batches(batches, options.folder / "batches.npz")
        if part == "transcribe" and not (options.folder / "one").is_dir():
            make = [sys.executable, "-m", "scripts.cold_start.inputs", str(options.folder)]
            subprocess.run(make, cwd=ROOT, check=True)
        for system in systems:
            if options.only not in (None, system.name):
                continue
            for process in processes(part, system, options):
                for run in ("first", "second"):
                    row = {"run": run, **measure(process, system, options.folder)}
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    if options.json is not None:
                        with options.json.open("a", encoding="utf-8") as file:
                            print(json.dumps(row), file=file)
    return rows


if __name__ == "__main__":
    main()
