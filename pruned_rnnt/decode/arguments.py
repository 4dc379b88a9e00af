"""The options of `pruned-rnnt decode`; light imports only, as every command loads it."""

from __future__ import annotations

import argparse

DECODE_HELP = """\
Writes recogs-, errs-, wer-summary-, nbest- and scores- files to RUN/results. Their names end in
digits that stand for all inputs, so results with other inputs are never overwritten.

"""


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except the run and its settings."""
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="also fit word times and confidences to this set, such as decode.split=dev, and store "
        "them in RUN/calibration.json for all commands",
    )
    parser.add_argument(
        "--plot",
        metavar="ID[,ID...]",
        help="only draw these utterances of the set, into RUN/results/plots",
    )
