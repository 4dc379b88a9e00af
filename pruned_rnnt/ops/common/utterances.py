"""Targets and lengths of a batch, and where they are.

Axes: N batch, U symbols.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.saturated import as_int32


class Utterances(NamedTuple):
    """Checked targets (N,U), int32 and contiguous on the losses' device, and lengths (N,).

    Lengths are int32 and contiguous on that device, too, but where the check left them on the CPU,
    as integers of either size. host_lengths: the two lengths on the CPU where they came from there,
    else None.
    """

    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    host_lengths: tuple[Tensor, Tensor] | None

    def on_device(self) -> Utterances:
        """With the lengths on the losses' device."""
        if self.host_lengths is None:
            return self
        # Both at once: a small copy to a GPU costs the host as much as a kernel.
        both_2N = as_int32(torch.stack(self.host_lengths))
        frames_N, symbols_N = both_2N.to(self.targets.device, non_blocking=True).unbind()
        return self._replace(logit_lengths=frames_N, target_lengths=symbols_N)

    def band_rows(self, frames: int, columns: int) -> int:
        """Rows of a band of that many columns: packed where the host knows the lengths, else of
        `frames` frames an utterance."""
        if self.host_lengths is None:
            return len(self.targets) * frames * columns
        frames_N: list[int] = self.host_lengths[0].tolist()
        return sum(frames_N) * columns
