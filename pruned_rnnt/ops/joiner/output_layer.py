"""The output layer of the joiner as its matrix products take it.

V' is V rounded up to a multiple of 8: 16-bit matrix products of other widths take more than twice
the time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_WIDTH_MULTIPLE = 8


def padded_width(vocabulary: int) -> int:
    """V' of V."""
    return vocabulary + -vocabulary % _WIDTH_MULTIPLE


def padded_output(
    weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """weight and bias (None: zeros) in that dtype with rows of zeros up to V' (differentiable)."""
    vocabulary = weight_VD.shape[0]
    missing = padded_width(vocabulary) - vocabulary
    weight_VD = weight_VD.to(dtype)
    bias_V = weight_VD.new_zeros(vocabulary) if bias_V is None else bias_V.to(dtype)
    if missing:
        weight_VD, bias_V = pad(weight_VD, (0, 0, 0, missing)), pad(bias_V, (0, missing))
    return weight_VD.contiguous(), bias_V.contiguous()
