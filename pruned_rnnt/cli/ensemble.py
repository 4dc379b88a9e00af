"""`pruned-rnnt ensemble`: one run from several, whose models decode together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import Parsers, add_command, split_arguments
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


_HELP = """\
The logits of the new model are the mean of those of the RUNs: usually trainings of one
configuration with other seeds (train.seed, data.seed). It usually makes fewer errors than any of
them, and takes as long as all of them together. A RUN is a folder or one of its checkpoints; all
have the same symbols, and predictors of the same kind. decode.checkpoint=best and
decode.use_average=false choose the parameters of each folder.
  pruned-rnnt ensemble exp/seed1 exp/seed2 exp/seed3 --output exp/ensemble
  pruned-rnnt decode exp/ensemble
The command measures all of them on up to 300 utterances of the validation set.
The new run is decoded, used for transcription and exported like any other, but it neither streams
nor is it trained further.
"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, ensemble, _HELP)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="of the new run"
    )
    parser.add_argument("arguments", nargs="*", metavar="RUN | decode.key=value")


def ensemble(options: argparse.Namespace, console: Console) -> int:
    """Join the models of several runs, such as seeds of one training, into one."""
    from pruned_rnnt.pretrained.ensemble import (
        measure_ensemble,
        validation_split,
        write_ensemble,
    )

    settings, runs = split_arguments(options.arguments)
    paths = [Path(run) for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if [each.resolve() for each in paths].count(path.resolve()) > 1:
            raise UsageError(
                f"{run} is named more than once: a model adds nothing to itself, so name other "
                "runs, or other checkpoints of it"
            )
    model = write_ensemble(paths, options.output, settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {options.output}: {len(runs)} models, {parameters / 1e6:.2f} M parameters")
    print(f"decode it with: pruned-rnnt decode {options.output}")
    if not validation_split(options.output):
        print("not measured beside its members: the data of its validation set are not there")
        return 0
    *alone, together = measure_ensemble(paths, options.output, settings)
    rates = ", ".join(f"{each.rate:.2%}" for each in alone)
    print(
        f"errors in {together.words} {together.unit} of the validation set: {rates}; "
        f"together {together.rate:.2%}"
    )
    if together.errors * len(alone) > sum(each.errors for each in alone):
        print(
            "warning: together they make more errors than apart in the mean. Models that emit "
            "symbols at different times cannot be joined: compare the emission delays that "
            "`pruned-rnnt decode` prints for each",
            file=sys.stderr,
        )
    return 0
