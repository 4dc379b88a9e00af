"""`pruned-rnnt inspect`: a run or a configuration on the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    OVERRIDES_HELP,
    Parsers,
    add_command,
)

if TYPE_CHECKING:
    from rich.console import Console


_HELP = (
    "For a run's folder: prints a table; 'pruned-rnnt report RUN' shows its curves. For an\n"
    "exported model (its folder or model.pt): prints the licences of what it was made from. For a\n"
    "configuration (a YAML file, or the name of a packaged one): prints the model's size and\n"
    "histograms of durations and lattice sizes.\n\n" + OVERRIDES_HELP
)


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, inspect, _HELP)
    parser.add_argument("target", type=Path, metavar="RUN | MODEL | CONFIG")
    parser.add_argument(
        "--keys",
        action="store_true",
        help="print every setting with its meaning and default, as YAML",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def inspect(options: argparse.Namespace, console: Console) -> int:
    """Show a run's history, a model's licences, or a configuration's model and data."""
    from rich.console import Console

    from pruned_rnnt.config.help import settings_as_yaml
    from pruned_rnnt.export import model_file
    from pruned_rnnt.licences.chain import Chain
    from pruned_rnnt.run.folder import RunFolder
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.inspection import inspect_config, inspect_run, show_chain
    from pruned_rnnt.train.pretrained_encoder import whole_config
    from pruned_rnnt.train.run import config_path
    from pruned_rnnt.train.tasks.registry import load_experiment

    is_run = options.target.is_dir()
    exported = options.target / model_file.FILE_NAME if is_run else options.target
    has_config = is_run and RunFolder(options.target).config.is_file()
    if exported.suffix == ".pt" and exported.is_file() and not (has_config or options.keys):
        show_chain(model_file.load_model(exported).chain or Chain(), Console())
        return 0
    if is_run and not options.keys:
        inspect_run(options.target, Console())
        return 0
    path = config_path(options.target) if is_run else options.target
    config, _ = load_experiment(path, options.overrides, is_run=is_run)
    if isinstance(config, ExperimentConfig):
        config = whole_config(config)
    if options.keys:
        print(settings_as_yaml(config), end="")
    else:
        inspect_config(config, Console())
    return 0
