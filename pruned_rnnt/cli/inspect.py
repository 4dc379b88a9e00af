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
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.licences.chain import Chain


_HELP = (
    "For a run's folder: prints a table; 'pruned-rnnt report RUN' shows its curves. For an\n"
    "exported model (its folder or a file in it): prints the licences of what it was made from.\n"
    "For a configuration (a YAML file, or the name of a packaged one): prints the model's size\n"
    "and histograms of durations and lattice sizes.\n\n" + OVERRIDES_HELP
)

_MODEL_FILES = (".pt", ".onnx", ".nemo")


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
    from pruned_rnnt.run.folder import RunFolder
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.inspection import inspect_config, inspect_run, show_chain
    from pruned_rnnt.train.pretrained_encoder import whole_config
    from pruned_rnnt.train.run import config_path
    from pruned_rnnt.train.tasks.registry import load_experiment

    is_run = options.target.is_dir()
    exported = options.target / model_file.FILE_NAME if is_run else options.target
    has_config = is_run and RunFolder(options.target).config.is_file()
    is_model = exported.suffix in _MODEL_FILES and exported.is_file() and not has_config
    if options.overrides and not options.keys and (is_model or is_run):
        raise UsageError(
            f"{' '.join(options.overrides)}: settings are for a configuration, or for a run with "
            f"--keys; {options.target} is shown as it is: leave them out"
        )
    if is_model:
        if options.keys:
            raise UsageError(
                f"{options.target} is a model, and --keys is for a run or a configuration: leave "
                "out --keys, or pass the run that it is from"
            )
        show_chain(_chain_of_file(exported), Console())
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


def _chain_of_file(path: Path) -> Chain:
    """The chain in model.pt, or of licences.json beside another model file.

    Raises:
        UsageError: the file is a checkpoint of a run, or has no licences beside it.
        ExportError: it is a damaged model.pt.
    """
    from pruned_rnnt.export import model_file
    from pruned_rnnt.licences.chain import Chain, read_chain
    from pruned_rnnt.model.saved_file import read_outline
    from pruned_rnnt.run.folder import RunFolder
    from pruned_rnnt.train.engine import checkpoint

    values = read_outline(path) if path.suffix == ".pt" else None
    kind = values.get("format") if isinstance(values, dict) else None
    if kind == model_file.FORMAT or path.name == model_file.FILE_NAME:
        return model_file.load_model(path).chain or Chain()
    if kind == checkpoint.FORMAT:
        run = next((p for p in path.parents if RunFolder(p).config.is_file()), None)
        raise UsageError(
            f"{path} is a checkpoint, not a model file: pass the folder of its run"
            + (f", {run}" if run is not None else "")
        )
    chain = read_chain(path.parent)
    if chain is None:
        raise UsageError(
            f"{path} is a model file without licences.json beside it, which says what it was made "
            "from: pass its folder, if it is that of a run or an export"
        )
    return chain
