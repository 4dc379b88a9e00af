"""The style of the axes of all pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "#ffffff"
INK = "#20242c"
FAINT_INK = "#6b7280"
FRAME = "#d4d7dd"


def plain_axes(axes: Axes) -> None:
    """Set the style that all pictures share."""
    axes.set_facecolor(PAPER)
    for spine in axes.spines.values():
        spine.set_color(FRAME)
    axes.tick_params(colors=FAINT_INK, labelsize=8, length=2.5)


def add_seconds(axes: Axes, frame_seconds: float) -> None:
    """Add an axis of seconds above that of encoder frames."""
    import numpy as np

    seconds = axes.secondary_xaxis(
        "top",
        functions=(
            lambda frames: np.asarray(frames) * frame_seconds,
            lambda seconds: np.asarray(seconds) / frame_seconds,
        ),
    )
    seconds.set_xlabel("seconds", color=FAINT_INK, fontsize=8)
    seconds.tick_params(colors=FAINT_INK, labelsize=7, length=2.5)
    seconds.spines["top"].set_color(FRAME)


def add_colour_bar(figure: Figure, image: Any, axes: Axes) -> None:
    """Add a colour bar that explains the tints of a lattice."""
    bar = figure.colorbar(image, ax=axes, pad=0.012, aspect=32, ticks=[0.0, 0.01, 0.1, 0.3, 0.6, 1])
    bar.set_label("probability that a path visits the node", color=FAINT_INK, fontsize=8)
    bar.ax.tick_params(labelsize=7, colors=FAINT_INK, length=2)
    bar.outline.set_visible(False)
