"""Convolutions over a batch of any shape, at the cost of a few shapes.

Axes: N batch, T frames, F mel bins, C channels, L frames of all utterances together.

cuDNN plans a convolution anew for every shape it has not seen, which takes longer than a training
step, and two batches of speech hardly ever have the same. A convolution that pads nothing in time
may as well see the utterances one after the other as a single one, of a length that is rounded up:
what it makes of the end of one and the beginning of the next is cut out again.
"""

from __future__ import annotations

import torch
from torch import Tensor


class JoinedFrames:
    """Where each utterance's frames are among those of all.

    Args:
        batch, frames: N and T.
        rate: frames that the convolutions make one of.
        receptive_field: frames that one of theirs sees.
    """

    def __init__(self, batch: int, frames: int, rate: int, receptive_field: int) -> None:
        self.batch, self.frames, self.rate = batch, frames, rate
        # As many of theirs for each utterance: whole multiples, the last ones to be cut out.
        self.each = -(-frames // rate) * rate
        needed = batch * self.each + receptive_field
        # Eight lengths from one power of two to the next, so at most an eighth in vain.
        step = max(1 << max(needed.bit_length() - 4, 0), rate)
        self.total = -(-needed // step) * step

    def join(self, features_NTF: Tensor) -> Tensor:
        """(N, T, F) -> (1, 1, L, F)."""
        bins = features_NTF.size(2)
        joined_LF = features_NTF.new_zeros((self.total, bins))
        own_NTF = joined_LF[: self.batch * self.each].view(self.batch, self.each, bins)
        own_NTF[:, : self.frames] = features_NTF
        return joined_LF[None, None]

    def part(self, maps_1CLF: Tensor, frames: int) -> Tensor:
        """What the convolutions have made of it -> (N, C, `frames`, F), the first of each."""
        own_CTF = maps_1CLF[0, :, : self.batch * self.each // self.rate]
        parted_CNTF: Tensor = own_CTF.unflatten(1, (self.batch, -1))[:, :, :frames]
        return parted_CNTF.transpose(0, 1)

    def spread(self, values_NT: Tensor, frames: int) -> Tensor:
        """Values for the first frames of each utterance's maps -> (1, 1, `frames`, 1), all maps'.

        Zero elsewhere.
        """
        own_NT = values_NT.new_zeros((self.batch, self.each // self.rate))
        own_NT[:, : values_NT.size(1)] = values_NT
        spread = values_NT.new_zeros(frames)
        spread[: own_NT.numel()] = own_NT.flatten()
        return spread.view(1, 1, -1, 1)


def pays(x: Tensor) -> bool:
    """Whether convolutions of x are planned by shape: a compiler makes its own plans."""
    return x.is_cuda and not torch.compiler.is_compiling()
