"""The options of `pruned-rnnt report`; light imports only, as every command loads it."""

from __future__ import annotations

import argparse
from pathlib import Path

REPORT_HELP = """\
  pruned-rnnt report exp/calls
  pruned-rnnt report exp/calls --other exp/calls_large
  pruned-rnnt report exp/calls --result 'greedy*' --other exp/calls --other-result 'modified_beam*'
Everything is in one file, with audio and pictures. A run that is still training, or has not been
decoded, gets a page of its curves. If the data have been moved, add data.path=DIR.

"""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options but the run itself."""
    parser.add_argument("--other", type=Path, metavar="RUN", help="a run to compare with")
    for option, whose in (("--result", "RUN"), ("--other-result", "the other run")):
        parser.add_argument(
            option,
            default="*",
            metavar="PATTERN",
            help=f"which results of {whose} to show, by search and checkpoint as in the names of "
            "result files, with or without the digits at their end, such as 'greedy-step-00001200' "
            "(default: the newest of each set; of the other run, the newest with equal settings)",
        )
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="default: RUN/report.html")
    parser.add_argument(
        "--utterances",
        type=int,
        default=12,
        metavar="N",
        help="worst utterances of each set to show with audio and pictures (default 12)",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=8.0,
        metavar="MB",
        help="largest size of all audio and pictures in the page (default 8)",
    )
    parser.add_argument("--no-audio", action="store_true", help="make a page without audio")
    parser.add_argument(
        "--no-pictures",
        action="store_true",
        help="make a page without pictures of utterances, which does not load the model",
    )
