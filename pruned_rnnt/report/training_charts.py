"""Curves of training and validation of one run or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from pruned_rnnt.report.charts import Chart, Line, line_chart
from pruned_rnnt.report.report_run import ReportRun

# For longer runs, a point is the mean of several lines of the log.
_MOST_POINTS = 300


class _Measure(NamedTuple):
    """A value of metrics.jsonl: group, name, label, colour; scale: from its unit to the chart's."""

    group: str
    name: str
    label: str
    colour: int
    scale: float = 1.0


class _Plan(NamedTuple):
    title: str
    measures: Sequence[_Measure]
    log: bool = False
    percent: bool = False
    from_zero: bool = False


_PLANS = (
    _Plan(
        "Loss per encoder frame",
        (
            _Measure("train", "total_per_frame", "training", 0),
            _Measure("valid", "total", "validation", 1),
        ),
        log=True,
    ),
    _Plan("Validation WER", (_Measure("valid", "wer", "WER", 1),), percent=True, from_zero=True),
    _Plan("Validation CER", (_Measure("valid", "cer", "CER", 1),), percent=True, from_zero=True),
    _Plan("Validation perplexity", (_Measure("valid", "perplexity", "perplexity", 1),), log=True),
    _Plan(
        "Parts of the training loss",
        (
            _Measure("train", "simple_per_frame", "simple", 2),
            _Measure("train", "pruned_per_frame", "pruned", 0),
            _Measure("train", "full_per_frame", "full", 0),
            _Measure("train", "ctc_per_frame", "CTC", 1),
            _Measure("train", "cr_ctc_per_frame", "CR-CTC", 3),
        ),
        log=True,
    ),
    _Plan(
        "Retained mass",
        (
            _Measure("valid", "retained_mass", "paths in the band", 0),
            _Measure("valid", "retained_symbol_mass", "symbols in the band", 2),
        ),
        percent=True,
    ),
    _Plan(
        "Band edge mass",
        (_Measure("valid", "band_edge_mass", "symbols on the edges", 3),),
        percent=True,
    ),
    _Plan(
        "Emission delay of validation words, seconds",
        (
            _Measure("valid", "delay_p50", "median", 0),
            _Measure("valid", "delay_p95", "95th percentile", 1),
        ),
    ),
    _Plan("Delay penalty", (_Measure("valid", "delay_penalty", "penalty", 0),)),
    _Plan("Learning rate", (_Measure("train", "learning_rate", "rate", 0),)),
    _Plan(
        "Gradient norm, not clipped",
        (_Measure("train", "gradient_norm", "norm", 2),),
        log=True,
    ),
    _Plan(
        "Speed, times real time",
        (_Measure("train", "audio_hours_per_second", "speed", 0, 3600.0),),
    ),
)


def training_charts(runs: Sequence[ReportRun], names: Sequence[str]) -> list[Chart]:
    """The charts for which there are values; the second run is dashed.

    Args:
        runs: one or two.
        names: of the runs in legends, used if there are two.
    """
    charts = []
    for plan in _PLANS:
        lines = []
        for number, run in enumerate(runs):
            for measure in plan.measures:
                steps, values = series(run.group(measure.group), measure.name)
                label = f"{names[number]}: {measure.label}" if len(runs) > 1 else measure.label
                lines.append(
                    Line(
                        label=label,
                        steps=steps,
                        values=[value * measure.scale for value in values],
                        colour=measure.colour if len(plan.measures) > 1 or not number else 4,
                        dashed=number > 0,
                        dots=measure.group == "valid",
                    )
                )
        chart = line_chart(
            plan.title, lines, log=plan.log, percent=plan.percent, from_zero=plan.from_zero
        )
        if chart is not None:
            charts.append(chart)
    return charts


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a measure, at most 300 points, each a mean of neighbours."""
    points = [
        (line["step"], float(line[name]))
        for line in lines
        if isinstance(line.get(name), int | float) and math.isfinite(line[name])
    ]
    size = max(1, math.ceil(len(points) / _MOST_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    # The last step of a group, so that the curve ends where the run does.
    return [group[-1][0] for group in groups], [fmean([v for _, v in group]) for group in groups]


def validation_table(run: ReportRun) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the validations of a run."""
    percent: Callable[[float], str] = "{:.2%}".format
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("loss", "total", "{:.4f}".format),
        ("WER", "wer", percent),
        ("CER", "cer", percent),
        ("perplexity", "perplexity", "{:.3f}".format),
        ("retained mass", "retained_mass", percent),
        ("retained symbols", "retained_symbol_mass", percent),
        ("band edges", "band_edge_mass", percent),
    ]
    lines = run.group("valid")
    columns = [column for column in columns if any(column[1] in line for line in lines)]
    rows = [
        [
            f"{line['step']:,}",
            *(_cell(float(line[name]), form) if name in line else "" for _, name, form in columns),
        ]
        for line in lines
    ]
    return ["step", *(heading for heading, _, _ in columns)], rows


def _cell(value: float, form: Callable[[float], str]) -> str:
    return form(value) if math.isfinite(value) else "\N{EN DASH}"
