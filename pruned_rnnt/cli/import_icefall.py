"""`pruned-rnnt import-icefall`: a run from icefall's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    Parsers,
    add_command,
)
from pruned_rnnt.cli.import_model import add_icefall_arguments, import_icefall_run
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


_HELP = """\
CHECKPOINT is pretrained.pt or epoch-N.pt of icefall's Zipformer transducer recipe; the averaged
model is used if the file has one. --tokens is the recipe's bpe.model, or tokens.txt if bpe.model
is not available. Settings that cannot be read from the parameters are model.encoder.key=value.
  pruned-rnnt import-icefall epoch-30.pt --tokens data/lang_bpe_500/bpe.model --output exp/icefall
  pruned-rnnt transcribe exp/icefall a.wav
`pruned-rnnt import epoch-30.pt exp/icefall` does the same, and reads models of NeMo too.
"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    from pruned_rnnt.licences.arguments import add_licence_arguments

    parser = add_command(parsers, import_icefall, _HELP)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="file to import")
    add_icefall_arguments(parser, "bpe.model or tokens.txt (required)")
    parser.add_argument("--output", type=Path, required=True, metavar="RUN", help="new run folder")
    add_licence_arguments(parser, "the weights")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")


def import_icefall(options: argparse.Namespace, console: Console) -> int:
    """Make a run from a model that icefall's Zipformer recipe trained."""
    from pruned_rnnt.licences.arguments import licence_of
    from pruned_rnnt.licences.chain import Licence, add_origins, chain_of_weights
    from pruned_rnnt.train.untrained_run import check_is_new

    if options.tokens is None:
        raise UsageError("import-icefall needs --tokens FILE, the recipe's bpe.model or tokens.txt")
    check_is_new(options.output)
    licence = licence_of(options)
    lines = import_icefall_run(options)
    stated = licence if licence != Licence() else None
    add_origins(options.output, chain_of_weights(options.checkpoint, stated))
    print("\n".join(lines))
    return 0
