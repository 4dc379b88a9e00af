"""Checks and conversions of the arguments that several searches have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pruned_rnnt.model.speech_model import SpeechModel


def check_beam(beam_size: int, num_best: int) -> None:
    """Raise ValueError unless 1 <= num_best <= beam_size."""
    if beam_size < 1 or not 1 <= num_best <= beam_size:
        raise ValueError(
            f"beam_size is {beam_size} and num_best is {num_best}, need 1 <= num_best <= beam_size"
        )


def check_max_symbols(max_symbols_per_frame: int) -> None:
    """Raise ValueError for a maximum below 1."""
    if max_symbols_per_frame < 1:
        raise ValueError(f"max_symbols_per_frame is {max_symbols_per_frame}, needs at least 1")


def check_ctc_head(model: SpeechModel) -> None:
    """Raise ValueError for a model without a CTC head."""
    if model.ctc_head is None:
        raise ValueError(
            "this search needs a CTC head, and the model was trained with loss.ctc_scale=0: use "
            "decode.method=greedy or modified_beam"
        )


def silent_mask(vocab_size: int, silent_symbols: Iterable[int]) -> Tensor:
    """(vocab_size,) bool on the CPU: True for symbols that a search does not emit."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool)
    mask_V[list(silent_symbols)] = True
    return mask_V
