"""The lattice recursion itself, for log-probabilities in k2's layout."""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.results import LatticeOccupancy, MutualInformation
from pruned_rnnt.ops.common.library import REGULAR, accumulator
from pruned_rnnt.ops.common.utterances import as_int32
from pruned_rnnt.ops.lattice.lattice import mutual_information_sums


def mutual_information(
    px: Tensor,
    py: Tensor,
    boundary: Tensor | None = None,
    *,
    rnnt_type: str = "regular",
    validate: bool = False,
) -> MutualInformation:
    """log P of all paths through a lattice, given the log-probability of every arc.

    pruned_rnnt/ops/lattice/lattice.py states the recurrence.

    Args:
        px: (N, U, T+1) for `regular`, whose last used column is normally -inf, else (N, U, T):
            log-probability of symbol u+1 at (u, t).
        py: (N, U+1, T), log-probability of blank at (u, t).
        boundary: (N, 4) integers [u_begin, t_begin, u_end, t_end]; default [0, 0, U, T].
        rnnt_type: see rnnt_loss.
        validate: on other devices than the CPU, synchronize and check boundary as on the CPU;
            not in torch.compile, which refuses True.

    Returns:
        MutualInformation: total (N,), -inf where there is no path, and the occupancies, shaped
        like px and py; float64 for float64 inputs, else float32.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes, dtypes or devices that do not fit, or a boundary outside the lattice.
    """
    checks.check_floating("px", px, "(N, U, T+1) or (N, U, T)", 3)
    checks.check_floating("py", py, "(N, U+1, T)", 3)
    checks.check_same("py", py, "px", px)
    kind = checks.check_rnnt_type(rnnt_type)
    checks.check_validate(validate)
    batch, rows, frames = py.shape
    if rows == 0:
        raise ValueError(f"py has shape {tuple(py.shape)}; it must have a row for u = 0")
    last = frames + 1 if kind == REGULAR else frames
    meaning = f"(N, U, {'T+1' if kind == REGULAR else 'T'}) by the shape of py"
    checks.check_shape("px", px, (batch, rows - 1, last), meaning)
    if boundary is not None:
        checks.check_integers("boundary", boundary)
        checks.check_shape("boundary", boundary, (batch, 4), "(N, 4)")
        if boundary.device.type != "cpu":
            checks.check_same("boundary", boundary, "px", px)
        if checks.readable(validate, boundary):
            _check_boundary(boundary, rows - 1, frames)
        boundary = as_int32(boundary).to(px.device, non_blocking=True)
    px, py = (x.to(accumulator(x.dtype)).contiguous() for x in checks.in_one_precision(px, py))
    total, gx, gy = mutual_information_sums(px, py, boundary, kind)
    return MutualInformation(total, LatticeOccupancy(gx, gy))


def _check_boundary(boundary: Tensor, symbols: int, frames: int) -> None:
    u_begin, t_begin, u_end, t_end = boundary.unbind(1)
    outside = (u_begin < 0) | (u_begin > u_end) | (u_end > symbols)
    n = checks.first_bad(outside | (t_begin < 0) | (t_begin >= t_end) | (t_end > frames))
    if n is not None:
        raise ValueError(
            f"boundary[{n}] is {boundary[n].tolist()}; it must be [u_begin, t_begin, u_end, t_end] "
            f"with 0 <= u_begin <= u_end <= {symbols} and 0 <= t_begin < t_end <= {frames}"
        )
