"""The durations with which TDT paths leave each frame, as a strip below the lattice's picture.

Axes: N batch, T frames, U symbols, K durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pruned_rnnt.loss.results import TdtOccupancy

# Inches that a strip adds to a picture: for its frame, and for each duration.
_STRIP_INCHES, _DURATION_INCHES = 0.45, 0.13


def duration_shares(
    occupancy: TdtOccupancy, index: int, logit_length: int, target_length: int
) -> Tensor:
    """(K, T_n): the expected number of arcs with each duration that leave each frame.

    For durations above 0 this is the share of the paths that take such an arc. For duration 0 it
    may exceed 1, because a path may take several such arcs in one frame.
    """
    arcs_TUK = occupancy.durations[index, :logit_length, : target_length + 1]
    return arcs_TUK.detach().to("cpu").double().nan_to_num(0.0).sum(dim=1).T


def strip_height(durations: Sequence[int]) -> float:
    """In inches."""
    return _STRIP_INCHES + _DURATION_INCHES * len(durations)


def draw_durations(axes: Axes, shares_KT: Tensor, durations: Sequence[int], ink: str) -> None:
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
    axes.set_ylabel("duration", color=ink, fontsize=9)
