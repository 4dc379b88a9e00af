"""The residual stream of a layer: sums and bypasses, each in one pass over memory.

Axes: N sequences, T frames, E channels; a row is one frame of one sequence.

    begin    grad = sum of the gradients of all uses of x and of its copies, backward only
    add      total = x + branch * keep,  read = total in the dtype of the next module
    bypass   out = (before + (after * factor - before) * scale * keep) * mask

    before, out   | 0 1 | 2 3 | 4 5 |    T frames
    after         |  0  |  1  |  2  |    T / rate frames, each used `rate` times (here 2)

The stream x has the dtype of the parameters (float32); branches and the copies that modules read
have the dtype of autocast. Gradients of parameters are sums over rows in two steps in a fixed
order, so that results are reproducible: each program writes the sum of its rows, and torch adds
these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel
from pruned_rnnt.model.kernels.rows import load_channels, own_tile, row_tiles, rows_of_turn

# Elements of a program; sums of more take the compiler long, and registers run out.
_SUM_TILE, _TILE = 2048, 4096


@kernel()
def _begin_backward_kernel(
    grad_ptr,
    other_0_ptr,
    other_1_ptr,
    other_2_ptr,
    other_3_ptr,
    total_ptr,
    count,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(other_0_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if OTHERS > 1:
        total += tl.load(other_1_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if OTHERS > 2:
        total += tl.load(other_2_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if OTHERS > 3:
        total += tl.load(other_3_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + place, total.to(total_ptr.dtype.element_ty), mask=inside)


@kernel("keep_ptr")
def _add_kernel(
    x_ptr,
    branch_ptr,
    keep_ptr,
    total_ptr,
    read_ptr,
    count,
    per_sequence,
    HAS_KEEP: tl.constexpr,
    HAS_READ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_KEEP:
        branch *= tl.load(keep_ptr + place // per_sequence, mask=inside, other=0.0).to(tl.float32)
    total = x + branch
    tl.store(total_ptr + place, total.to(total_ptr.dtype.element_ty), mask=inside)
    if HAS_READ:
        tl.store(read_ptr + place, total.to(read_ptr.dtype.element_ty), mask=inside)


@kernel("keep_ptr")
def _add_backward_kernel(
    grad_ptr,
    of_read_ptr,
    keep_ptr,
    grad_x_ptr,
    grad_branch_ptr,
    count,
    per_sequence,
    HAS_READ: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_READ:
        grad += tl.load(of_read_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + place, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
    if HAS_KEEP:
        grad *= tl.load(keep_ptr + place // per_sequence, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_branch_ptr + place, grad.to(grad_branch_ptr.dtype.element_ty), mask=inside)


def begin_backward(grad: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The sum of grad and one to four others in the dtype of grad; all contiguous, of one shape."""
    total = torch.empty_like(grad)
    count = grad.numel()
    _begin_backward_kernel(
        (divide_up(count, _SUM_TILE),),
        grad,
        *others,
        *[None] * (4 - len(others)),
        total,
        count,
        len(others),
        _SUM_TILE,
    )
    return total


