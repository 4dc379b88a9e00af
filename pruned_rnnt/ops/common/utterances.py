"""Targets and lengths of a batch, and the device that they are on."""

from __future__ import annotations

from array import array
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

_LIMITS = torch.iinfo(torch.int32)


class TargetsAndLengths(NamedTuple):
    """targets (N,U) and lengths (N,), all int32 and on one device."""

    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


def as_int32(x: Tensor) -> Tensor:
    """x as contiguous int32 on its device. Values outside its range become the largest or
    smallest int32: cut to their low bits they could be valid lengths or symbols."""
    if x.dtype != torch.int32:
        x = x.clamp(_LIMITS.min, _LIMITS.max).to(torch.int32)
    return x.contiguous()


def lengths_on(device: torch.device, lengths: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Lengths, int32 and contiguous, on that device."""
    if all(x.is_cpu for x in lengths) and device.type != "cpu":
        # In one copy: a small copy to a GPU costs the host as much as a kernel.
        frames_N, symbols_N = as_int32(torch.stack(lengths)).to(device, non_blocking=True)
    else:
        frames_N, symbols_N = (as_int32(x).to(device, non_blocking=True) for x in lengths)
    return frames_N, symbols_N


class PackedRows(NamedTuple):
    """Of packed rows: row_splits (N+1), and for each utterance the rows of one frame (N)."""

    row_splits: list[int]
    widths: list[int]


class HostLengths(NamedTuple):
    """Lengths (N) as numbers, because tensor operations on so few take the host longer."""

    logit_lengths: list[int]
    target_lengths: list[int]

    def packed_rows(self, columns: int | None) -> PackedRows:
        """Of a band of that many columns or the full lattice."""
        frames_N, symbols_N = self
        widths = [u + 1 for u in symbols_N] if columns is None else [columns] * len(symbols_N)
        return PackedRows([0, *accumulate(map(mul, frames_N, widths))], widths)


class Utterances(NamedTuple):
    """Checked targets (N,U), int32 and contiguous on the losses' device, and lengths (N,).

    Lengths that came from the CPU are also in host_lengths (otherwise None; always None in
    torch.compile). They stay on the CPU until on_device, as integers of either size; others are
    int32 and contiguous on the losses' device.
    """

    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    host_lengths: HostLengths | None

    def on_device(self) -> Utterances:
        """These utterances with the lengths on the losses' device."""
        return self if self.host_lengths is None else self.on_device_with([])[0]

    def on_device_with(self, row_splits: list[int]) -> tuple[Utterances, Tensor]:
        """on_device and row_splits, int64 on the losses' device; only with host_lengths."""
        assert self.host_lengths is not None
        # In one copy: a small copy to a GPU costs the host as much as a kernel. From a buffer:
        # torch.tensor takes several times as long.
        frames, symbols = self.host_lengths
        numbers = array("q", row_splits)
        numbers.frombytes(array("i", frames + symbols).tobytes())
        buffer = torch.frombuffer(numbers, dtype=torch.int32)
        copied = buffer.to(self.targets.device, non_blocking=True)
        sizes = (2 * len(row_splits), len(frames), len(symbols))
        splits, frames_N, symbols_N = copied.split_with_sizes(sizes)
        there = Utterances(self.targets, frames_N, symbols_N, self.host_lengths)
        return there, splits.view(torch.int64)

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Of logits and of targets."""
        return self.logit_lengths, self.target_lengths

    @property
    def tensors(self) -> TargetsAndLengths:
        """The arguments of the ops, after on_device."""
        return TargetsAndLengths(self.targets, self.logit_lengths, self.target_lengths)

    def band_rows(self, frames: int, columns: int) -> int:
        """Rows of a band of that many columns: packed if the lengths are on the host, otherwise
        `frames` frames for each utterance."""
        if self.host_lengths is None:
            return len(self.targets) * frames * columns
        return sum(self.host_lengths.logit_lengths) * columns
