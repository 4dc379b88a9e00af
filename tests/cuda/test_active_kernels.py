"""The kernels over active rows against their fallbacks on the CPU."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.joiner.active_rows import ROWS_OF_BLOCK
from tests.cuda.test_kernels import check, on_cuda
from tests.ops.active_cases import (
    active_calls,
    gradient_calls,
    layer_calls,
    list_workspace,
    packed_calls,
)
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
    large = torch.full((3,), -1e9)
    inputs = (gx, gy, large, *rows, 0.3, left_out, 1000, *list_workspace(rows, count))
    chunks = -(-count // 1000)
    shapes = [(count,), (count + 1,), *[(chunks + 1,)] * 3, (chunks, 5)]
    outputs = tuple(torch.full(shape, -7, dtype=torch.int32) for shape in shapes)
    check(Call("list_active_rows", inputs, outputs), rtol=0, atol=0)


needs_grouped_products = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
    reason="torch has no grouped products for this GPU",
)


@needs_grouped_products
@pytest.mark.parametrize("width", [8, 24, 512])
@pytest.mark.parametrize("shape", [*SHAPES, LONGER, WIDE], ids=lambda shape: shape[0])
def test_packed_rows_equal_their_fallbacks(shape, width: int) -> None:
    torch.manual_seed(6)
    _, frames, symbols, vocabulary = shape
    batch = batch_of(frames, symbols, vocabulary)
    rows = int(packed_splits(batch.logit_lengths, batch.target_lengths, None)[-1])
    for call in packed_calls(batch, vocabulary, torch.bfloat16, width):
        if call.op == "fitting_splits":
            check(call, rtol=0, atol=0)
            continue
        expected = call.fresh_outputs()
        FALLBACKS[call.op](*call.inputs, *expected)
        device_call = on_cuda(call)
        torch.ops.pruned_rnnt.packed_log_probs(*device_call.inputs, *device_call.outputs)
        # Those of the logits, which are rounded to bfloat16.
        for got, want in zip(device_call.outputs[1:], expected[1:], strict=True):
            torch.testing.assert_close(got[:rows].cpu(), want[:rows], rtol=2e-2, atol=6e-2)


def in_float64(x: object) -> object:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@needs_grouped_products
@pytest.mark.parametrize("layer_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [8, 24, 512])
@pytest.mark.parametrize("shape", [*SHAPES, LONGER, WIDE], ids=lambda shape: shape[0])
def test_gradients_are_near_float64(shape, width: int, layer_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    _, frames, symbols, vocabulary = shape
    batch = batch_of(frames, symbols, vocabulary)
    for call in gradient_calls(batch, vocabulary, torch.bfloat16, width, layer_dtype):
        expected = [None if x is None else x.double() for x in call.outputs]
        FALLBACKS[call.op](*map(in_float64, call.inputs), *expected)
        device_call = on_cuda(call)
        found = []
        for _ in range(2):
            outputs = [None if x is None else x.clone() for x in device_call.outputs]
            torch.ops.pruned_rnnt.active_gradients(*device_call.inputs, *outputs)
            found.append(outputs)
        for got, again, want in zip(*found, expected, strict=True):
            if got is None or again is None or want is None:
                continue
            assert torch.equal(got, again)
            # In bfloat16, the fallback on the CPU is wrong by up to 1.1%.
            assert float((got.cpu() - want).norm()) <= 0.02 * float(want.norm())


@pytest.mark.parametrize(
    "layer_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_output_layers_equal_their_fallback(layer_dtype: torch.dtype) -> None:
    for call in layer_calls(layer_dtype, torch.bfloat16):
        check(call, rtol=0, atol=0)
