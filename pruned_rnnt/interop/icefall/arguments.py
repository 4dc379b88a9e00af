"""The options of `pruned-rnnt import-icefall`; light imports only, as all commands load it."""

from __future__ import annotations

import argparse
from pathlib import Path

IMPORT_HELP = """\
CHECKPOINT is pretrained.pt or epoch-N.pt of icefall's Zipformer transducer recipe; the averaged
model is used if the file has one. --tokens is the recipe's bpe.model, or tokens.txt if bpe.model
is not available. Settings that cannot be read from the parameters are model.encoder.key=value.
  pruned-rnnt import-icefall epoch-30.pt --tokens data/lang_bpe_500/bpe.model --output exp/icefall
  pruned-rnnt transcribe exp/icefall a.wav
"""


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments."""
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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
