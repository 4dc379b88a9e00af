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
        assert np.isfinite(np.ldexp(np.longdouble(1), 3)), op
