"""`pruned-rnnt finetune`: train a model further on other data."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    OVERRIDES_HELP,
    Parsers,
    add_command,
)
from pruned_rnnt.cli.train import add_config_arguments, run_training
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


_HELP = """\
SOURCE is the folder of a run, a model that `pruned-rnnt export --format torch` wrote, an icefall
checkpoint with its bpe.model or tokens.txt beside it (or finetune.tokens=FILE), or a .nemo archive
or a folder of transformers. DATA is a folder that `pruned-rnnt prepare` wrote; for a .nemo archive,
with --features waveform.
  pruned-rnnt finetune exp/adults data/children
  pruned-rnnt finetune exp/adults data/children data.old_path=data/adults data.old_share=0.25
  pruned-rnnt finetune epoch-30.pt data/calls finetune.vocabulary=extend finetune.freeze=[encoder]
  pruned-rnnt finetune parakeet-rnnt-0.6b.nemo data/calls
The same command, or `pruned-rnnt train RUN`, continues after an interruption.

"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, finetune, _HELP + OVERRIDES_HELP)
    parser.add_argument("source", metavar="SOURCE", help="trained model to start from")
    parser.add_argument("data", metavar="DATA", help="prepared folder to train on")
    add_config_arguments(parser, "settings that differ from those of the source")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def finetune(options: argparse.Namespace, console: Console) -> int:
    """Train a model further on other data, and compare error rates before and after."""
    from pruned_rnnt.finetune.finetune_task import task_of
    from pruned_rnnt.finetune.settings import load_finetuning

    folder = options.data.removeprefix("data.path=")
    if folder != options.data:
        raise UsageError(
            f"DATA is {options.data!r}, needs a folder without `data.path=`: "
            f"`pruned-rnnt finetune {options.source} {folder}`"
        )
    named = [f"train.init={options.source}", f"data.path={options.data}"]
    config, source = load_finetuning(options.config, [*named, *options.overrides])
    return run_training(config, task_of(source), console, allow_changes=options.allow_changes)
