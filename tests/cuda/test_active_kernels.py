"""The kernels over active rows against their fallbacks on the CPU."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.native import has_native_kernel
from tests.cuda.test_kernels import check
from tests.ops.active_cases import active_calls
from tests.ops.native_batches import SHAPES, batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not has_native_kernel("active_joiner_rows", "cuda"), reason="the CUDA library is not built"
    ),
]
LONGER = ("longer", [45, 20, 300], [70, 3, 33], 40)


@pytest.mark.parametrize("width", [8, 24, 512])
@pytest.mark.parametrize("shape", [*SHAPES, LONGER], ids=lambda shape: shape[0])
def test_kernels_equal_their_fallbacks(shape, width: int) -> None:
    torch.manual_seed(3)
    _, frames, symbols, vocabulary = shape
    for call in active_calls(
        batch_of(frames, symbols, vocabulary), vocabulary, torch.bfloat16, width
    ):
        # Sums over many rows are rounded to bfloat16 once.
        check(call, rtol=2e-2, atol=2e-2)
