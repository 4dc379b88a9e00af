"""Options and output of `train --dry-run`, `--find-max-duration` and `--estimate`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.tasks.dry_run import DryRun, SpeechTaskMaker, Trial


_IDS_SHOWN = 5
_ESTIMATE_SECONDS, _SCAN_BATCHES = 60.0, 2000
# The checks that have each option.
_CHECKS = {
    "estimate_seconds": ("--estimate",),
    "memory_limit": ("--find-max-duration",),
    "scan_batches": ("--dry-run", "--find-max-duration", "--estimate"),
}


def add_dry_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train` that run trial steps instead of training; `check` is the chosen
    one, such as "--dry-run", or None."""
    group = parser.add_argument_group(
        "checks before training (which write nothing and change no run)"
    )
    checks = group.add_mutually_exclusive_group()
    for check, text in (
        (
            "--dry-run",
            "run one step on each of the largest batches; exit code 1 if one runs out of memory",
        ),
        (
            "--find-max-duration",
            "search for the largest data.max_duration whose batches fit into memory",
        ),
        (
            "--estimate",
            "predict the hours and the memory of the training, from some of its steps, a "
            "validation and a checkpoint on this machine; exit code 1 if a batch does not fit",
        ),
    ):
        checks.add_argument(check, action="store_const", dest="check", const=check, help=text)
    group.add_argument(
        "--estimate-seconds",
        type=float,
        metavar="S",
        help=f"for --estimate: measure steps for S seconds (default {_ESTIMATE_SECONDS:g})",
    )
    group.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="for --find-max-duration: default 90%% of the GPU; required without a GPU, where it "
        "limits the whole process, and trials may exceed it by half",
    )
    group.add_argument(
        "--scan-batches",
        type=int,
        metavar="N",
        help="search the first N batches of the first epoch for the largest ones (default "
        f"{_SCAN_BATCHES})",
    )


def check_dry_run_arguments(options: argparse.Namespace) -> None:
    """Check the options that belong to a check, and fill in their defaults.

    Raises:
        UsageError: a number is out of range, or an option belongs to a check that is not chosen:
            without this error a training would start.
    """
    for option, checks in _CHECKS.items():
        value, name = getattr(options, option), "--" + option.replace("_", "-")
        if value is not None and options.check not in checks:
            raise UsageError(f"{name} needs {' or '.join(checks)}")
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}, needs a finite number above 0")
    options.estimate_seconds = options.estimate_seconds or _ESTIMATE_SECONDS
    options.scan_batches = options.scan_batches or _SCAN_BATCHES


def run_dry_run(
    options: argparse.Namespace,
    config: ExperimentConfig,
    make_task: SpeechTaskMaker,
    console: Console,
) -> bool:
    """Run the trials that the options of `add_dry_run_arguments` select; returns whether they fit.

    Args:
        options: after `check_dry_run_arguments`.
        make_task: builds the task of the training.

    Raises:
        ValueError: a search on a CPU without a limit or where peaks of memory cannot be measured,
            or several processes of torchrun.
    """
    from pruned_rnnt.train.engine.distributed import launcher_number
    from pruned_rnnt.train.engine.train_config import pick_device
    from pruned_rnnt.train.tasks.dry_run import DryRun

    if launcher_number("WORLD_SIZE", 1) > 1:
        raise ValueError(
            f"{options.check} tries the batches of a single process: start it without torchrun"
        )
    on_cpu = pick_device(config.train).type == "cpu"
    finding = options.check == "--find-max-duration"
    if finding and on_cpu and options.memory_limit is None:
        raise ValueError(
            "--find-max-duration measures GPU memory, and there is no GPU to use: pass "
            "--memory-limit GIB to search by the memory of this process instead"
        )
    if options.check == "--estimate":
        return _estimate(options, config, make_task, console)
    trials = DryRun(config, make_task)
    if finding:
        return _find(trials, options, console)
    return _dry_run(trials, options.scan_batches, console)


