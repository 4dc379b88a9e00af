"""The gradient of a whitener that the device switches on and off.

For rows x_r of C channels of a group g, with mean m_g,

    S_g   = sum_r (x_r - m_g)^T (x_r - m_g)                       (C, C)
          = sum_r y_r^T y_r - (sum_r y_r)^T (sum_r y_r) / R,  y_r = x_r - x_0
    trace = sum_g tr S_g,  centre = sum_g |S_g|^2 / trace
    over  = centre >= trace * limit / (G C)
    push  = (x - m_g) (S_g - centre I) / trace
    grad += strength * |grad| / |push| * push                     if over

Axes: R rows (all frames of a batch), G groups, C channels of a group, P parts of the rows. The
four kernels, with what each reads and writes:

    scatter  x (R, G, C) -> y^T y and sums of y over each part, (P, G, C, C) and (P, G, C)
    reduce   these -> S (G, C, C), means (G, C), and per program the sums of S^2 and of diagonals
    push     x, S -> over, push (R, G, C), and per program the sums of push^2 and of grad^2
    apply    grad (R, G, C) in place

    part 0   [ g = 0 ]  [ g = 1 ] ...    part_rows rows of C channels; a program of `scatter`
    part 1   [ g = 0 ]  [ g = 1 ] ...    makes one tile of the C x C sums of a part and group

Row 0 is subtracted because activations often vary little around a large mean: in float32, the
difference of the sums of x itself would then be mostly rounding errors.

A CUDA graph always launches all four. `settings` on the device holds the switch for a whitener that
was within its limit at its last check, the switch for one that was over, and the limit. If the
switch is 0, each kernel returns after reading it; if the metric is within the limit, so do the last
two. The last two read the switch from `active`, a copy, because the third changes `over`. In most
launches the switch is 0, so few programs share all rows: thousands take microseconds to return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up
from pruned_rnnt.model.kernels.rows import as_rows
from pruned_rnnt.model.kernels.whiten_kernels import (
    apply_kernel,
    push_kernel,
    reduce_kernel,
    scatter_kernel,
)

_BLOCK = 64
_REDUCED = 1024
_APPLIED = 4096
_PROGRAMS = 528
_TINY = 1e-20


def whiten_gradient(
    x: Tensor, grad: Tensor, settings: Tensor, over_limit: Tensor, *, groups: int, strength: float
) -> None:
    """Change `grad` and `over_limit` in place if the switch is on.

    Args:
        x, grad: (..., G * C); `grad` is contiguous.
        settings: (3,) float32: the switch after a check within the limit, the switch after one
            over the limit, and the limit.
        over_limit: () bool, the result of the last check.
        groups: G.
    """
    rows = as_rows(x)
    width = x.size(-1)
    channels = width // groups
    precision = "tf32x3" if x.dtype == torch.float32 else "ieee"
    blocks = divide_up(channels, _BLOCK)
    row_blocks = divide_up(rows.number, _BLOCK)
    parts = max(min(_PROGRAMS // (blocks * blocks * groups), row_blocks), 1)
    part_rows = divide_up(row_blocks, parts) * _BLOCK
    over = over_limit.view(torch.uint8)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    scatter, sums = floats(parts, groups, channels, channels), floats(parts, groups, channels)
    scatter_kernel(
        (blocks * blocks, parts, groups),
        rows.tensor,
        settings,
        over,
        scatter,
        sums,
        rows.number,
        rows.stride,
        part_rows,
        groups,
        channels,
        blocks,
        _BLOCK,
        precision,
    )
    total, means = floats(groups, channels, channels), floats(groups, channels)
    pieces = divide_up(channels * channels, _REDUCED)
    squares, diagonals = floats(groups * pieces), floats(groups * pieces)
    active = floats(1)
    reduce_kernel(
        (pieces, groups),
        rows.tensor,
        scatter,
        sums,
        settings,
        over,
        total,
        means,
        squares,
        diagonals,
        active,
        rows.number,
        parts,
        groups,
        channels,
        _REDUCED,
    )
    push = torch.empty(grad.shape, dtype=x.dtype, device=x.device)
    sharing = min(row_blocks, max(_PROGRAMS // (blocks * groups), 1))
    programs = sharing * blocks * groups
    push_squares, grad_squares = floats(programs), floats(programs)
    push_kernel(
        (sharing, blocks, groups),
        rows.tensor,
        grad,
        total,
        means,
        squares,
        diagonals,
        settings,
        over,
        active,
        push,
        push_squares,
        grad_squares,
        rows.number,
        rows.stride,
        divide_up(row_blocks, sharing),
        groups * pieces,
        groups,
        channels,
        _TINY,
        _REDUCED,
        _BLOCK,
        precision,
    )
    tiles = divide_up(grad.numel(), _APPLIED)
    shared = min(tiles, _PROGRAMS)
    apply_kernel(
        (shared,),
        grad,
        push,
        push_squares,
        grad_squares,
        over,
        active,
        grad.numel(),
        programs,
        divide_up(tiles, shared),
        strength,
        _TINY,
        _APPLIED,
    )
