"""A group norm over time that leaves the padding of a batch out.

Axes: N batch, C channels, L frames.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MaskedGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` with one channel a group, whose means are over the valid frames.

    The first convolution of some wav2vec 2.0 models (`feat_extract_norm: group`) is normalised over
    the whole utterance. torch's norm counts padding, so that the output of an utterance depends on
    the batch that it is in. The parameters are those of the module that this one replaces.

    Attributes:
        lengths_N: valid frames of the next call; None if all are valid.
    """

    lengths_N: Tensor | None = None

    @classmethod
    def like(cls, norm: nn.GroupNorm) -> MaskedGroupNorm:
        made = cls(norm.num_groups, norm.num_channels, norm.eps, norm.affine)
        assert norm.num_groups == norm.num_channels
        made.load_state_dict(norm.state_dict())
        return made

    def forward(self, x_NCL: Tensor) -> Tensor:
        if self.lengths_N is None:
            return super().forward(x_NCL)
        lengths_N11 = self.lengths_N[:, None, None]
        valid_N1L = torch.arange(x_NCL.size(2), device=x_NCL.device) < lengths_N11
        counts_N11 = lengths_N11.clamp(min=1)
        wide_NCL = x_NCL.float()
        mean_NC1 = wide_NCL.masked_fill(~valid_N1L, 0).sum(2, keepdim=True) / counts_N11
        centred_NCL = (wide_NCL - mean_NC1).masked_fill(~valid_N1L, 0)
        variance_NC1 = centred_NCL.square().sum(2, keepdim=True) / counts_N11
        normed_NCL = centred_NCL * (variance_NC1 + self.eps).rsqrt()
        scaled_NCL = normed_NCL * self.weight[:, None] + self.bias[:, None]
        return scaled_NCL.to(x_NCL.dtype)
