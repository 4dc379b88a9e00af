"""Emission delays of a set: a histogram, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pruned_rnnt.decode.emission_delay import (
    PERCENTILES,
    WordDelay,
    percentile,
    read_delays,
)
from pruned_rnnt.report.charts import Bars, Chart, bar_chart
from pruned_rnnt.run.result_file import ResultFile

# Widths of the bars in milliseconds; the smallest that needs no more than so many of them.
_WIDTHS = (20, 40, 80, 160, 320, 640, 1280)
_MOST_BARS = 24


class DelayRow(NamedTuple):
    """Percentiles in milliseconds."""

    name: str
    words: int
    p50: float
    p90: float
    p95: float
    p99: float


class DelaySection(NamedTuple):
    """The delays of a set as the template shows them."""

    chart: Chart
    rows: Sequence[DelayRow]


def delay_section(result: ResultFile, salt: str) -> DelaySection | None:
    """The delays that `decode` wrote; None if it wrote none, as for data without word times.

    Raises:
        ValueError: the file is damaged.
    """
    delays = [delay for _, delay in read_delays(result.delays_path)]
    if not delays:
        return None
    rows = [
        _row("All", delays),
        _row("First of an utterance", [delay for delay in delays if delay.first]),
        _row("Last of an utterance", [delay for delay in delays if delay.last]),
    ]
    return DelaySection(_chart(delays, salt), [row for row in rows if row.words])


def _row(name: str, delays: Sequence[WordDelay]) -> DelayRow:
    seconds = [delay.seconds for delay in delays]
    found = (round(1000 * percentile(seconds, p)) if seconds else 0 for p in PERCENTILES)
    return DelayRow(name, len(delays), *found)


def _chart(delays: Sequence[WordDelay], salt: str) -> Chart:
    milliseconds = [1000 * delay.seconds for delay in delays]
    # A few words with wrong times would make the bars of all others too wide.
    low, high = (1000 * percentile([d.seconds for d in delays], p) for p in (0.5, 99.5))
    width = next((w for w in _WIDTHS if high // w - low // w < _MOST_BARS), _WIDTHS[-1])
    first, last = int(low // width), int(high // width)
    counts = [0] * (last - first + 1)
    for value in milliseconds:
        counts[min(max(int(value // width), first), last) - first] += 1
    labels = [f"{width * place}" for place in range(first, last + 1)]
    unknown = float("nan")
    bars = Bars(
        label="share of the words",
        values=[count / len(delays) for count in counts],
        intervals=[(unknown, unknown)] * len(counts),
        colour=0,
    )
    # Every label would be too many.
    shown = [label if place % 4 == 0 else "" for place, label in enumerate(labels)]
    return bar_chart("Emission delay", shown, [bars], "milliseconds", salt=f"{salt}-delays")
