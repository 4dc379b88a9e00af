"""`pruned-rnnt import-icefall`: a run from icefall's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    Parsers,
    add_command,
)

if TYPE_CHECKING:
    from rich.console import Console


_HELP = """\
CHECKPOINT is pretrained.pt or epoch-N.pt of icefall's Zipformer transducer recipe; the averaged
model is used if the file has one. --tokens is the recipe's bpe.model, or tokens.txt if bpe.model
is not available. Settings that cannot be read from the parameters are model.encoder.key=value.
  pruned-rnnt import-icefall epoch-30.pt --tokens data/lang_bpe_500/bpe.model --output exp/icefall
  pruned-rnnt transcribe exp/icefall a.wav
"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    from pruned_rnnt.licences.arguments import add_licence_arguments

    parser = add_command(parsers, import_icefall, _HELP)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="file to import")
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="tokens")
    parser.add_argument("--output", type=Path, required=True, metavar="RUN", help="new run folder")
    parser.add_argument(
        "--since",
        type=Path,
        metavar="FILE",
        help="average only the steps after this earlier checkpoint",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="allow the file to run code when it is loaded, as pickle files can",
    )
    add_licence_arguments(parser, "the weights")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")


def import_icefall(options: argparse.Namespace, console: Console) -> int:
    """Make a run from a model that icefall's Zipformer recipe trained."""
    from pruned_rnnt.interop.icefall import imported_run
    from pruned_rnnt.licences.arguments import licence_of
    from pruned_rnnt.licences.chain import Licence, add_origins, chain_of_weights

    imported_run.check_is_new(options.output)
    licence = licence_of(options)
    run = imported_run.read_run(
        options.checkpoint,
        options.tokens,
        options.output,
        since=options.since,
        trust=options.trust,
        overrides=options.overrides,
    )
    imported_run.save_run(run, options.output)
    given = licence if licence != Licence() else None
    add_origins(options.output, chain_of_weights(options.checkpoint, given))
    imported_run.print_import(run)
    return 0
