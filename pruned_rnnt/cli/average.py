"""`pruned-rnnt average`: one checkpoint from several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    Parsers,
    add_command,
)
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.train_config import AVERAGED_CHECKPOINTS

if TYPE_CHECKING:
    from rich.console import Console


_HELP = (
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
        "--output", type=Path, metavar="FILE", help="default: RUN/average-last-N.pt"
    )


def average(options: argparse.Namespace, console: Console) -> int:
    """Average the last checkpoints of a run into one."""
    from pruned_rnnt.train.run import average_checkpoints

    output = options.output or RunFolder(options.run).average(options.last)
    for path in average_checkpoints(options.run, options.last, output):
        print(f"averaged {path}")
    print(f"wrote {output}; use it with decode.checkpoint={output}")
    return 0
