"""`pruned-rnnt train` and `finetune`: train a model, from random parameters or a trained model."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pruned_rnnt.cli.command import (
    EXIT_FAILED,
    OVERRIDES_HELP,
    Parsers,
    add_command,
    split_arguments,
    start_driver,
)
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.tasks.dry_run_command import (
    add_dry_run_arguments,
    check_dry_run_arguments,
)

if TYPE_CHECKING:
    from rich.console import Console


_HELP = (
    "CONFIG is a YAML file, or the name of a packaged one, such as own.\n"
    "RUN, the folder of an earlier run, continues it with the configuration saved there; the\n"
    "--config and settings that started it continue it as well.\n"
    "For several GPUs, start one process per GPU with torchrun (for several machines see\n"
    "docs/tutorials/many_gpus.md):\n"
    "  torchrun --nproc-per-node 4 -m pruned_rnnt train ...\n\n" + OVERRIDES_HELP
)
_FINETUNE_HELP = """\
SOURCE is a run or one of its checkpoints, a model that `pruned-rnnt export --format torch` wrote,
an icefall checkpoint with its bpe.model or tokens.txt near it (or finetune.tokens=FILE), a .nemo
archive or a folder of transformers, or owner/name, a repository of the Hugging Face hub with one of
these. DATA is a folder that `pruned-rnnt prepare` wrote; for a .nemo archive, with --features
waveform.
  pruned-rnnt finetune exp/adults data/children
  pruned-rnnt finetune exp/adults data/children data.old_path=data/adults data.old_share=0.25
  pruned-rnnt finetune epoch-30.pt data/calls finetune.vocabulary=extend finetune.freeze=[encoder]
  pruned-rnnt finetune parakeet-rnnt-0.6b.nemo data/calls
The same command, or `pruned-rnnt train RUN`, continues after an interruption.

"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, train, _HELP)
    _add_config_arguments(parser, "the settings that differ from the defaults")
    add_dry_run_arguments(parser)
    parser.add_argument("arguments", nargs="*", metavar="RUN | section.key=value")

    parser = add_command(parsers, finetune, _FINETUNE_HELP + OVERRIDES_HELP)
    parser.add_argument("source", metavar="SOURCE", help="trained model to start from")
    parser.add_argument("data", metavar="DATA", help="prepared folder to train on")
    _add_config_arguments(parser, "settings that differ from those of the source")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def _add_config_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """--config, whose file has `what`, and --allow-changes."""
    parser.add_argument("--config", type=Path, metavar="CONFIG", help=what)
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue a run although its configuration has changed",
    )


def train(options: argparse.Namespace, console: Console) -> int:
    """Train a model, or continue a run from its newest checkpoint."""
    check_dry_run_arguments(options)
    start_driver()
    from pruned_rnnt.config.load import value_of
    from pruned_rnnt.finetune.finetune_task import task_of
    from pruned_rnnt.finetune.settings import continued_finetuning, load_finetuning
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.pretrained_encoder import whole_config
    from pruned_rnnt.train.tasks.registry import load_experiment

    chosen = _config_to_train(options)
    config: Any
    make_task: Any
    if value_of("train.init", chosen.yaml_path, chosen.overrides):
        load = continued_finetuning if chosen.is_run else load_finetuning
        config, source = load(chosen.yaml_path, chosen.overrides)
        make_task = task_of(source)
    else:
        config, make_task = load_experiment(chosen.yaml_path, chosen.overrides)
        if isinstance(config, ExperimentConfig):
            config = whole_config(config)
    if options.check is not None:
        from rich.console import Console

        from pruned_rnnt.train.tasks.dry_run_command import run_dry_run

        if not isinstance(config, ExperimentConfig):
            raise UsageError(f"{options.check} is for recognisers only")
        return 0 if run_dry_run(options, config, make_task, Console()) else EXIT_FAILED
    return _run_training(config, make_task, console, allow_changes=options.allow_changes)


def finetune(options: argparse.Namespace, console: Console) -> int:
    """Train a model further on other data, and compare error rates before and after."""
    from pruned_rnnt.config.written import as_override
    from pruned_rnnt.finetune.finetune_task import task_of
    from pruned_rnnt.finetune.settings import load_finetuning

    folder = options.data.removeprefix("data.path=")
    if folder != options.data:
        raise UsageError(
            f"DATA is {options.data!r}, needs a folder without `data.path=`: "
            f"`{shlex.join(['pruned-rnnt', 'finetune', options.source, folder])}`"
        )
    named = [as_override("train.init", options.source), as_override("data.path", options.data)]
    config, source = load_finetuning(options.config, [*named, *options.overrides])
    return _run_training(config, task_of(source), console, allow_changes=options.allow_changes)


def _run_training(config: Any, make_task: Any, console: Console, *, allow_changes: bool) -> int:
    """Train, and measure error rates before and after a fine-tuning; returns the exit code."""
    from pruned_rnnt.finetune.finetune_task import FinetuneTask
    from pruned_rnnt.train.engine.distributed import process_group
    from pruned_rnnt.train.engine.trainer import Trainer

    with process_group() as ranks:
        if not ranks.is_first:
            logging.getLogger("pruned_rnnt").setLevel(logging.WARNING)
        trainer = Trainer(config, ranks, console, allow_changes=allow_changes, make_task=make_task)
        finetuning = trainer.task if isinstance(trainer.task, FinetuneTask) else None
        if finetuning is not None:
            with trainer.early_warnings:
                finetuning.evaluation.measure_source()
        outcome = trainer.run()
        if finetuning is not None and outcome == "finished":
            finetuning.evaluation.measure_result()
    if outcome == "preempted":
        if ranks.is_first:
            print(
                f"pruned-rnnt train: stopped {trainer.stop_signals}, checkpoint saved",
                file=sys.stderr,
            )
        return trainer.stop_signals.exit_code
    if finetuning is not None and ranks.is_first:
        finetuning.evaluation.show()
    return 0


class _ToTrain(NamedTuple):
    """The YAML file and the overrides of a run; is_run: the file is that of an existing run."""

    yaml_path: Path | None
    overrides: list[str]
    is_run: bool


def _config_to_train(options: argparse.Namespace) -> _ToTrain:
    """The configuration of a new run, or of the run whose folder is named."""
    from pruned_rnnt.config.written import as_override
    from pruned_rnnt.train.run import config_path

    overrides, runs = split_arguments(options.arguments)
    if not runs:
        return _ToTrain(options.config, overrides, is_run=False)
    if options.config is not None:
        raise UsageError(
            f"--config {options.config} is for a new run, and {runs[0]} names a run to continue: "
            "pass one of them"
        )
    if len(runs) > 1:
        raise UsageError(f"name one run to continue, got {' '.join(runs)}")
    # The folder may have been moved since its configuration was saved.
    overrides.append(as_override("train.folder", runs[0]))
    return _ToTrain(config_path(Path(runs[0])), overrides, is_run=True)
