"""The options of `pruned-rnnt align`; imports nothing heavy, as every command needs it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_align_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the audio and the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="AUDIO | section.key=value",
        help="one audio file instead of a set; settings of the run",
    )
    parser.add_argument("--text", help="what is said in AUDIO")
    parser.add_argument("--split", metavar="NAME", help="of the run's data; default: decode.split")
    parser.add_argument(
        "--format",
        choices=("textgrid", "ctm", "lhotse"),
        default="textgrid",
        help="textgrid for Praat, ctm for scoring tools, lhotse for cuts (default textgrid)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: RUN/alignments")
