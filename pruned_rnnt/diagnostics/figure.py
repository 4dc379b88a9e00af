"""A picture of one utterance's lattice, in the style of all pictures: occupancy, pruning band and
alignment, and for TDT a strip of the durations with which paths leave each frame.

It uses matplotlib's object interface: no pyplot, no global state, no display. matplotlib is
imported when the first figure is drawn.

Axes: N batch, T frames, U symbols, K durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pruned_rnnt.diagnostics.arguments import checked_occupancy
from pruned_rnnt.diagnostics.emission_times import Alignment
from pruned_rnnt.diagnostics.labels import printable, use_fonts_of_labels
from pruned_rnnt.loss.bounds import check_bounds_type
from pruned_rnnt.loss.checks import check_finite, check_integer, check_shape, check_tensor
from pruned_rnnt.loss.results import TdtOccupancy
from pruned_rnnt.system.optional_packages import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pruned_rnnt.loss.results import Bounds, Occupancy

PAPER = "#ffffff"
INK = "#20242c"
FAINT_INK = "#6b7280"
_FRAME = "#d4d7dd"
_BAND = "#f08c00"
_BAND_TINT = "#fff5e6"
PATH = "#c2255c"
# From transparent through teal to near black: the band's tint shows through at probability 0.
_COLOURS = ("#e4f4f300", "#cfe9e8c0", "#9fd3d0", "#4aa5a8", "#1b6f7d", "#123f55", "#0b1d33")
# Posteriors span several decades; with this exponent, 1% is visible.
_GAMMA = 0.45
_MAX_TOKEN_LABELS = 48
_MOST_OF_TITLE = 300
# Inches that a strip adds to a picture: for its frame, and for each duration.
_STRIP_INCHES, _DURATION_INCHES = 0.45, 0.13


def lattice_figure(
    occupancy: Occupancy | TdtOccupancy,
    bounds: Bounds | None = None,
    alignment: Alignment | Tensor | None = None,
    *,
    index: int = 0,
    logit_length: int | None = None,
    target_length: int | None = None,
    tokens: Sequence[str] | None = None,
    title: str | None = None,
    frame_seconds: float | None = None,
    durations: Sequence[int] | None = None,
) -> Figure:
    """Draw the lattice of one utterance.

    The image is the posterior probability that a path visits node (t, u); the outline is the band;
    the line is the alignment, with a dot where a symbol is emitted. With durations, a strip below
    shows how often paths leave a frame with each of them.

    Args:
        occupancy: emit, blank (N, T, U + 1), e.g. from `rnnt_loss_simple`.
        bounds: the band, start (N, T) and s_range.
        alignment: from `viterbi_alignment`, or frames (N, U), or the frames (U,) of this utterance.
        index: index of the utterance in the batch.
        logit_length, target_length: T_n and U_n of this utterance; default: the padded sizes.
        tokens: the target's symbols as text, for the vertical axis; at least U_n of them.
        title: title of the picture.
        frame_seconds: duration of an encoder frame, above 0; adds an axis in seconds.
        durations: those of the loss that gave the occupancy, which is then a TdtOccupancy.

    Returns:
        A Figure for `figure.savefig(path)` or TensorBoard's `add_figure`.

    Raises:
        TypeError: occupancy, bounds, alignment, index or frame_seconds is of another type, or the
            occupancy has no durations although these are given.
        ValueError: the index or a length is outside the occupancy, bounds is not (N, T), alignment
            neither (N, U) nor (U,), there are fewer tokens than symbols, or frame_seconds is not
            above 0.
    """
    if frame_seconds is not None and check_finite("frame_seconds", frame_seconds) <= 0:
        raise ValueError(
            f"frame_seconds is {frame_seconds}; it must be above 0, or None for no axis in seconds"
        )
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    node_TU = lattice_visits(occupancy, index, logit_length, target_length)
    check_paths(occupancy, bounds, alignment)
    width, height = lattice_size(*node_TU.shape)
    strip = _strip_height(durations) if durations else 0.0
    figure = Figure(figsize=(width, height + strip), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_facecolor(PAPER)
    if durations:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(height, strip))
        frames, columns = node_TU.shape
        shares_KT = _duration_shares(occupancy, index, frames, columns - 1)
        _draw_durations(below, shares_KT, durations)
        plain_axes(below)
    else:
        axes = figure.add_subplot()
    image = draw_lattice(axes, node_TU, bounds, alignment, index=index, tokens=tokens)
    if frame_seconds is not None:
        _add_seconds(axes, frame_seconds)
    if title is not None:
        axes.set_title(
            printable(title, _MOST_OF_TITLE), color=INK, fontsize=10.5, loc="left", pad=8
        )
    add_colour_bar(figure, image, axes)
    use_fonts_of_labels(figure)
    return figure


def check_paths(
    occupancy: Occupancy | TdtOccupancy,
    bounds: Bounds | None,
    alignment: Alignment | Tensor | None,
) -> None:
    """Raises TypeError or ValueError for a band or an alignment of other lattices."""
    batch, frames = occupancy[0].shape[:2]
    if bounds is not None:
        check_bounds_type(bounds)
        check_shape("bounds.start", bounds.start, (batch, frames), "(N, T)")
    if alignment is not None:
        emitted = alignment.frames if isinstance(alignment, Alignment) else alignment
        check_tensor("alignment", emitted)
        if emitted.ndim != 1 and (emitted.ndim != 2 or len(emitted) != batch):
            raise ValueError(
                f"alignment has shape {tuple(emitted.shape)}; it must be (N, U) with N = {batch}, "
                "or (U,)"
            )


def draw_lattice(
    axes: Axes,
    node_TU: Tensor,
    bounds: Bounds | None,
    alignment: Alignment | Tensor | None,
    *,
    index: int,
    tokens: Sequence[str] | None,
) -> Any:
    """Draw one utterance's lattice, with encoder frames as x; returns the image.

    Args:
        node_TU: from `lattice_visits`.
        bounds, alignment, index, tokens: as for `lattice_figure`; see `check_paths`.

    Raises:
        ValueError: there are fewer tokens than symbols.
    """
    frame_count, columns = node_TU.shape
    if tokens is not None and len(tokens) < columns - 1:
        raise ValueError(
            f"tokens has {len(tokens)} entries; it must have one for each of the "
            f"{columns - 1} symbols"
        )
    image = _draw_visits(axes, node_TU)
    if bounds is not None:
        _draw_band(axes, bounds, index, frame_count, columns)
    if alignment is not None:
        _draw_alignment(axes, alignment, index, frame_count, columns)
    _decorate(axes, frame_count, columns, tokens)
    return image


def lattice_visits(
    occupancy: Occupancy | TdtOccupancy,
    index: int,
    logit_length: int | None,
    target_length: int | None,
) -> Tensor:
    """(T_n, U_n + 1) posterior of visiting each node, on the CPU, in [0, 1]."""
    occupancy, index = checked_occupancy(occupancy), check_integer("index", index)
    batch, padded_frames, padded_columns = occupancy.emit.shape
    if not -batch <= index < batch:
        raise ValueError(f"index is {index}; the batch has {batch} utterances")
    frames = padded_frames if logit_length is None else int(logit_length)
    symbols = padded_columns - 1 if target_length is None else int(target_length)
    if not 1 <= frames <= padded_frames:
        raise ValueError(f"logit_length is {frames}; it must be in 1..{padded_frames}")
    if not 0 <= symbols < padded_columns:
        raise ValueError(f"target_length is {symbols}; it must be in 0..{padded_columns - 1}")
    node = occupancy.emit[index, :frames, : symbols + 1].detach().to("cpu", torch.float64)
    node = node + occupancy.blank[index, :frames, : symbols + 1].detach().to("cpu", torch.float64)
    return node.nan_to_num(0.0).clamp(0.0, 1.0)


def lattice_size(frame_count: int, columns: int) -> tuple[float, float]:
    """Width and height in inches, for the frames and for a label per symbol, within limits.

    The width stops growing at a minute of speech, because viewers cannot show wider pictures.
    """
    width = 4.5 + frame_count * 0.045
    # Beyond 8 s, each frame is narrower.
    width = min(max(width, 6.5), 13.0) + max(0.0, min(width, 72.0) - 13.0) * 0.25
    height = min(max(1.6 + columns * 0.19, 3.2), 9.0)
    return width, height


def _draw_visits(axes: Axes, node_TU: Tensor) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    return axes.imshow(
        node_TU.T.numpy(),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=LinearSegmentedColormap.from_list("lattice", _COLOURS),
        norm=PowerNorm(_GAMMA, vmin=0.0, vmax=1.0),
        zorder=1,
    )


def _draw_band(axes: Axes, bounds: Bounds, index: int, frame_count: int, columns: int) -> None:
    """Draw the band as a closed staircase: a tint below the image, an outline above it."""
    from matplotlib.patches import Polygon

    starts = bounds.start[index, :frame_count].tolist()
    lower: list[tuple[float, float]] = []
    upper: list[tuple[float, float]] = []
    for frame, start in enumerate(starts):
        top = min(start + bounds.s_range, columns) - 0.5
        for x in (frame - 0.5, frame + 0.5):
            lower.append((x, start - 0.5))
            upper.append((x, top))
    corners = lower + upper[::-1]
    axes.add_patch(Polygon(corners, closed=True, facecolor=_BAND_TINT, linewidth=0, zorder=0))
    axes.add_patch(
        Polygon(
            corners,
            closed=True,
            fill=False,
            edgecolor=_BAND,
            linewidth=1.1,
            joinstyle="miter",
            label=f"band kept by pruning, S = {bounds.s_range}",
            zorder=2,
        )
    )


def _draw_alignment(
    axes: Axes, alignment: Alignment | Tensor, index: int, frame_count: int, columns: int
) -> None:
    """Draw the best path as a staircase through the nodes, with a dot at each emission."""
    frames = alignment.frames if isinstance(alignment, Alignment) else alignment
    row = frames[index] if frames.ndim == 2 else frames
    emitted = [int(frame) for frame in row.tolist()[: columns - 1]]
    if any(frame < 0 for frame in emitted):
        return  # no path
    xs, ys = [0.0], [0.0]
    for symbol, frame in enumerate(emitted):
        xs += [frame, frame]
        ys += [symbol, symbol + 1]
    xs.append(frame_count - 1)
    ys.append(len(emitted))
    axes.plot(xs, ys, color=PAPER, linewidth=2.6, alpha=0.8, solid_joinstyle="round", zorder=3)
    axes.plot(
        xs, ys, color=PATH, linewidth=1.3, solid_joinstyle="round", label="best path", zorder=4
    )
    axes.scatter(
        emitted,
        [symbol + 1 for symbol in range(len(emitted))],
        s=13,
        color=PATH,
        edgecolors=PAPER,
        linewidths=0.7,
        label="symbol emitted",
        zorder=5,
    )


def _decorate(axes: Axes, frame_count: int, columns: int, tokens: Sequence[str] | None) -> None:
    """Set limits, labels, ticks and legend."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.5, frame_count - 0.5)
    axes.set_ylim(-0.5, columns - 0.5)
    plain_axes(axes)
    axes.set_xlabel("encoder frame", color=INK, fontsize=9)
    if tokens is not None:
        # For long texts, only every second, third, ... symbol is labelled.
        step = -(-columns // _MAX_TOKEN_LABELS)
        names = ["start", *(printable(t) for t in tokens[: columns - 1])]
        axes.set_yticks(range(0, columns, step), names[::step])
        for label in axes.get_yticklabels():
            label.set_color(INK)
        axes.set_ylabel("symbols emitted", color=INK, fontsize=9)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("number of symbols emitted", color=INK, fontsize=9)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower right",
            fontsize=8,
            frameon=True,
            framealpha=0.92,
            labelcolor=INK,
            edgecolor=_FRAME,
            fancybox=False,
            borderpad=0.7,
        )


