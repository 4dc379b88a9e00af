"""`pruned-rnnt ensemble`: one run from several, whose models decode together."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import Parsers, add_command, split_arguments
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.system.whole_files import appearing_together

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.train.tasks.split_errors import SplitErrors

# More errors than this many times those of the worst member, and a few by chance, are refused.
_WORSE, _CHANCE = 2, 10
_MISFIT = (
    "Models that emit symbols at different times cannot be joined, as causal models of other seeds "
    "often do: compare the emission delays that `pruned-rnnt decode` prints for each"
)
_UNMEASURED = (
    "not measured beside its members: none of their validation sets is at its data.path. Models "
    "that emit symbols at different times make many errors together, or give no text at all: "
    "before you use this one, compare the errors of `pruned-rnnt decode RUN data.path=FOLDER` for "
    "it and for each member, where FOLDER is prepared data"
)

_HELP = """\
The logits of the new model are the mean of those of the RUNs: usually trainings of one
configuration with other seeds (train.seed, data.seed). It usually makes fewer errors than any of
them, and takes as long as all of them together. A RUN is a folder or one of its checkpoints; all
have the same symbols, and predictors of the same kind. decode.checkpoint=best and
decode.use_average=false choose the parameters of each folder.
  pruned-rnnt ensemble exp/seed1 exp/seed2 exp/seed3 --output exp/ensemble
  pruned-rnnt decode exp/ensemble
The command measures all of them on up to 300 utterances of the validation set of the first RUN
whose data.path has one, and refuses models that do not fit: causal models of other seeds often emit
symbols at other times, and then make many times the errors together.
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
        measured_data,
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
    output: Path = options.output
    lines = []
    with appearing_together(output) as unfinished:
        model = write_ensemble(paths, output, settings, unfinished=unfinished)
        data = measured_data(paths, settings)
        if data is not None:
            *alone, together = measure_ensemble(paths, unfinished, data, settings)
            lines.append(_compare(alone, together))
        else:
            lines.append(_UNMEASURED)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {output}: {len(runs)} models, {parameters / 1e6:.2f} M parameters")
    print(f"decode it with: pruned-rnnt decode {shlex.quote(str(output))}")
    print(*lines, sep="\n")
    return 0


def _compare(alone: Sequence[SplitErrors], together: SplitErrors) -> str:
    """A sentence with the error rates; a warning if the ensemble is worse than the mean, or than
    the best.

    Raises:
        ValueError: it is far worse than each of its members.
    """
    rates = ", ".join(f"{each.rate:.2%}" for each in alone)
    found = (
        f"errors in {together.words} {together.unit} of the validation set: {rates}; "
        f"together {together.rate:.2%}"
    )
    if together.errors > _WORSE * max(each.errors for each in alone) + _CHANCE:
        raise ValueError(f"{found}. {_MISFIT}. Nothing was written")
    best = min(each.errors for each in alone)
    if together.errors * len(alone) > sum(each.errors for each in alone):
        print(
            f"warning: together they make more errors than apart in the mean. {_MISFIT}",
            file=sys.stderr,
        )
    elif together.errors > best + _CHANCE:
        print(
            f"warning: together they make {together.errors:,} errors, the best of them alone "
            f"{best:,}: leave out the models that are much worse",
            file=sys.stderr,
        )
    return found
