"""Run convolutions on batches of many shapes with few different input shapes.

Axes: N batch, T frames, F mel bins, C channels, L frames of all utterances, concatenated.

cuDNN plans a convolution again for every new shape, which takes longer than a training step, and
two batches of speech rarely have the same shape. For a convolution without padding in time,
utterances can be concatenated to one whose length is rounded up; output frames that depend on two
utterances are cut out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.target import on_gpu
from pruned_rnnt.model.shape_steps import round_up


class JoinedFrames:
    """The layout of concatenated utterances.

    Args:
        batch, frames: N and T.
        rate: input frames per output frame of the convolutions.
        receptive_field: input frames that one output frame depends on.
    """

    def __init__(self, batch: int, frames: int, rate: int, receptive_field: int) -> None:
        self.batch, self.frames, self.rate = batch, frames, rate
        # Input frames per utterance: a multiple of the rate, for equally many output frames.
        self.each = -(-frames // rate) * rate
        needed = batch * self.each + receptive_field
        # Eight lengths between powers of two, so that at most an eighth is padding.
        self.total = round_up(needed, rate, steps=8)

    def join(self, features_NTF: Tensor) -> Tensor:
        """(N, T, F) -> (1, 1, L, F)."""
        bins = features_NTF.size(2)
        joined_LF = features_NTF.new_zeros((self.total, bins))
        own_NTF = joined_LF[: self.batch * self.each].view(self.batch, self.each, bins)
        own_NTF[:, : self.frames] = features_NTF
        return joined_LF[None, None]

    def part(self, maps_1CLF: Tensor, frames: int) -> Tensor:
        """Split the output of the convolutions: (N, C, `frames`, F), the first frames of each."""
        own_CTF = maps_1CLF[0, :, : self.batch * self.each // self.rate]
        split_CNTF: Tensor = own_CTF.unflatten(1, (self.batch, self.each // self.rate))
        return split_CNTF[:, :, :frames].transpose(0, 1)

    def rows(self, maps_1CLF: Tensor) -> Tensor:
        """The output of the convolutions as rows (N * each / rate, F * C), without padding.

        The last frames of an utterance may also depend on the next one. A view of maps with
        channels last.
        """
        # In this order, the gradient also has channels last.
        own_RFC = maps_1CLF.movedim(1, -1).flatten(0, 1)[: self.batch * self.each // self.rate]
        return own_RFC.flatten(1)

    def spread(self, values_NT: Tensor, frames: int) -> Tensor:
        """Place values of each utterance's first output frames in (1, 1, `frames`, 1) of zeros."""
        own_NT = values_NT.new_zeros((self.batch, self.each // self.rate))
        own_NT[:, : values_NT.size(1)] = values_NT
        spread = values_NT.new_zeros(frames)
        spread[: own_NT.numel()] = own_NT.flatten()
        return spread.view(1, 1, -1, 1)


def channels_last(x_NCTF: Tensor) -> Tensor:
    """x in the memory order (N, T, F, C), with the strides by which cuDNN recognises it.

    A dimension of one element may have any stride, but cuDNN's check then fails and it copies.
    """
    x_NCTF = x_NCTF.contiguous(memory_format=torch.channels_last)
    _, channels, frames, bins = x_NCTF.shape
    strides = (channels * frames * bins, 1, channels * bins, channels)
    return x_NCTF if x_NCTF.stride() == strides else x_NCTF.as_strided(x_NCTF.shape, strides)


def should_avoid_cudnn_replanning(x: Tensor) -> bool:
    """True if cuDNN would re-plan convolutions for x's shape (CUDA, not under torch.compile)."""
    return on_gpu(x) and not torch.compiler.is_compiling()
