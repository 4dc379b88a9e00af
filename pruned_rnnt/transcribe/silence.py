"""Digital silence: frames whose samples are all zero.

Training data always has some noise, and some models emit words for silence without any.
"""

from __future__ import annotations

from torch import Tensor

# Log-energies of such frames are -15.94; noise of one step of 16 bits has -15.1.
_DIGITAL_SILENCE = -15.5


def is_digital_silence(features_XF: Tensor) -> Tensor:
    """(..., F) log-mel features -> (...) bool, True for frames whose samples are all zero."""
    return features_XF.mean(dim=-1) < _DIGITAL_SILENCE
