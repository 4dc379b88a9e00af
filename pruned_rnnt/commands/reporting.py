"""Commands that show runs: inspect on the terminal, report as a web page.

Imports within functions are deliberate, as in `training`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.commands.command import (
    OVERRIDES_HELP,
    Parsers,
    add_command,
    add_run_arguments,
    run_and_settings,
)
from pruned_rnnt.report.arguments import REPORT_HELP, add_report_arguments

if TYPE_CHECKING:
    from rich.console import Console

_INSPECT_HELP = (
    "For a run's folder: prints a table and draws RUN/curves.png. For a configuration\n"
    "(a YAML file, or the name of a packaged one): prints the model's size and histograms of\n"
    "durations and lattice sizes.\n\n" + OVERRIDES_HELP
)


def add_inspect(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, inspect, _INSPECT_HELP)
    parser.add_argument("target", type=Path, metavar="RUN | CONFIG")
    parser.add_argument(
        "--keys",
        action="store_true",
        help="print every setting with its meaning and default, as YAML",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def inspect(options: argparse.Namespace, console: Console) -> int:
    """Show a run's history and curves, or a configuration's model and data."""
    from rich.console import Console

    from pruned_rnnt.settings_help import settings_as_yaml
    from pruned_rnnt.train.inspection import inspect_config, inspect_run
    from pruned_rnnt.train.run import config_path
    from pruned_rnnt.train.tasks.registry import load_experiment

    is_run = options.target.is_dir()
    if is_run and not options.keys:
        inspect_run(options.target, Console())
        return 0
    path = config_path(options.target) if is_run else options.target
    config, _ = load_experiment(path, options.overrides)
    if options.keys:
        print(settings_as_yaml(config), end="")
    else:
        inspect_config(config, Console())
    return 0


def add_report(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, report, REPORT_HELP + OVERRIDES_HELP)
    add_run_arguments(parser)
    add_report_arguments(parser)


def report(options: argparse.Namespace, console: Console) -> int:
    """Make a web page of a run: curves, errors, and the worst utterances with audio."""
    from pruned_rnnt.report.report_command import REPORT_NAME, ReportOptions, make_report

    folder, overrides = run_and_settings(options)
    made = make_report(
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
    path: Path = options.output or folder / REPORT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.html, encoding="utf-8")
    for hint in made.hints:
        print(hint)
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