def _duration_shares(
    occupancy: Occupancy | TdtOccupancy, index: int, logit_length: int, target_length: int
) -> Tensor:
    """(K, T_n): the expected number of arcs with each duration that leave each frame.

    For durations above 0 this is the share of the paths that take such an arc. For duration 0 it
    may exceed 1, because a path may take several such arcs in one frame.

    Raises:
        TypeError: the occupancy has no durations.
    """
    if not isinstance(occupancy, TdtOccupancy):
        raise TypeError(
            f"occupancy is a {type(occupancy).__name__}; with durations it must be a TdtOccupancy, "
            "which a TDT loss returns"
        )
    arcs_TUK = occupancy.durations[index, :logit_length, : target_length + 1]
    return arcs_TUK.detach().to("cpu").double().nan_to_num(0.0).sum(dim=1).T


def _strip_height(durations: Sequence[int]) -> float:
    """In inches."""
    return _STRIP_INCHES + _DURATION_INCHES * len(durations)


def _draw_durations(axes: Axes, shares_KT: Tensor, durations: Sequence[int]) -> None:
    """Draw the shares as an image: encoder frames as x, a row for each duration, long ones on top.

    Raises:
        ValueError: the numbers of durations differ.
    """
    if len(durations) != shares_KT.size(0):
        raise ValueError(
            f"durations has {len(durations)} elements; the occupancy has {shares_KT.size(0)}"
        )
    order = sorted(range(len(durations)), key=lambda n: durations[n])
    axes.imshow(
        shares_KT[order].clamp(0.0, 1.0).numpy(),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap="Greys",
        vmin=0.0,
        vmax=1.0,
    )
    axes.set_yticks(range(len(order)), [str(durations[n]) for n in order])
    axes.set_ylabel("duration", color=INK, fontsize=9)


def plain_axes(axes: Axes) -> None:
    """Set the style that all pictures share."""
    axes.set_facecolor(PAPER)
    for spine in axes.spines.values():
        spine.set_color(_FRAME)
    axes.tick_params(colors=FAINT_INK, labelsize=8, length=2.5)


def _add_seconds(axes: Axes, frame_seconds: float) -> None:
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
    seconds.spines["top"].set_color(_FRAME)


def add_colour_bar(figure: Figure, image: Any, axes: Axes) -> None:
    """Add a colour bar that explains the tints of a lattice."""
    bar = figure.colorbar(image, ax=axes, pad=0.012, aspect=32, ticks=[0.0, 0.01, 0.1, 0.3, 0.6, 1])
    bar.set_label("probability that a path visits the node", color=FAINT_INK, fontsize=8)
    bar.ax.tick_params(labelsize=7, colors=FAINT_INK, length=2)
    bar.outline.set_visible(False)
