"""Targets and lengths of a batch, and the device that they are on."""

from __future__ import annotations

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
    if all(x.device.type == "cpu" for x in lengths):
        # In one copy: a small copy to a GPU costs the host as much as a kernel.
        frames_N, symbols_N = as_int32(torch.stack(lengths)).to(device, non_blocking=True)
    else:
        frames_N, symbols_N = (as_int32(x).to(device, non_blocking=True) for x in lengths)
    return frames_N, symbols_N


class Utterances(NamedTuple):
    """Checked targets (N,U), int32 and contiguous on the losses' device, and lengths (N,).

    Lengths that came from the CPU are in host_lengths (otherwise None) as integers of either size,
    and stay on the CPU until on_device; others are int32 and contiguous on the losses' device.
    """

    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    host_lengths: tuple[Tensor, Tensor] | None

    def on_device(self) -> Utterances:
        """The same with the lengths on the losses' device."""
        if self.host_lengths is None:
            return self
        frames_N, symbols_N = lengths_on(self.targets.device, self.host_lengths)
        return self._replace(logit_lengths=frames_N, target_lengths=symbols_N)

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Of logits and of targets."""
        return self.logit_lengths, self.target_lengths

    @property
    def known_lengths(self) -> tuple[Tensor, Tensor]:
        """The same, on the CPU if they came from there."""
        return self.host_lengths or self.lengths

    @property
    def tensors(self) -> TargetsAndLengths:
        """The arguments of the ops, after on_device."""
        return TargetsAndLengths(self.targets, self.logit_lengths, self.target_lengths)

    def band_rows(self, frames: int, columns: int) -> int:
        """Rows of a band of that many columns: packed if the lengths are on the host, otherwise
        `frames` frames for each utterance."""
        if self.host_lengths is None:
            return len(self.targets) * frames * columns
        return int(self.host_lengths[0].sum()) * columns
