"""Trains and decodes the variants of a plan, several at a time, and adds a JSON line for each.

    python -m scripts.recipe_runs PLAN.yaml --json results.jsonl --seeds 1,2,3 --jobs 3
    python -m scripts.recipe_runs.table results.jsonl

A plan is a YAML file with `config`, `settings`, `splits`, `searches` and `variants` (plan.py).
With --seconds, the number of steps follows from the time: all variants first train for --probe
seconds, as many side by side as later, which measures their speed. With --probe 0 the number of
steps follows from the settings, and --seconds only stops runs that take longer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from scripts.documented_parser import documented_parser
from scripts.recipe_runs.plan import Plan, Run, read_plan

# The part of --seconds that steps are planned for; the rest is for starting and validating.
_PLANNED_SHARE = 0.88
_GRACE_SECONDS = 20.0


def train(run: Run, seconds: float | None) -> float:
    """Trains `run` in a process of its own; returns its seconds.

    It receives SIGTERM after `seconds`, and is killed a little later. Output goes to FOLDER.txt.
    """
    command = [sys.executable, "-m", "pruned_rnnt", "train", "--config", run.config]
    command += [*run.settings, f"train.seed={run.seed}", f"data.seed={run.seed}"]
    command += [f"train.folder={run.folder}"]
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with Path(f"{run.folder}.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return time.monotonic() - started


def metrics(folder: Path, group: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl of one group (train, valid)."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [values for values in map(json.loads, lines) if values.get("group") == group]


def probe(run: Run, seconds: float) -> float:
    """Steps per second of `run` at the end of a short training, whose folder is deleted."""
    short = Run(
        variant=run.variant,
        seed=run.seed,
        folder=run.folder.with_name(f"{run.folder.name}-probe"),
        config=run.config,
        settings=(*run.settings, "train.steps=1000000", "train.log_every=10"),
    )
    train(short, seconds)
    speeds = [values["steps_per_second"] for values in metrics(short.folder, "train")]
    shutil.rmtree(short.folder, ignore_errors=True)
    return max(speeds[-3:], default=0.0)


def decode(run: Run, searches: dict[str, Sequence[str]], splits: Sequence[str]) -> dict[str, Any]:
    """The results that `decoding.py` prints for the run; `error` if it fails."""
    request = json.dumps({"searches": searches, "splits": list(splits)})
    command = [sys.executable, "-m", "scripts.recipe_runs.decoding", str(run.folder), request]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        results = {"error": done.stderr[-500:]}
    return results


def finish(run: Run, plan: Plan, seconds: float | None, options: argparse.Namespace) -> None:
    """Trains and decodes a run and adds its line to the results."""
    used = train(run, seconds)
    variant = plan.variants[run.variant]
    names = (*plan.default_searches, *variant.searches)
    searches: dict[str, Sequence[str]] = {name: plan.searches[name] for name in names}
    validations = [
        {"step": values["step"], **{k: v for k, v in values.items() if k in ("wer", "loss")}}
        for values in metrics(run.folder, "valid")
    ]
    line = {
        "config": run.config,
        "variant": run.variant,
        "seed": run.seed,
        "settings": list(run.settings),
        "side_by_side": options.jobs,
        "train_seconds": round(used, 1),
        "validations": validations,
        **decode(run, searches, plan.splits),
    }
    with _LOCK, options.json.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{run.variant}, seed {run.seed}: {used:.0f} s, {summary(line)}", flush=True)


def summary(line: dict[str, Any]) -> str:
    """WER by split and search, in one line."""
    if "error" in line:
        return f"failed: {line['error']}"
    scores = [
        f"{split} {search} {score['wer']:.2%}"
        for split, found in line["results"].items()
        for search, score in found.items()
    ]
    return f"{line['steps']} steps, {', '.join(scores)}"


_LOCK = Lock()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = documented_parser("scripts.recipe_runs", __doc__)
    parser.add_argument("plan", type=Path, metavar="PLAN.yaml")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="lines to add to")
    parser.add_argument("--folder", type=Path, default=Path("exp/recipe_runs"), metavar="DIR")
    parser.add_argument("--variants", default="", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--seeds", default="42", metavar="N,N", help="(default 42)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings side by side")
    parser.add_argument("--seconds", type=float, metavar="S", help="time of each training")
    parser.add_argument(
        "--probe", type=float, default=45.0, metavar="S", help="(default 45; 0: none)"
    )
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="for all variants")
    options = parser.parse_intermixed_args(arguments)
    plan = read_plan(options.plan)
    names = [name for name in options.variants.split(",") if name] or list(plan.variants)
    for name in names:
        if name not in plan.variants:
            parser.error(
                f"--variants: {name!r} is not in {options.plan}: {', '.join(plan.variants)}"
            )
    runs = [
        Run(
            variant=name,
            seed=int(seed),
            folder=options.folder / f"{name}-{seed}",
            config=plan.variants[name].config or plan.config,
            settings=(*plan.settings, *plan.variants[name].settings, *options.settings),
        )
        for seed in options.seeds.split(",")
        for name in names
    ]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.seconds is not None and options.probe > 0:
            speeds = list(pool.map(partial(probe, seconds=options.probe), runs))
            if not any(speeds):
                parser.error(
                    f"--probe: no variant trained 10 steps in {options.probe:g} s, needs a longer "
                    "probe; or set train.steps and --probe 0"
                )
            # The first step of a large model may take longer than the probe, to compile kernels.
            slow = min(speed for speed in speeds if speed > 0) / 2
            runs = [
                _timed(run, speed or slow, options.seconds)
                for run, speed in zip(runs, speeds, strict=True)
            ]
        # A run that takes much longer than the probe predicted is stopped, and decoded as it is.
        list(pool.map(partial(finish, plan=plan, seconds=options.seconds, options=options), runs))


def _timed(run: Run, steps_per_second: float, seconds: float) -> Run:
    """The run with as many steps as fit, and warm-ups and validations in proportion."""
    steps = max(3, round(steps_per_second * seconds * _PLANNED_SHARE))
    print(f"{run.variant}: {steps_per_second:.2f} steps/s, {steps} steps", flush=True)
    settings = (
        f"train.steps={steps}",
        f"train.validate_every={max(1, steps // 4)}",
        f"schedule.warm_up_steps={max(1, steps // 10)}",
        f"loss.warm_up_steps={max(1, steps // 8)}",
    )
    return Run(
        variant=run.variant,
        seed=run.seed,
        folder=run.folder,
        config=run.config,
        # Settings of the variant come last, so that they take precedence.
        settings=(*settings, *run.settings),
    )


if __name__ == "__main__":
    main()
