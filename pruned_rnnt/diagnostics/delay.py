"""Emission times of symbols, and their delay relative to a reference.

Axes: N batch, T frames, U symbols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.diagnostics.arguments import checked_lengths, checked_occupancy
from pruned_rnnt.loss.checks import check_floating, check_same, check_shape

if TYPE_CHECKING:
    from pruned_rnnt.loss.results import Occupancy, TdtOccupancy


class SymbolDelay(NamedTuple):
    """Times in frames; NaN for u >= U_n, and if there is no path.

    frames: (N, U), the expected emission frame of each symbol.
    delay: (N, U), frames minus the reference.
    mean: scalar, the mean delay over all symbols of the batch; NaN if there are none.
    """

    frames: Tensor
    delay: Tensor
    mean: Tensor


def mean_symbol_delay(
    occupancy: Occupancy | TdtOccupancy,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    reference_frames: Tensor | None = None,
) -> SymbolDelay:
    """Expected emission frame of each symbol, sum_t t emit(t, u) / sum_t emit(t, u), and its delay.

    Args:
        occupancy: emit (N, T, U + 1), the posterior of emitting symbol u + 1 in frame t.
        logit_lengths, target_lengths: (N,).
        reference_frames: (N, U), the true end of each symbol in (fractional) encoder frames; NaN if
            unknown. Default: frame 0 for all symbols.

    Returns:
        SymbolDelay. Multiply by the duration of an encoder frame for seconds.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    occupancy = checked_occupancy(occupancy)
    logit_lengths, target_lengths = checked_lengths(
        occupancy.emit, logit_lengths, target_lengths, symbols=occupancy.emit.shape[2] - 1
    )
    emit_NTU = occupancy.emit[:, :, :-1]
    batch, frame_count, symbol_count = emit_NTU.shape
    if reference_frames is None:
        reference_frames = emit_NTU.new_zeros(batch, symbol_count)
    else:
        check_floating("reference_frames", reference_frames, "(N, U)", 2)
        check_shape("reference_frames", reference_frames, (batch, symbol_count), "(N, U)")
        if not reference_frames.is_cpu:
            check_same("reference_frames", reference_frames, "occupancy.emit", emit_NTU)
    device = emit_NTU.device
    time = torch.arange(frame_count, device=device)
    in_time = time[None, :] < logit_lengths[:, None]
    emit_NTU = torch.where(in_time[:, :, None], emit_NTU, 0.0)
    mass = emit_NTU.sum(dim=1)
    symbols = torch.arange(symbol_count, device=device)
    known = (symbols[None, :] < target_lengths[:, None]) & (mass > 0)
    expected = (emit_NTU * time[None, :, None]).sum(dim=1) / torch.where(known, mass, 1.0)
    frames = torch.where(known, expected, torch.nan)
    delay = frames - reference_frames.to(frames)
    return SymbolDelay(frames, delay, delay.nanmean())
