"""The kernels over active rows against their fallbacks on the CPU."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.joiner.active_rows import ROWS_OF_BLOCK
from tests.cuda.test_kernels import check
from tests.ops.active_cases import active_calls, list_workspace
from tests.ops.native_batches import SHAPES, Call, batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not has_native_kernel("active_joiner_rows", "cuda"), reason="the CUDA library is not built"
    ),
]
LONGER = ("longer", [45, 20, 300], [70, 3, 33], 40)
# Several segments of columns.
WIDE = ("wide", [6, 3], [5, 2], 1200)


@pytest.mark.parametrize("width", [8, 24, 512])
@pytest.mark.parametrize("shape", [*SHAPES, LONGER, WIDE], ids=lambda shape: shape[0])
def test_kernels_equal_their_fallbacks(shape, width: int) -> None:
    torch.manual_seed(3)
    _, frames, symbols, vocabulary = shape
    for call in active_calls(
        batch_of(frames, symbols, vocabulary), vocabulary, torch.bfloat16, width
    ):
        # Sums over many rows are rounded to bfloat16 once.
        check(call, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("left_out", [0.0, 0.5, 20.0, 1000.0])
@pytest.mark.parametrize("extra", [0, 7, 3181])
def test_lists_of_several_blocks(extra: int, left_out: float) -> None:
    """All, most, few and no rows; room for more; a number of rows that fills the blocks."""
    torch.manual_seed(4)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([90, 150, 17], [40, 35, 0])]
    splits = packed_splits(*lengths, None)
    count = int(splits[-1]) + extra
    assert (count % ROWS_OF_BLOCK == 0) == (extra == 3181)
    gx, gy = torch.rand(2, count)
    rows = LatticeRows(*lengths, None, splits, 150, 41)
    inputs = (gx, gy, *rows, 0.3, left_out, 1000, *list_workspace(rows, count))
    chunks = -(-count // 1000)
    shapes = [(count,), (count + 1,), *[(chunks + 1,)] * 3, (chunks, 5)]
    outputs = tuple(torch.full(shape, -7, dtype=torch.int32) for shape in shapes)
    check(Call("list_active_rows", inputs, outputs), rtol=0, atol=0)
