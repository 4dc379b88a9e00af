"""Makes the report of a run: reads and scores its results, draws pictures, and renders the page."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pruned_rnnt.report.clips import ByteBudget, UtterancePictures
from pruned_rnnt.report.comparison import Comparison, compare, partner
from pruned_rnnt.report.page import Page, render_page
from pruned_rnnt.report.report_run import ReportRun, read_run
from pruned_rnnt.report.scored_set import CutDetails, ScoredSet, read_cut_details, score_result
from pruned_rnnt.report.set_section import SetSection, set_section, worst_utterances
from pruned_rnnt.report.training_charts import training_charts
from pruned_rnnt.run.result_file import ResultFile
from pruned_rnnt.system.console import progress_bar
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_MEGABYTE = 1_000_000
# On which ranges of activations are computed; more hardly change them, but take longer.
_RANGE_UTTERANCES = 8


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of the command; see `arguments`."""

    result: str = "*"
    other_result: str = "*"
    utterances: int = 12
    megabytes: float = 8.0
    audio: bool = True
    pictures: bool = True

    def __post_init__(self) -> None:
        if self.utterances < 0:
            raise UsageError(f"--utterances must be at least 0, got {self.utterances}")
        if not self.megabytes >= 0:
            raise UsageError(f"--megabytes must be at least 0, got {self.megabytes}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page, and sentences about what is missing from it."""

    html: str
    hints: tuple[str, ...]


def make_report(
    folder: Path,
    other_folder: Path | None = None,
    options: ReportOptions | None = None,
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Report:
    """The report of a run, or of two runs side by side.

    Args:
        overrides: settings of the first run, such as data.path=DIR.
        console: for the progress bar.

    Raises:
        ConfigError: a folder is no run, or a setting is wrong.
        UsageError: a pattern matches no result, both match the same one of one run, a number is
            negative, or the folder of data.path in overrides does not exist.
    """
    options = options or ReportOptions()
    run = read_run(folder, overrides, options.result)
    moved = _given_data(run, overrides)
    other = None
    if other_folder is not None:
        other = read_run(other_folder, pattern=options.other_result)
    chosen = run.newest_results() if other is None else run.results_to_compare(other.results)
    scored = {name: _score(run, result, moved=moved) for name, result in chosen.items()}
    second = {} if other is None else _score_other(other, scored)
    _check_are_others(scored, second)
    names = _names(run, other, scored, second)
    comparisons = {name: compare(scored[name], second[name]) for name in scored.keys() & second}
    sections = _sections(run, scored, comparisons, names, options, console)
    results = [(names[0], each) for each in scored.values()]
    # One result may be compared with several sets of the first run.
    others = {each.result.recogs_path: each for each in second.values()}
    results += [(names[1], each) for each in others.values()]
    runs = [run]
    # Two results may be of one run.
    if other is not None and other.folder.resolve() != run.folder.resolve():
        runs.append(other)
    hints = tuple(_hints(runs, names, scored, second))
    page = Page(
        run=run,
        other=other,
        runs=runs,
        names=names,
        charts=training_charts(runs, names),
        results=results,
        sections=sections,
        hints=hints,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    return Report(html=render_page(page), hints=hints)


def _given_data(run: ReportRun, overrides: Sequence[str]) -> str:
    """The data folder that the user gave; empty if none.

    Raises:
        UsageError: it does not exist.
    """
    if run.config is None or not any(each.startswith("data.path=") for each in overrides):
        return ""
    path = run.config.data.path
    if not Path(path).is_dir():
        raise UsageError(
            f"data.path is {path}, which is no folder: needs the prepared folder to which the data "
            "were moved"
        )
    return path


def _score_other(other: ReportRun, scored: dict[str, ScoredSet]) -> dict[str, ScoredSet]:
    """The results of the other run, by the set of the first run that each is compared with."""
    second = {}
    for name, first in scored.items():
        found = partner(first.result, other.results)
        if found is not None:
            # It has the same utterances, or none of them are compared.
            second[name] = _score(other, found, first.details)
    shown = [each.result for each in second.values()]
    for name, result in other.newest_results().items():
        if name not in scored and result not in shown:
            second[name] = _score(other, result)
    return second


def _check_are_others(scored: dict[str, ScoredSet], second: dict[str, ScoredSet]) -> None:
    for name in scored.keys() & second:
        first, other = scored[name].result, second[name].result
        if first.recogs_path.resolve() == other.recogs_path.resolve():
            raise UsageError(
                f"--result and --other-result choose the same result of {name}, {first.setting}: "
                "give each a pattern that matches another one"
            )


def _names(
    run: ReportRun,
    other: ReportRun | None,
    scored: dict[str, ScoredSet],
    second: dict[str, ScoredSet],
) -> tuple[str, ...]:
    """Short names of the runs, or of the results of one run, that differ from each other."""
    if other is None:
        return (run.name,)
    if run.name != other.name:
        return (run.name, other.name)
    if run.folder.resolve() != other.folder.resolve():
        return (str(run.folder), str(other.folder))
    results = [next((each.result for each in sets.values()), None) for sets in (scored, second)]
    names = ["no result" if each is None else each.short_setting for each in results]
    if names[0] == names[1]:
        names = ["no result" if each is None else each.setting for each in results]
    return (names[0], names[1] if names[1] != names[0] else f"{names[1]} (again)")


def _score(
    run: ReportRun, result: ResultFile, details: CutDetails | None = None, *, moved: str = ""
) -> ScoredSet:
    """Score a result.

    Args:
        details: of its utterances, if they have been read.
        moved: read instead of the folder of other data that was decoded, if that is gone.
    """
    decoded, damaged = result.read()
    if details is None and run.config is not None:
        names = [each.transcript.id for each in decoded]
        data = run.config.data
        if result.data_path and not (moved and not Path(result.data_path).is_dir()):
            data = dataclasses.replace(data, path=result.data_path)
        details = read_cut_details(data, result.split, names)
    scored = score_result(result, details or CutDetails(), decoded)
    return (
        scored
        if not damaged
        else scored.with_problem(
            f"{damaged:,} damaged lines of {result.stem} are left out; decode again, unless "
            "decoding is still running."
        )
    )


def _sections(
    run: ReportRun,
    scored: dict[str, ScoredSet],
    comparisons: dict[str, Comparison],
    names: Sequence[str],
    options: ReportOptions,
    console: Console | None,
) -> list[SetSection]:
    budget = int(min(options.megabytes * _MEGABYTE, sys.maxsize))  # it may be infinite
    sections = []
    total = sum(len(each.worst(options.utterances)) for each in scored.values())
    with progress_bar(console, "drawing, utterances", total) as bar:
        done = 0
        for number, (split, each) in enumerate(scored.items()):
            own = ByteBudget(budget // (len(scored) - number))
            left_before = own.left
            comparison = comparisons.get(split)
            pictures, ranges = None, None
            problems = _problems_of_other(each, comparison, names)
            if options.pictures and options.utterances and each.details.cuts and run.config:
                pictures, problem = _pictures(run, each.result)
                problems.append(problem)
                # One set is enough.
                if pictures is not None and number == 0:
                    ranges, problem = pictures.ranges(_spread(list(each.details.cuts.values())))
                    problems.append(problem)
            worst = []
            for shown in worst_utterances(
                each,
                options.utterances,
                own,
                pictures,
                with_audio=options.audio,
                comparison=comparison,
            ):
                worst.append(shown)
                done += 1
                bar.show(done)
            budget -= left_before - own.left
            sections.append(
                set_section(
                    f"set-{number}",
                    each,
                    comparison,
                    names,
                    worst,
                    [problem for problem in problems if problem],
                    own.left_out,
                    ranges,
                )
            )
    return sections


def _problems_of_other(
    first: ScoredSet, comparison: Comparison | None, names: Sequence[str]
) -> list[str]:
    """The problems that the second result of a comparison alone has."""
    if comparison is None:
        return []
    return [
        f"{names[1]}: {each}" for each in comparison.second.problems if each not in first.problems
    ]


def _spread(cuts: Sequence[Any]) -> Sequence[Any]:
    """A few cuts, evenly spread."""
    return cuts[:: max(1, len(cuts) // _RANGE_UTTERANCES)][:_RANGE_UTTERANCES]


def _pictures(run: ReportRun, result: ResultFile) -> tuple[UtterancePictures | None, str]:
    """The object that draws utterances of a result, and a sentence about missing lattices."""
    assert run.config is not None
    try:
        pictures = UtterancePictures(run.config, result)
    except (OSError, ValueError) as error:
        return None, f"No pictures: {error}."
    return pictures, pictures.problem


def _hints(
    runs: Sequence[ReportRun],
    names: Sequence[str],
    scored: dict[str, ScoredSet],
    second: dict[str, ScoredSet],
) -> list[str]:
    """Sentences about missing parts of the page, each with the command that creates the part, and
    about sets that are in the table of results alone."""
    hints = []
    for each in runs:
        if not each.metrics:
            hints.append(f"{each.name} has no metrics.jsonl, so there are no curves.")
        elif each.step < each.steps:
            hints.append(
                f"{each.name} is at step {each.step:,} of {each.steps:,}: this page shows the run "
                "so far."
            )
        if each.config is not None and not each.results:
            hints.append(
                f"{each.name} has not been decoded: run `pruned-rnnt decode {each.folder}`, then "
                "make the report again."
            )
    if scored and second and not scored.keys() & second.keys():
        hints.append(
            f"Nothing is compared, because no set was decoded in both: {', '.join(scored)} in one, "
            f"{', '.join(second)} in the other."
        )
    hints += [
        f"{names[1]}, {name}: {problem}"
        for name, each in second.items()
        if name not in scored
        for problem in each.problems
    ]
    return hints
