"""The options of `pruned-rnnt import-icefall`; imports nothing heavy, as every command needs it."""

from __future__ import annotations

import argparse
from pathlib import Path

IMPORT_HELP = """\
CHECKPOINT is pretrained.pt or epoch-N.pt of icefall's Zipformer transducer recipe; the averaged
model is taken where there is one. --tokens is that recipe's bpe.model, or its tokens.txt where
there is no more. What parameters do not tell is set as model.encoder.key=value.
  pruned-rnnt import-icefall epoch-30.pt --tokens data/lang_bpe_500/bpe.model --output exp/icefall
  pruned-rnnt transcribe exp/icefall a.wav
"""


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="RUN")
    parser.add_argument(
        "--since", type=Path, metavar="FILE", help="average from the end of this earlier checkpoint"
    )
    parser.add_argument(
        "--trust", action="store_true", help="let the file run code of its own, as pickles can"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
