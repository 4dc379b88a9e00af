"""`pruned-rnnt average`: one checkpoint from several."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    Parsers,
    add_command,
)
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine.train_config import AVERAGED_CHECKPOINTS

if TYPE_CHECKING:
    from rich.console import Console


_HELP = (
    "A run with train.mean_every averages all of its steps between checkpoints: --last N those\n"
    "after the N-th checkpoint before the newest one, as icefall's --avg N does for epochs.\n"
    "Other runs average the parameters of the last N checkpoints.\n\n"
    "Decode with the result: pruned-rnnt decode RUN decode.checkpoint=FILE\n"
    f"decode.checkpoint=average averages the last {AVERAGED_CHECKPOINTS} without a file."
)


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, average, _HELP)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--last",
        type=int,
        default=AVERAGED_CHECKPOINTS,
        metavar="N",
        help=f"number of checkpoints (default {AVERAGED_CHECKPOINTS})",
    )
    parser.add_argument(
        "--over",
        choices=("steps", "checkpoints"),
        help="what to average (default: steps if the run keeps their mean)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: RUN/average-over-last-N.pt (steps) or RUN/average-last-N.pt (checkpoints)",
    )


def average(options: argparse.Namespace, console: Console) -> int:
    """Average the last steps or checkpoints of a run into one checkpoint."""
    from pruned_rnnt.config.written import as_override
    from pruned_rnnt.train.run import average_checkpoints, average_span, keeps_mean

    if options.last < 1:
        raise UsageError(f"--last must be at least 1, got {options.last}")
    folder = RunFolder(options.run)
    if options.output is not None:
        _check_output(options.output, folder)
    if options.over == "steps" or (options.over is None and keeps_mean(options.run)):
        output = options.output or folder.span_average(options.last)
        (start, end), count = average_span(options.run, options.last, output)
        print(f"averaged {count} sets of parameters, after {start} until {end}")
    else:
        output = options.output or folder.average(options.last)
        for path in average_checkpoints(options.run, options.last, output):
            print(f"averaged {path}")
    use = shlex.quote(as_override("decode.checkpoint", output))
    print(f"wrote {output}; use it with {use}")
    return 0


def _check_output(output: Path, folder: RunFolder) -> None:
    """UsageError for a file that is not to be replaced, or would not be found as a checkpoint."""
    from pruned_rnnt.model.saved_file import read_outline

    if output.suffix != ".pt" or output.is_dir():
        raise UsageError(f"--output is {output}, needs the name of a file that ends in .pt")
    if output.resolve().parent == folder.checkpoints.resolve():
        raise UsageError(
            f"--output is {output}, among the checkpoints of the training: name a file elsewhere, "
            f"such as {folder.path / output.name}"
        )
    values = read_outline(output) if output.exists() else {"is_average": True}
    if not (isinstance(values, dict) and values.get("is_average")):
        raise UsageError(
            f"--output is {output}, which exists and is not marked as an average: name another "
            "file, or delete that one"
        )
