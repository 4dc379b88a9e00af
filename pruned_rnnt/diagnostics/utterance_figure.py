"""A picture of one utterance: spectrogram with recognised tokens, words, and the lattice.

Axes: T encoder frames, F mel bins, U symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from pruned_rnnt.diagnostics.emission_times import Alignment
from pruned_rnnt.diagnostics.figure import (
    FAINT_INK,
    INK,
    PAPER,
    PATH,
    add_colour_bar,
    check_paths,
    draw_lattice,
    lattice_size,
    lattice_visits,
    plain_axes,
)
from pruned_rnnt.diagnostics.labels import columns, is_mark, printable, use_fonts_of_labels
from pruned_rnnt.system.optional_packages import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pruned_rnnt.loss.results import Bounds, Occupancy, TdtOccupancy

# A label needs about this many inches; of labels that are closer, only the first is drawn.
_LABEL_INCHES = 0.11
# Columns of the title per inch, and inches of a column of a word; see `columns`.
_TITLE_COLUMNS = 10
_COLUMN_INCHES = 0.055
# More are not searched for places to wrap.
_MOST_OF_TITLE = 1000
_TRACK_TINTS = ("#d0ebff", "#ffe3ec", "#e6fcf5")


class Track(NamedTuple):
    """A row of words: its name, and (word, begin, end) in (fractional) encoder frames."""

    name: str
    words: Sequence[tuple[str, float, float]]


def utterance_figure(
    features_TF: Tensor,
    emissions: Sequence[tuple[str, int]],
    tracks: Sequence[Track],
    occupancy: Occupancy | TdtOccupancy,
    bounds: Bounds | None = None,
    alignment: Alignment | None = None,
    *,
    target_length: int,
    logit_length: int,
    tokens: Sequence[str],
    frame_seconds: float,
    title: str = "",
) -> Figure:
    """Draw an utterance that is the only one of its batch.

    From top to bottom: the spectrogram with the recognised tokens at their frames, rows of words,
    and the lattice of the reference as in `lattice_figure`, all on the same time axis.

    Args:
        features_TF: log-mel energies, a whole number of frames per encoder frame.
        emissions: recognised tokens and the encoder frames in which they were emitted.
        tracks: rows of words to compare.
        occupancy, bounds, alignment: those of the reference, N = 1.
        target_length, logit_length: numbers of its symbols and encoder frames.
        tokens: the reference's symbols as text.
        frame_seconds: duration of an encoder frame.
        title: title of the picture; long lines are wrapped, and cut after three.
    """
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    node_TU = lattice_visits(occupancy, 0, logit_length, target_length)
    check_paths(occupancy, bounds, alignment)
    width, height = lattice_size(*node_TU.shape)
    heights = (1.9, 0.28 * max(1, len(tracks)), height)
    figure = Figure(figsize=(width, sum(heights) + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_facecolor(PAPER)
    spectrogram, words, lattice = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    image = draw_lattice(lattice, node_TU, bounds, alignment, index=0, tokens=tokens)
    frames_per_inch = logit_length / width
    per_frame = max(1, len(features_TF) // max(1, logit_length))
    features_TF = features_TF[: per_frame * logit_length]
    _draw_spectrogram(spectrogram, features_TF, (-0.5, logit_length - 0.5))
    _draw_emissions(spectrogram, emissions, _LABEL_INCHES * frames_per_inch)
    _draw_tracks(words, tracks, _COLUMN_INCHES * frames_per_inch)
    for axes in (spectrogram, words):
        plain_axes(axes)
        axes.tick_params(bottom=False)
    words.tick_params(left=False)
    ticks = [t for t in lattice.get_xticks() if 0 <= t < logit_length]
    lattice.set_xticks(ticks, [f"{t:.0f}\n{t * frame_seconds:.2f} s" for t in ticks])
    add_colour_bar(figure, image, lattice)
    shown = [printable(line, _MOST_OF_TITLE) for line in title.splitlines()]
    lines = [
        part
        for line in shown
        if line  # a width of 0 is an error
        for part in wrap(
            line,
            int(width * _TITLE_COLUMNS * len(line) / max(1, columns(line))),
            max_lines=3,
            placeholder=" ...",
        )
    ]
    figure.suptitle("\n".join(lines), color=INK, fontsize=10, x=0.01, ha="left")
    use_fonts_of_labels(figure)
    return figure


def spectrogram_figure(
    features_TF: Tensor,
    frame_seconds: float,
    words: Sequence[tuple[str, float]] = (),
    title: str = "",
) -> Figure:
    """Draw log-mel energies (T, F) of frames of `frame_seconds`.

    words: recognised words and their starts in seconds.
    """
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seconds = len(features_TF) * frame_seconds
    width = min(4.0 + seconds, 16.0)
    figure = Figure(figsize=(width, 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_spectrogram(axes, features_TF, (0.0, seconds))
    _draw_emissions(axes, words, _COLUMN_INCHES * seconds / width, upright=True)
    axes.set_xlabel("seconds")
    figure.suptitle(printable(title), fontsize=10)
    use_fonts_of_labels(figure)
    return figure


def _draw_spectrogram(axes: Axes, features_TF: Tensor, extent: tuple[float, float]) -> None:
    image_FT = features_TF.detach().to("cpu").float().T
    finite = image_FT[image_FT.isfinite()]
    axes.imshow(
        image_FT.nan_to_num(0.0).numpy(),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap="Greys",
        vmin=float(finite.quantile(0.02)) if 0 < len(finite) < 10**6 else None,
        extent=(*extent, -0.5, image_FT.size(0) - 0.5),
    )
    axes.set_ylabel("mel bin", color=INK, fontsize=9)


def _draw_emissions(
    axes: Axes, emissions: Sequence[tuple[str, float]], label_width: float, *, upright: bool = False
) -> None:
    """Draw lines at the times of tokens, and labels above them if there is room.

    label_width: on the axis of time, height of a line of text, or if upright, width of a column.
    """
    free = -1.0
    for token, frame in emissions:
        axes.axvline(frame, color=PATH, linewidth=0.8, alpha=0.75)
        if frame < free:
            continue
        text = printable(token)
        free = frame + label_width * (columns(text) if upright else 1)
        axes.annotate(
            text,
            (frame, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            # One letter is easier to read upright.
            rotation=90 if not upright and sum(not is_mark(c) for c in token) > 2 else 0,
            ha="left" if upright else "center",
            va="bottom",
            fontsize=7,
            color=PATH,
        )


def _draw_tracks(axes: Axes, tracks: Sequence[Track], column_width: float) -> None:
    """Draw rows of words, with labels where that of the word before leaves room.

    column_width: on the axis of time.
    """
    for row, track in enumerate(tracks):
        tint = _TRACK_TINTS[row % len(_TRACK_TINTS)]
        free = -1.0
        for word, begin, end in track.words:
            axes.barh(row, end - begin, left=begin - 0.5, height=0.86, color=tint)
            axes.plot((begin - 0.5,) * 2, (row - 0.43, row + 0.43), color=FAINT_INK, linewidth=0.9)
            if begin < free:
                continue
            text = printable(word)
            free = begin + column_width * columns(text)
            axes.text(begin - 0.3, row, text, fontsize=7, color=INK, va="center", clip_on=True)
    axes.set_yticks(range(len(tracks)), [track.name for track in tracks])
    axes.set_ylim(max(len(tracks), 1) - 0.5, -0.5)
