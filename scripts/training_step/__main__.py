"""Time, memory and kernels of whole training steps, of one or more versions of pruned_rnnt.

    python -m scripts.training_step --shapes SHAPES.npz [--model medium] [section.key=value ...]
    python -m scripts.training_step --shapes SHAPES.npz --other old=CHECKOUT --library old=BUILD ...
    torchrun --standalone --nproc-per-node 2 -m scripts.training_step --shapes SHAPES.npz ...

The trainer (loader, forward, pruned loss, backward, clipping, ScaledAdam, Eden, running average,
checks and logs) trains a transducer with 500 symbols on random features with the lengths in
SHAPES.npz: `frames` (encoder frames of 40 ms) and `tokens` of each utterance. No two batches have
one shape. Each system has a process of its own, which keeps its model on the device, and all train
on the same batches. They run in turns, in reverse order in every other turn, since the speed of a
host drifts. A turn has every batch once.

`--other` adds a checkout of another version, or of this one with other settings: overrides of the
form NAME:section.key=value are for one system; this version is called `this`. `--library` sets the
PRUNED_RNNT_LIBRARY_DIR of a system.

Prints for each system: median, minimum and maximum over the turns of the time of a step; audio
per second (times real time, without padding); and on a GPU the time of a step in which at least one
kernel runs, its share of the step, the number of kernels, and the peak memory in GiB. `losses` is
`native` if the losses have compiled kernels, else `fallback`; `skipped` counts steps without an
update.

Under torchrun it measures this version with several processes instead: see processes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from scripts.benchmark.results import machine
from scripts.documented_parser import documented_parser
from scripts.training_step.batches import BatchLengths, make_batches, read_lengths, save_batches
from scripts.training_step.processes import measure_processes
from scripts.training_step.report import kernel_table, losses_table, table
from scripts.training_step.session import Profile, Run
from scripts.training_step.systems import System, Worker, read_systems

SIZES = ("small", "medium", "large")
_CONFORMER = [
    "model.encoder.kind=conformer",
    "model.encoder.layers=12",
    "model.encoder.dim=256",
    "model.encoder.heads=4",
    "model.encoder.feedforward_dim=1024",
    "model.encoder.kernel_size=31",
    "model.encoder.subsampling_channels=32",
]
# The models of NVIDIA with 0.6 and 1.1 billion parameters: FastConformer, LSTM predictor and TDT.
_PARAKEET = [
    "model.encoder.kind=fastconformer",
    "model.encoder.num_mel_bins=128",
    "data.features=waveform",
    "model.encoder.dim=1024",
    "model.encoder.heads=8",
    "model.encoder.feedforward_dim=4096",
    "model.predictor.kind=lstm",
    "model.predictor.dim=640",
    "model.predictor.layers=2",
    "model.joiner_dim=640",
    "model.joiner_activation=relu",
    "loss.durations=[0,1,2,3,4]",
    "loss.sigma=0.02",
    "loss.omega=0.1",
    "optimiser.learning_rate=0.0001",
]
PARAKEETS = {
    "parakeet-0.6b": [*_PARAKEET, "model.encoder.layers=24", "model.encoder.bias=false"],
    "parakeet-1.1b": [*_PARAKEET, "model.encoder.layers=42"],
}
# The optimiser and its schedule as in configs/librispeech_zipformer.yaml.
_COMMON = [
    "model.predictor.dim=512",
    "model.joiner_dim=512",
    "optimiser.name=scaled_adam",
    "optimiser.learning_rate=0.045",
    "optimiser.clip_norm=5.0",
    "schedule.kind=eden",
    "schedule.warm_up_steps=500",
]


def settings(options: argparse.Namespace) -> list[str]:
    """Overrides of the experiment for the options, in terms of keys that all versions have."""
    if options.model in PARAKEETS:
        model = PARAKEETS[options.model]
    elif options.model in SIZES:
        sized = ["model.encoder.kind=zipformer", f"model.encoder.size={options.model}"]
        model = [*sized, *_COMMON]
    else:
        model = [*_CONFORMER, *_COMMON]
    return [
        *model,
        f"model.encoder.causal={options.causal}",
        f"loss.ctc_scale={0.2 if options.ctc else 0.0}",
        f"train.precision={options.precision}",
        f"data.max_duration={options.seconds:g}",
    ]


def about(options: argparse.Namespace, batches: Sequence[BatchLengths]) -> dict[str, Any]:
    """The part of a row that all systems share."""
    return {
        "date": date.today().isoformat(),
        "model": options.model,
        "causal": options.causal,
        "ctc": options.ctc,
        "precision": options.precision,
        "max_seconds": options.seconds,
        "audio_seconds": statistics.mean(batch.audio_seconds for batch in batches),
        "utterances": statistics.mean(batch.shape[0] for batch in batches),
        "batches": len(batches),
        "turns": options.turns,
        "warm_up": options.warm_up,
        "at_step": options.at_step,
        "seed": options.seed,
    }


def row_of(
    system: System, seconds: Sequence[float], known: dict[str, Any], profile: Profile | None
) -> dict[str, Any]:
    """A row of results/training_step.jsonl. seconds: of a step in each turn."""
    median = statistics.median(seconds)
    on_gpu = {
        "gpu_busy_ms": None if profile is None else 1000 * profile.busy_seconds,
        "gpu_busy_share": None if profile is None else profile.busy_seconds / profile.seconds,
        "kernels": None if profile is None else sum(kernel.calls for kernel in profile.kernels),
    }
    device = known["device"]
    return {
        "system": system.name,
        "commit": system.commit,
        **known,
        "device": machine("cpu") if device == "cpu" else device,
        "step_ms": 1000 * median,
        "step_ms_range": [1000 * min(seconds), 1000 * max(seconds)],
        "times_real_time": known["audio_seconds"] / median,
        **on_gpu,
    }


def measure_systems(
    options: argparse.Namespace, batches: Sequence[BatchLengths]
) -> list[dict[str, Any]]:
    """A row for each system; prints the tables."""
    systems, overrides = read_systems(options.other, options.library, options.overrides)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "batches.npz"
        save_batches(batches, path)
        every = [*settings(options), *overrides]
        workers = [
            stack.enter_context(Worker(system, every, path, options.at_step)) for system in systems
        ]
        for worker in workers:
            worker.answer()  # its session is ready
        names = [system.name for system in systems]
        losses: dict[str, list[float]] = {name: [] for name in names}
        for epoch in range(options.warm_up):
            for worker in workers:
                name = worker.system.name
                run = Run(*worker.ask("run", lead=0))
                losses[name] += run.losses
                progress(f"warm-up {epoch + 1}, {name}: {1000 * run.seconds:.1f} ms")
        if options.compare_losses:
            print(losses_table(losses))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(options.turns):
            for worker in reversed(workers) if turn % 2 else workers:
                name = worker.system.name
                seconds[name].append(Run(*worker.ask("run")).seconds)
                progress(f"turn {turn + 1}, {name}: {1000 * seconds[name][-1]:.1f} ms")
        rows = []
        kernels = []
        for worker in workers:
            name = worker.system.name
            # Before the profile, which takes memory and slows later steps.
            known = {**about(options, batches), **worker.ask("about")}
            profile = None
            if known["device"] != "cpu":
                profile = Profile.read(worker.ask("profile", count=options.profiled))
                kernels.append(kernel_table(name, profile.kernels, options.kernels))
            known["overrides"] = [*overrides, *worker.system.overrides]
            rows.append(row_of(worker.system, seconds[name], known, profile))
    print(table(rows))
    if options.kernels:
        print("".join(f"\n{kernel}" for kernel in kernels), end="")
    return rows


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.training_step", __doc__)
    options.add_argument("--shapes", type=Path, required=True, metavar="FILE.npz")
    options.add_argument("--model", choices=(*SIZES, "conformer", *PARAKEETS), default="medium")
    options.add_argument("--causal", action="store_true", help="a causal encoder")
    options.add_argument("--ctc", action="store_true", help="with a CTC head and its loss")
    options.add_argument("--precision", default="bfloat16", help="train.precision")
    options.add_argument("--seconds", type=float, default=551.0, help="of audio in a batch")
    options.add_argument("--batches", type=int, default=20, help="number of batches")
    options.add_argument("--turns", type=int, default=5, help="timed runs over all batches")
    options.add_argument("--warm-up", type=int, default=2, help="runs over all batches before")
    options.add_argument("--at-step", type=int, default=20000, help="steps done before")
    options.add_argument("--seed", type=int, default=0, help="of the choice of batches")
    options.add_argument("--other", action="append", default=[], metavar="NAME=PATH[:PATH...]")
    options.add_argument("--library", action="append", default=[], metavar="NAME=PATH")
    options.add_argument("--profiled", type=int, default=5, help="steps of the profile")
    options.add_argument("--kernels", type=int, default=0, help="print so many kernels by time")
    options.add_argument("--compare-losses", action="store_true", help="print warm-up losses")
    options.add_argument("--json", type=Path, metavar="FILE", help="append the rows to FILE")
    options.add_argument("overrides", nargs="*", metavar="[NAME:]section.key=value")
    return options


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parser().parse_intermixed_args(arguments)
    for name in ("batches", "turns", "warm_up", "profiled"):
        if getattr(options, name) < 1:
            parser().error(f"--{name.replace('_', '-')} is {getattr(options, name)}, needs 1")
    try:
        batches = make_batches(
            read_lengths(options.shapes),
            seconds=options.seconds,
            count=options.batches,
            seed=options.seed,
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if options.other or options.library:
                raise ValueError("--other and --library do not work under torchrun")
            overrides = [*settings(options), *options.overrides]
            known = {**about(options, batches), "overrides": options.overrides}
            rows = measure_processes(overrides, batches, known, options.at_step)
        else:
            rows = measure_systems(options, batches)
    except ValueError as error:
        parser().error(str(error))
    if options.json is not None and rows:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return rows


if __name__ == "__main__":
    main()