def add(
    x_NTE: Tensor, branch_NTE: Tensor, keep_N11: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """x + branch * keep in the dtype of x, and the same in `dtype` unless that is None.

    All tensors are contiguous; `keep_N11` has one number for each sequence.
    """
    total = torch.empty_like(x_NTE)
    read = None if dtype is None else torch.empty_like(x_NTE, dtype=dtype)
    count = x_NTE.numel()
    _add_kernel(
        (divide_up(count, _SUM_TILE),),
        x_NTE,
        branch_NTE,
        keep_N11,
        total,
        read,
        count,
        count // x_NTE.size(0),
        keep_N11 is not None,
        read is not None,
        _SUM_TILE,
    )
    return total, read


def add_backward(
    grad_NTE: Tensor, of_read_NTE: Tensor | None, keep_N11: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, in `dtype`, of the branch.

    Args:
        grad_NTE: gradient of the total.
        of_read_NTE: gradient of the copy for the next module, if there is one.
    """
    grad_x = grad_NTE if of_read_NTE is None else torch.empty_like(grad_NTE)
    grad_branch = torch.empty_like(grad_NTE, dtype=dtype)
    count = grad_NTE.numel()
    _add_backward_kernel(
        (divide_up(count, _SUM_TILE),),
        grad_NTE,
        of_read_NTE,
        keep_N11,
        grad_x,
        grad_branch,
        count,
        count // grad_NTE.size(0),
        of_read_NTE is not None,
        keep_N11 is not None,
        _SUM_TILE,
    )
    return grad_x, grad_branch


@kernel("rows", "frames", "slow_frames", "rate", "keep_ptr", "second_switch_ptr")
def _bypass_kernel(
    before_ptr,
    after_ptr,
    factor_ptr,
    scale_ptr,
    keep_ptr,
    mask_ptr,
    first_switch_ptr,
    second_switch_ptr,
    out_ptr,
    rows,
    frames,
    slow_frames,
    rate,
    E,
    HAS_FACTOR: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SWITCHES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    if HAS_SWITCHES:
        switch = tl.load(first_switch_ptr) + tl.load(second_switch_ptr)
        rows = tl.where(switch > 0.0, rows, 0)
    row, channel, inside = own_tile(rows, E, BLOCK_R, BLOCK_E)
    place = row[:, None] * E + channel[None, :]
    sequence = row // frames
    slow = sequence * slow_frames + (row - sequence * frames) // rate
    before = tl.load(before_ptr + place, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(after_ptr + slow[:, None] * E + channel[None, :], mask=inside, other=0.0)
    after = after.to(tl.float32)
    if HAS_FACTOR:
        after *= tl.load(factor_ptr + slow, mask=row < rows, other=0.0)[:, None]
    scale = load_channels(scale_ptr, channel, E)
    if HAS_KEEP:
        keep = tl.load(keep_ptr + sequence, mask=row < rows, other=0.0).to(tl.float32)
        scale = scale * keep[:, None]
    out = before + (after - before) * scale
    if HAS_MASK:
        of_mask = sequence[:, None] * E + channel[None, :]
        out *= tl.load(mask_ptr + of_mask, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("slow_rows", "frames", "slow_frames", "turns", "rate", "keep_ptr")
def _bypass_backward_kernel(
    before_ptr,
    after_ptr,
    factor_ptr,
    scale_ptr,
    keep_ptr,
    grad_ptr,
    grad_before_ptr,
    grad_after_ptr,
    parts_ptr,
    slow_rows,
    frames,
    slow_frames,
    turns,
    rate,
    E,
    HAS_FACTOR: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A program takes every num_programs-th tile of slow rows, with the `rate` frames of each."""
    channel = tl.arange(0, BLOCK_E)
    scale = load_channels(scale_ptr, channel, E)
    # A tile, because a sum over the rows in each turn would wait for all warps.
    of_scale = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for turn in range(turns):
        slow, inside = rows_of_turn(turn, slow_rows, channel, E, BLOCK_R)
        sequence = slow // slow_frames
        first = sequence * frames + (slow - sequence * slow_frames) * rate
        slow_place = slow[:, None] * E + channel[None, :]
        after = tl.load(after_ptr + slow_place, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            after *= tl.load(factor_ptr + slow, mask=slow < slow_rows, other=0.0)[:, None]
        if HAS_KEEP:
            keep = tl.load(keep_ptr + sequence, mask=slow < slow_rows, other=0.0).to(tl.float32)
            kept = scale * keep[:, None]
        else:
            kept = scale
        total = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
        product = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
        for frame in range(rate):
            place = (first + frame)[:, None] * E + channel[None, :]
            grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
            before = tl.load(before_ptr + place, mask=inside, other=0.0).to(tl.float32)
            through = grad * kept
            rest = (grad - through).to(grad_before_ptr.dtype.element_ty)
            tl.store(grad_before_ptr + place, rest, mask=inside)
            total += through
            product += grad * (after - before)
        tl.store(
            grad_after_ptr + slow_place, total.to(grad_after_ptr.dtype.element_ty), mask=inside
        )
        if HAS_KEEP:
            product *= keep[:, None]
        of_scale += product
    part = parts_ptr + tl.program_id(0) * E + channel
    tl.store(part, tl.sum(of_scale, axis=0), mask=channel < E)


def bypass(
    before_NTE: Tensor,
    after_NTE: Tensor,
    scale_E: Tensor,
    keep_N11: Tensor | None,
    *,
    rate: int = 1,
    factor: Tensor | None = None,
    mask_N1E: Tensor | None = None,
    switches: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """(before + (after * factor - before) * scale * keep) * mask; all contiguous.

    Args:
        after_NTE: (N, T / rate, E); each of its frames is repeated `rate` times.
        factor: float32, one number for each frame of `after_NTE`.
        switches: (1,) float32 each, 0 or 1; if both are 0, the result is left undefined.
    """
    first_switch, second_switch = switches or (None, None)
    batch, frames, width = before_NTE.shape
    out = torch.empty_like(before_NTE)
    rows = batch * frames
    tiles = row_tiles(rows, width, _TILE)
    _bypass_kernel(
        (tiles.number,),
        before_NTE,
        after_NTE,
        factor,
        scale_E,
        keep_N11,
        mask_N1E,
        first_switch,
        second_switch,
        out,
        rows,
        frames,
        after_NTE.size(1),
        rate,
        width,
        factor is not None,
        keep_N11 is not None,
        mask_N1E is not None,
        switches is not None,
        tiles.rows,
        tiles.channels,
    )
    return out


def bypass_backward(
    before_NTE: Tensor,
    after_NTE: Tensor,
    scale_E: Tensor,
    keep_N11: Tensor | None,
    grad_NTE: Tensor,
    *,
    rate: int = 1,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of before, after * factor and, as parts (P, E) in float32, scale.

    Args:
        grad_NTE: of the result before the mask.
        factor: as for `bypass`.
    """
    batch, frames, width = before_NTE.shape
    grad_before, grad_after = torch.empty_like(before_NTE), torch.empty_like(after_NTE)
    slow_rows = batch * after_NTE.size(1)
    tiles = row_tiles(slow_rows, width, _TILE // 2)
    of_scale = before_NTE.new_empty((tiles.parts, width), dtype=torch.float32)
    _bypass_backward_kernel(
        (tiles.parts,),
        before_NTE,
        after_NTE,
        factor,
        scale_E,
        keep_N11,
        grad_NTE,
        grad_before,
        grad_after,
        of_scale,
        slow_rows,
        frames,
        after_NTE.size(1),
        tiles.turns,
        rate,
        width,
        factor is not None,
        keep_N11 is not None,
        tiles.rows,
        tiles.channels,
    )
    return grad_before, grad_after, of_scale
