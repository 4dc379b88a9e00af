"""`pruned-rnnt report`: a web page of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    OVERRIDES_HELP,
    Parsers,
    add_command,
    add_run_arguments,
    run_and_settings,
)
from pruned_rnnt.run.folder import RunFolder, require_writable
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.system.whole_files import write_lines

if TYPE_CHECKING:
    from rich.console import Console


_HELP = """\
  pruned-rnnt report exp/calls
  pruned-rnnt report exp/calls --other exp/calls_large
  pruned-rnnt report exp/calls --result 'greedy*' --other exp/calls --other-result 'modified_beam*'
Everything is in one file, with audio and pictures. A run that is still training, or has not been
decoded, gets a page of its curves. If the data have been moved, add data.path=DIR.

"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, report, _HELP + OVERRIDES_HELP)
    add_run_arguments(parser)
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


def report(options: argparse.Namespace, console: Console) -> int:
    """Make a web page of a run: curves, errors, and the worst utterances with audio."""
    from pruned_rnnt.report.report_command import ReportOptions, make_report

    if options.other is None and options.other_result != "*":
        raise UsageError("--other-result needs --other RUN, the run with these results")
    if options.output is not None:
        _check_output(options.output)
    folder, overrides = run_and_settings(options)
    path: Path = options.output or RunFolder(folder).report
    target = path.resolve()  # a link stays one
    if options.output is not None or folder.is_dir():  # else the name of the run is wrong
        require_writable(target.parent, "--output FILE.html writes the page elsewhere")
    page = make_report(
        folder,
        options.other,
        ReportOptions(
            result=options.result,
            other_result=options.other_result,
            utterances=options.utterances,
            megabytes=options.megabytes,
            audio=not options.no_audio,
            pictures=not options.no_pictures,
        ),
        overrides=overrides,
        console=console,
    )
    write_lines(target, [page.html])
    for hint in page.hints:
        print(hint)
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _check_output(path: Path) -> None:
    from pruned_rnnt.report.page import is_report

    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise UsageError(f"--output is {path}, needs the name of a file that ends in .html")
    if path.exists() and not is_report(path):
        raise UsageError(
            f"--output is {path}, which exists and is no report: name another file, or delete "
            "that one"
        )
