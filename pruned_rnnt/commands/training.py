"""Commands that prepare data and make, average or import runs.

Imports within functions are deliberate: `pruned-rnnt --help` must not load libraries that it does
not use.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pruned_rnnt.commands import EXIT_FAILED
from pruned_rnnt.commands.command import OVERRIDES_HELP, Parsers, add_command, split_arguments
from pruned_rnnt.interop.icefall.arguments import IMPORT_HELP, add_import_arguments
from pruned_rnnt.train.engine.averaged_checkpoints import AVERAGED_CHECKPOINTS
from pruned_rnnt.train.tasks.dry_run_command import add_dry_run_arguments
from pruned_rnnt.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


def add_prepare(parsers: Parsers[argparse.ArgumentParser]) -> None:
    from pruned_rnnt import recipes

    packages = pkgutil.iter_modules(recipes.__path__)
    names = sorted(module.name for module in packages if module.ispkg)
    parser = add_command(
        parsers,
        prepare,
        f"Recipes: {', '.join(names)}.\n"
        "`pruned-rnnt prepare RECIPE --help` shows the options of a recipe.",
    )
    parser.add_argument("recipe", metavar="RECIPE", choices=names, help="one of those below")
    parser.add_argument(
        "recipe_options", nargs=argparse.REMAINDER, metavar="...", help="options of the recipe"
    )


def prepare(options: argparse.Namespace, console: Console) -> int:
    """Make a data folder: manifests, features and tokens from audio and texts."""
    module = importlib.import_module(f"pruned_rnnt.recipes.{options.recipe}.prepare")
    code: int | None = module.main(options.recipe_options)
    return code or 0


_TRAIN_HELP = (
    "CONFIG is a YAML file, or the name of a packaged one, such as own.\n"
    "RUN, the folder of an earlier run, continues it with the configuration saved there; the\n"
    "--config and settings that started it continue it as well.\n"
    "For several GPUs, start one process per GPU with torchrun (for several machines see\n"
    "docs/tutorials/many_gpus.md):\n"
    "  torchrun --nproc-per-node 4 -m pruned_rnnt train ...\n\n" + OVERRIDES_HELP
)


def add_train(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, train, _TRAIN_HELP)
    _add_config_arguments(parser, "the settings that differ from the defaults")
    add_dry_run_arguments(parser)
    parser.add_argument("arguments", nargs="*", metavar="RUN | section.key=value")


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
    from pruned_rnnt.config import value_of
    from pruned_rnnt.finetune.finetune_task import task_of
    from pruned_rnnt.finetune.settings import continued_finetuning, load_finetuning
    from pruned_rnnt.train.experiment import ExperimentConfig
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
    if options.dry_run or options.find_max_duration:
        from rich.console import Console

        from pruned_rnnt.train.tasks.dry_run_command import run_dry_run

        if not isinstance(config, ExperimentConfig):
            raise UsageError("--dry-run and --find-max-duration are for recognisers only")
        return 0 if run_dry_run(options, config, Console()) else EXIT_FAILED
    return run_training(config, make_task, console, allow_changes=options.allow_changes)


def run_training(config: Any, make_task: Any, console: Console, *, allow_changes: bool) -> int:
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


_FINETUNE_HELP = """\
SOURCE is the folder of a run, a model that `pruned-rnnt export --format torch` wrote, or an icefall
checkpoint with its bpe.model or tokens.txt beside it (or finetune.tokens=FILE). DATA is a folder
that `pruned-rnnt prepare` wrote.
  pruned-rnnt finetune exp/adults data/children
  pruned-rnnt finetune exp/adults data/children data.old_path=data/adults data.old_share=0.25
  pruned-rnnt finetune epoch-30.pt data/calls finetune.vocabulary=extend finetune.freeze=[encoder]
The same command, or `pruned-rnnt train RUN`, continues after an interruption.

"""


def add_finetune(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, finetune, _FINETUNE_HELP + OVERRIDES_HELP)
    parser.add_argument("source", metavar="SOURCE", help="trained model to start from")
    parser.add_argument("data", metavar="DATA", help="prepared folder to train on")
    _add_config_arguments(parser, "settings that differ from those of the source")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def finetune(options: argparse.Namespace, console: Console) -> int:
    """Train a model further on other data, and compare error rates before and after."""
    from pruned_rnnt.finetune.finetune_task import task_of
    from pruned_rnnt.finetune.settings import load_finetuning

    named = [f"train.init={options.source}", f"data.path={options.data}"]
    config, source = load_finetuning(options.config, [*named, *options.overrides])
    return run_training(config, task_of(source), console, allow_changes=options.allow_changes)


class _ToTrain(NamedTuple):
    """The YAML file and the overrides of a run; is_run: the file is that of an existing run."""

    yaml_path: Path | None
    overrides: list[str]
    is_run: bool


def _config_to_train(options: argparse.Namespace) -> _ToTrain:
    """The configuration of a new run, or of the run whose folder is named."""
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
    overrides.append(f"train.folder={runs[0]}")
    return _ToTrain(config_path(Path(runs[0])), overrides, is_run=True)


_AVERAGE_HELP = (
    "Decode with the result: pruned-rnnt decode RUN decode.checkpoint=FILE\n"
    f"decode.checkpoint=average averages the last {AVERAGED_CHECKPOINTS} without a file."
)


def add_average(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, average, _AVERAGE_HELP)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--last",
        type=int,
        default=AVERAGED_CHECKPOINTS,
        metavar="N",
        help=f"number of checkpoints (default {AVERAGED_CHECKPOINTS})",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: RUN/average-last-N.pt"
    )


def average(options: argparse.Namespace, console: Console) -> int:
    """Average the last checkpoints of a run into one."""
    from pruned_rnnt.train.run import average_checkpoints

    output = options.output or options.run / f"average-last-{options.last}.pt"
    for path in average_checkpoints(options.run, options.last, output):
        print(f"averaged {path}")
    print(f"wrote {output}; use it with decode.checkpoint={output}")
    return 0


def add_import_icefall(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, import_icefall, IMPORT_HELP)
    add_import_arguments(parser)


def import_icefall(options: argparse.Namespace, console: Console) -> int:
    """Make a run from a model that icefall's Zipformer recipe trained."""
    from pruned_rnnt.interop.icefall import imported_run

    imported_run.check_is_new(options.output)
    run = imported_run.read_run(
        options.checkpoint,
        options.tokens,
        options.output,
        since=options.since,
        trust=options.trust,
        overrides=options.overrides,
    )
    imported_run.save_run(run, options.output)
    imported_run.print_import(run)
    return 0
