"""The page from its template, style and script, which are files of the package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt import __version__
from pruned_rnnt.config.load import differences
from pruned_rnnt.config.written import to_yaml
from pruned_rnnt.decode.scoring.significance import REPLICATIONS
from pruned_rnnt.report.charts import Chart
from pruned_rnnt.report.ranges import MOST_RATIO
from pruned_rnnt.report.report_run import ReportRun
from pruned_rnnt.report.scored_set import ScoredSet
from pruned_rnnt.report.set_section import SetSection
from pruned_rnnt.report.training_charts import validation_table
from pruned_rnnt.system.optional_packages import PACKAGES_OF_EXTRA, require

_FILES = Path(__file__).parent / "page"
# The end of the title in report.html, which is among the first characters of every page.
_TITLE_END, _HEAD_CHARACTERS = "pruned_rnnt report</title>", 4096


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the template shows.

    runs: both, or the one whose two results are compared.
    names: of the run, and of the other one if there is one; different from each other.
    results: every decoded set of the runs, for the table of results, with the run's name.
    hints: what is missing, and the command that makes it.
    written: date and time.
    """

    run: ReportRun
    other: ReportRun | None
    runs: Sequence[ReportRun]
    names: Sequence[str]
    charts: Sequence[Chart]
    results: Sequence[tuple[str, ScoredSet]]
    sections: Sequence[SetSection]
    hints: Sequence[str]
    written: str


def render_page(page: Page) -> str:
    """The HTML of a page; all texts are escaped, and what is no Unicode in them replaced."""
    require(*PACKAGES_OF_EXTRA["report"])
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(_FILES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(json=script_json, percent=percent, clock=clock, signed=signed)
    is_same_run = len(page.runs) < len(page.names)
    named = list(zip([page.run.name] if is_same_run else page.names, page.runs, strict=True))
    tables = [table for section in page.sections for table in section.tables]
    html = environment.get_template("report.html").render(
        page=page,
        style=(_FILES / "report.css").read_text(encoding="utf-8"),
        script="".join(
            (_FILES / name).read_text(encoding="utf-8") for name in ("tables.js", "page.js")
        ),
        tables={table.name: table.as_json() for table in tables},
        hover=[chart.hover for chart in page.charts],
        validations=[(name, *validation_table(run)) for name, run in named],
        replications=REPLICATIONS,
        most_ratio=MOST_RATIO,
        older=[
            (name, *each)
            for name, run in ([] if is_same_run else named)
            for each in run.other_results([scored.result for _, scored in page.results])
        ],
        settings=_settings(page.run),
        differences=_differences(page.run, page.other),
        version=__version__,
    )
    return html.encode("utf-8", "replace").decode()


def is_report(path: Path) -> bool:
    """Whether a file is a page of `render_page`."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return _TITLE_END in file.read(_HEAD_CHARACTERS)


def _settings(run: ReportRun) -> str:
    return "" if run.config is None else to_yaml(run.config)


def _differences(run: ReportRun, other: ReportRun | None) -> list[str]:
    if other is None or run.config is None or other.config is None:
        return []
    return differences(run.config, other.config)


def script_json(value: Any) -> str:
    """JSON for a script element, in which no text can end the element or start a comment."""
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def percent(value: float, digits: int = 2) -> str:
    """A fraction in percent; a dash for infinite and NaN."""
    if abs(value) < float("inf"):
        return f"{100 * value:.{digits}f}%"
    return "\N{EN DASH}"


def signed(value: float) -> str:
    """A difference with its sign and two decimals."""
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def clock(seconds: float) -> str:
    """A duration: `7.5 s`, `3.4 min` or `12.0 h`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
