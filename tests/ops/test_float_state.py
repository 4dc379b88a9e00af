"""The kernels leave the processor's x87 registers usable for long doubles."""

from __future__ import annotations

import numpy as np
import torch

from tests.ops.test_opcheck import first_calls


def test_long_doubles_work_after_every_kernel() -> None:
    """Code with MMX instructions that does not clear them makes every long double NaN."""
    for op, arguments in first_calls().items():
        copies = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
        getattr(torch.ops.pruned_rnnt, op).default(*copies)
        # Its twiddle factors are long doubles.
        assert np.isfinite(np.fft.rfft(np.arange(10.0), 16000)).all(), op
