"""Encoder output for searches.

Axes: N batch, T feature frames or encoder frames, F features, E encoder width.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.model.speech_model import SpeechModel

Precision = Literal["auto", "float32", "bfloat16", "float16"]


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype that a precision names; `auto`: bfloat16 on GPUs that have it, else float32."""
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    return torch.bfloat16 if _has_bfloat16(device) else torch.float32


@cache
def _has_bfloat16(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


@torch.inference_mode()
def encode_padded(
    model: SpeechModel, features_NTF: Tensor, lengths: Tensor, precision: Precision = "float32"
) -> tuple[Tensor, Tensor]:
    """Encoder output (N, T, E) float32 and its lengths (N,).

    Args:
        model: in evaluation mode.
        features_NTF: float32, on any device.
        lengths: (N,) integer feature frames, preferably on the CPU.
        precision: dtype of matrix products and convolutions; see `compute_dtype`.
    """
    device = next(model.parameters()).device
    dtype = compute_dtype(precision, device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        encoded_NTE, frames = model.encode(features_NTF.to(device), lengths)
    return encoded_NTE.float(), frames


def encode_batch(
    model: SpeechModel, batch: Batch, precision: Precision = "float32"
) -> tuple[Tensor, Tensor]:
    """`encode_padded` for the features of a batch."""
    batch = batch.to(next(model.parameters()).device)
    return encode_padded(model, batch.features_NTF, batch.feature_lengths_N, precision)
