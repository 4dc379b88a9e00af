"""The options of `pruned-rnnt align`; light imports only, as every command loads it."""

from __future__ import annotations

import argparse
from pathlib import Path

ALIGN_HELP = """\
  pruned-rnnt align RUN --split test --format ctm
  pruned-rnnt align RUN talk.wav --text "the words of the talk"
Times are those of the CTC head, corrected by RUN/calibration.json if there is one
(pruned-rnnt decode RUN decode.split=dev --calibrate). Utterances without an alignment
are listed with the reason; the exit code is then 1. Without --output, each set and model gets a
folder in RUN/alignments; --output refuses a folder with alignments of another model or other data.

"""


def add_align_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the audio file and the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="AUDIO | section.key=value",
        help="one audio file to align instead of a split of the run's data; settings of the run",
    )
    parser.add_argument("--text", help="the transcript of AUDIO")
    parser.add_argument(
        "--split", metavar="NAME", help="split of the run's data (default: decode.split)"
    )
    parser.add_argument(
        "--format",
        choices=("textgrid", "ctm", "lhotse"),
        default="textgrid",
        help="TextGrid for Praat, CTM for scoring tools, cuts for lhotse (default: textgrid)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: a folder in RUN/alignments"
    )