def _dry_run(trials: DryRun, scan_batches: int, console: Console) -> bool:
    from rich import box
    from rich.table import Table

    from pruned_rnnt.train.tasks.dry_run import GIB

    scan = trials.scan(trials.config.data.max_duration, scan_batches)
    where = "of the GPU" if trials.device.type == "cuda" else "of the process"
    # Fits a log of 80 columns.
    table = Table(
        title=f"largest of {scan.batches} batches"
        + (" (all of the first epoch)" if scan.complete else " (of more)"),
        caption=f"lattice: nodes, padded; memory: {where}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    columns = ("cuts", "longest", "frames", "symbols", "lattice", "s/step", "memory")
    table.add_column("largest by", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    failed: list[Trial] = []
    names: dict[int, list[str]] = {}
    for name, batch in scan.largest.items():
        names.setdefault(id(batch), []).append(name)
    for batch in {id(batch): batch for batch in scan.largest.values()}.values():
        trial = trials.try_batch(batch)
        table.add_row(
            "\n".join(names[id(batch)]),
            str(batch.utterances),
            f"{batch.longest:.1f} s",
            str(batch.frames),
            str(batch.symbols),
            str(batch.lattice),
            f"{trial.seconds:.3f}",
            f"{trial.peak / GIB:.2f} GiB" if trial.fits else "does not fit",
        )
        # With float16 the first loss scale may be too large, which is not an error.
        failed += [trial] if trial.problem and "float16" not in trial.problem else []
    console.print(table)
    _name_failed(failed, console)
    return not failed


def _name_failed(failed: Sequence[Trial], console: Console) -> None:
    for trial in failed:
        ids = ", ".join(cut.id for cut in list(trial.batch.cuts)[:_IDS_SHOWN])
        console.print(f"{trial.problem}; utterances: {ids}")


def _estimate(
    options: argparse.Namespace,
    config: ExperimentConfig,
    make_task: SpeechTaskMaker,
    console: Console,
) -> bool:
    from pruned_rnnt.train.engine.train_config import pick_device
    from pruned_rnnt.train.tasks.dry_run import GIB
    from pruned_rnnt.train.tasks.estimate import estimate

    found = estimate(
        config,
        make_task,
        scan_batches=options.scan_batches,
        seconds=options.estimate_seconds,
        imports=time.process_time(),  # what this process has computed until here
    )
    measured, counts = found.measured, found.counts
    once = f"start {measured.start_seconds:.3g} s"
    if measured.captures.number:
        number, seconds = measured.captures
        once += f", {number} captures of CUDA graphs in {seconds:.3g} s"
    where = "GPU memory" if pick_device(config.train).type == "cuda" else "memory of the process"
    console.print(
        f"{counts.steps} steps of {measured.seconds_per_step:.3g} s "
        f"(mean of {measured.steps}), {counts.steps / counts.steps_per_epoch:.3g} epochs of "
        f"{counts.steps_per_epoch:.0f} steps, each begun in {measured.epoch_seconds:.3g} s",
        f"{counts.validations} validations of {measured.validation_seconds:.3g} s, "
        f"{counts.checkpoints} times saved in {measured.checkpoint_seconds:.3g} s, {once}",
        f"estimate: {found.seconds / 3600:.3g} hours ({found.seconds:.0f} s), "
        f"{measured.peak / GIB:.2f} GiB {where}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    for processes, memory in found.memory.items():
        who = "each process" if config.train.shard == "none" else f"processes: {processes}, each"
        console.print(f"{who} keeps {memory}", highlight=False, soft_wrap=True)
    if config.train.early_stopping_patience > 0:
        console.print("early stopping may end the training before")
    _name_failed(found.failed, console)
    return not found.failed


def _find(trials: DryRun, options: argparse.Namespace, console: Console) -> bool:
    import torch

    from pruned_rnnt.train.engine.memory import reset_peak
    from pruned_rnnt.train.tasks.dry_run import GIB, USABLE_SHARE, search_largest

    if not reset_peak(trials.device):
        raise ValueError(
            "--find-max-duration needs Linux to measure the memory of a process again and again: "
            "try a value of data.max_duration with --dry-run, which shows its memory"
        )
    start = trials.config.data.max_duration
    if not math.isfinite(start):
        raise ValueError(
            f"data.max_duration is {start}, and --find-max-duration needs a finite number of "
            "seconds to start from"
        )
    if options.memory_limit is not None:
        limit = options.memory_limit * GIB
    else:
        limit = USABLE_SHARE * torch.cuda.get_device_properties(trials.device).total_memory
    everything = trials.scan(start, options.scan_batches)
    enough = everything.seconds if everything.complete else math.inf

    def fits(max_duration: float) -> bool:
        done = trials.fits(max_duration, limit, options.scan_batches)
        verdict = "fits" if done else "does not fit"
        console.print(f"data.max_duration={max_duration:.0f} {verdict} {limit / GIB:.1f} GiB")
        return done

    found = search_largest(fits, start, enough)
    if found is None:
        console.print(f"not even data.max_duration={start / 64:.2g} fits: make the model smaller")
        return False
    if found >= enough:
        console.print("a batch that holds the whole training set fits")
    console.print(f"largest that fits: data.max_duration={math.floor(found)}")
    return True
