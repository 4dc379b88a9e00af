"""Tests that run torch's LSTM in bfloat16: on CPUs without AVX-512 oneDNN refuses it."""

from __future__ import annotations

import pytest
import torch


def _runs() -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.zeros(1, 1, 4))
    except RuntimeError:
        return False
    return True


needs_bfloat16_lstm = pytest.mark.skipif(
    not _runs(), reason="torch's LSTM refuses bfloat16 on this CPU"
)
