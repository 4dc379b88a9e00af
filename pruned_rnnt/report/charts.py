"""matplotlib's SVG with the colours of the page, so that it is readable in light and dark mode.

Labels are SVG text, not outlines: they are small, can be searched, and use the page's fonts.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that matplotlib draws with, and the variables of the page that replace them.
_VARIABLES = {
    "#010101": "--ink",
    "#010102": "--faint",
    "#010103": "--line",
    "#010104": "--series-1",
    "#010105": "--series-2",
    "#010106": "--series-3",
    "#010107": "--series-4",
    "#010108": "--series-5",
}
_INK, _FAINT, _LINE, *_SERIES = _VARIABLES
_INCHES = (4.7, 2.3)
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.7,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.size": 3,
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart; `colour` is one of five, `dashed` marks the second run."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: int
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend: the label, and the variable of its colour."""

    label: str
    variable: str
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart in the page.

    description: text for screen readers.
    hover: for line charts, the box of the axes in the coordinates of the SVG (left, top, right,
        bottom), the range of steps, and the points of each line, in the order of the keys.
    """

    title: str
    svg: str
    description: str
    keys: Sequence[Key]
    hover: dict[str, Any] = field(default_factory=dict)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    percent: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    """Values over training steps; None if no line has a point.

    Args:
        log: logarithmic values, if all are above 0.
        percent: the values are fractions.
        from_zero: the vertical axis starts at 0.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import PercentFormatter

    lines = [line for line in lines if line.steps]
    if not lines:
        return None
    with rc_context(_style(title)):
        figure, axes = _figure()
        for line in lines:
            axes.plot(
                line.steps,
                line.values,
                color=_SERIES[line.colour],
                linewidth=1.5,
                linestyle="--" if line.dashed else "-",
                marker="o" if line.dots and len(line.steps) < 60 else None,
                markersize=3,
            )
        if log and all(value > 0 for line in lines for value in line.values):
            axes.set_yscale("log")
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol="%"))
        axes.set_xlim(0, None)
        if from_zero:
            axes.set_ylim(0, None)
        axes.set_xlabel("step")
        svg = _svg(figure)
        hover = _hover(figure, axes, lines, percent=percent)
    last = ", ".join(f"{line.label} {_shown(line.values[-1], percent)}" for line in lines)
    return Chart(
        title=title,
        svg=svg,
        description=f"{title} over {lines[0].steps[-1]:,} training steps; at the end: {last}",
        keys=[
            Key(label=line.label, variable=f"--series-{line.colour + 1}", dashed=line.dashed)
            for line in lines
        ],
        hover=hover,
    )


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars with intervals, one for each group; a value that is infinite or NaN has no bar."""

    label: str
    values: Sequence[float]
    intervals: Sequence[tuple[float, float]]
    colour: int


def bar_chart(
    title: str, groups: Sequence[str], bars: Sequence[Bars], unit: str, salt: str
) -> Chart:
    """Fractions as bars in percent, side by side within each group.

    Args:
        unit: of the groups.
        salt: different from that of other charts of the page.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import PercentFormatter

    with rc_context(_style(salt)):
        figure, axes = _figure()
        width = 0.62 / len(bars)
        for number, each in enumerate(bars):
            colour = _SERIES[each.colour]
            shift = (number - (len(bars) - 1) / 2) * width
            for place, (value, (lower, upper)) in enumerate(
                zip(each.values, each.intervals, strict=True)
            ):
                if not math.isfinite(value):
                    continue
                axes.bar(place + shift, value, width=width * 0.92, color=colour)
                if math.isfinite(lower) and upper > lower:
                    axes.errorbar(
                        place + shift,
                        value,
                        yerr=[[max(0.0, value - lower)], [max(0.0, upper - value)]],
                        color=_INK,
                        linewidth=1,
                        capsize=3,
                    )
        axes.set_xticks(range(len(groups)), groups, fontsize=8)
        axes.set_xlabel(unit)
        axes.tick_params(axis="x", length=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol="%"))
        axes.set_ylim(0, None)
        svg = _svg(figure)
    spoken = "; ".join(
        f"{each.label}: "
        + ", ".join(f"{g} {_shown(v, True)}" for g, v in zip(groups, each.values, strict=True))
        for each in bars
    )
    return Chart(
        title=title,
        svg=svg,
        description=f"{title}. {spoken}",
        keys=[Key(label=each.label, variable=f"--series-{each.colour + 1}") for each in bars],
    )


def _style(salt: str) -> Any:
    """Settings of matplotlib; ids within the SVG depend on the salt, and differ by chart."""
    return {**_STYLE, "svg.hashsalt": salt}


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=72, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    """The SVG element alone, with the page's colours and fonts, hidden from screen readers."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # These names would occur once in every chart; those of clips and markers depend on the salt.
    text = re.sub(r' id="[a-zA-Z.\d]+_\d+"', "", text)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return re.sub(r"\s+", " ", text.replace("<svg ", '<svg aria-hidden="true" ', 1))


def _hover(figure: Figure, axes: Axes, lines: Sequence[Line], *, percent: bool) -> dict[str, Any]:
    box = axes.get_window_extent()
    height = figure.bbox.height
    return {
        "box": [round(x, 1) for x in (box.x0, height - box.y1, box.x1, height - box.y0)],
        "range": [float(limit) for limit in axes.get_xlim()],
        "percent": percent,
        "lines": [
            [list(line.steps), [float(f"{value:.4g}") for value in line.values]] for line in lines
        ],
    }


def _shown(value: float, percent: bool) -> str:
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.2%}" if percent else f"{value:.4g}"
