"""Every CUDA kernel against the plain-torch fallback of its op on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import FALLBACKS, RNNT_TYPES
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.lattice.lattice import split_workspace
from tests.ops.held_row_cases import held_row_calls
from tests.ops.native_batches import (
    SHAPES,
    TOLERANCES,
    Batch,
    Call,
    batch_of,
    log_softmax_like,
    poison,
    random_start,
    sloping_start,
)
from tests.ops.native_cases import all_calls, log_probs_calls
from tests.ops.simple_cases import split_simple_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not has_native_kernel("log_probs", "cuda"), reason="the CUDA library is not built"
    ),
]

# Wider than a warp's and a block's share of a lattice, longer than the rings in shared memory.
LARGE = [
    ("several_stripes", [150, 97], [130, 61], 7),
    ("more_stripes_than_warps", [90], [470], 5),
]


def on_cuda(call: Call) -> Call:
    def moved(values: tuple) -> tuple:
        return tuple(x.cuda() if isinstance(x, torch.Tensor) else x for x in values)

    inputs = list(moved(call.inputs))
    if call.op in ("log_probs", "log_probs_backward"):
        # The logits are a view of a wider workspace; .cuda() alone would make them contiguous.
        position = 0 if call.op == "log_probs" else 1
        logits = call.inputs[position]
        pitch = logits.stride(0)
        workspace = logits.as_strided((logits.shape[0], pitch), (pitch, 1)).cuda()
        inputs[position] = workspace[:, : logits.shape[1]]
    return replace(call, inputs=tuple(inputs), outputs=moved(call.outputs))


def check(call: Call, rtol: float, atol: float) -> None:
    expected = call.fresh_outputs()
    FALLBACKS[call.op](*call.inputs, *expected)
    device_call = on_cuda(call)
    getattr(torch.ops.pruned_rnnt, call.op)(*device_call.inputs, *device_call.outputs)
    for index, (got, want) in enumerate(zip(device_call.outputs, expected, strict=True)):
        if got is None or want is None:
            continue
        torch.testing.assert_close(
            got.cpu(),
            want,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, i=index: f"output {i} of {call.op} {call.inputs[-6:]}\n{text}",
        )


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES, ids=lambda x: str(x))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_kernel_equals_fallback(shape, dtype, rtol, atol) -> None:
    torch.manual_seed(len(shape[0]))
    for call in all_calls(shape, dtype):
        check(call, rtol, atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_exponentials_in_bfloat16_parts_equal_fallback(shape, dtype) -> None:
    torch.manual_seed(len(shape[0]))
    _, frames, symbols, vocabulary = shape
    for call in split_simple_calls(batch_of(frames, symbols, vocabulary), vocabulary, dtype):
        # Values stored in bfloat16 may differ by one rounding.
        check(call, 1e-2, 1e-2)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES[:2], ids=lambda x: str(x))
@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: shape[0])
def test_large_lattices_equal_fallback(shape, dtype, rtol, atol) -> None:
    torch.manual_seed(1)
    for call in all_calls(shape, dtype):
        if "lattice" in call.op or "bounds" in call.op:
            check(call, 10 * rtol, 10 * atol)


def band_call(
    batch: Batch, start: Tensor, columns: int, rnnt_type: int, delay: float, dtype: torch.dtype
) -> Call:
    """band_lattice on random arcs of a padded band."""
    rows = start.numel() * columns
    px, py = log_softmax_like(2, rows, dtype=dtype)
    lengths = (batch.logit_lengths, batch.target_lengths)
    work = split_workspace(px, batch.size, columns, batch.size * batch.frames)
    inputs = (px, py, *lengths, start, None, batch.frames, columns, rnnt_type, delay, work)
    outputs = tuple(poison(size, dtype=dtype) for size in (batch.size, rows, rows))
    return Call("band_lattice", inputs, outputs)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES[:2], ids=lambda x: str(x))
@pytest.mark.parametrize("columns", [1, 2, 5, 6, 8, 9, 31, 32, 33, 64, 100, 300])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
def test_bands_of_any_width(columns, rnnt_type, dtype, rtol, atol) -> None:
    torch.manual_seed(columns)
    batch = batch_of([60, 41, 90], [400, 37, 90], 4)
    start = random_start(batch, columns)
    check(band_call(batch, start, columns, rnnt_type, 0.1, dtype), 10 * rtol, 10 * atol)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES[:2], ids=lambda x: str(x))
@pytest.mark.parametrize("columns", [1, 2, 5, 8, 9, 32, 33, 64, 100])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
def test_bands_with_a_path(columns, rnnt_type, dtype, rtol, atol) -> None:
    """Bands that move by at most one column per frame, so that every topology has a path."""
    torch.manual_seed(columns)
    batch = batch_of([160, 61, 90], [100, 37, 80], 4)
    start = sloping_start(batch, columns)
    call = band_call(batch, start, columns, rnnt_type, 0.1, dtype)
    check(call, 10 * rtol, 10 * atol)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES[:2], ids=lambda x: str(x))
@pytest.mark.parametrize("columns", [5, 7])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
def test_bands_of_many_frames(columns, rnnt_type, dtype, rtol, atol) -> None:
    """Segments of one frame, of a few and of many frames; one utterance without a path."""
    torch.manual_seed(columns)
    batch = batch_of([1700, 26, 25, 3, 1, 200], [60, 20, 1, 2, 0, 190], 4)
    start = random_start(batch, columns)
    check(band_call(batch, start, columns, rnnt_type, 0.02, dtype), 20 * rtol, 20 * atol)


@pytest.mark.parametrize("columns", [4, 40])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
def test_bands_that_move_back(columns, rnnt_type) -> None:
    torch.manual_seed(columns)
    batch = batch_of([30, 20], [60, 25], 4)
    start = random_start(batch, columns)
    start[:, 5:8] -= 1
    start[:, 12] += 2
    start.clamp_(min=0)
    check(band_call(batch, start, columns, rnnt_type, 0.0, torch.float64), 1e-9, 1e-10)


@pytest.mark.parametrize("s_range", [3, 17, 40])
def test_bounds_of_long_utterances(s_range: int) -> None:
    torch.manual_seed(s_range)
    batch = batch_of([1500, 40], [300, 9], 4)
    emit, blank = torch.rand(2, 2, 1500, 301)
    lengths = (batch.logit_lengths, batch.target_lengths)
    start = torch.full((2, 1500), -7, dtype=torch.int32)
    for rnnt_type in (0, 1):
        inputs = (emit, blank, *lengths, s_range, rnnt_type, False)
        check(Call("prune_bounds", inputs, (start,)), 0, 0)
        scratch = torch.empty(emit.shape, dtype=torch.int32)
        exact = (emit.double(), blank.double(), *lengths, s_range, rnnt_type, scratch)
        check(Call("prune_bounds_exact", exact, (start,)), 0, 0)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES, ids=lambda x: str(x))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
@pytest.mark.parametrize("in_place", [False, True], ids=["new_gradient", "in_place"])
def test_dense_logits(shape, in_place, dtype, rtol, atol) -> None:
    """Contiguous rows, which kernels load through shared memory if they are short."""
    torch.manual_seed(3)
    _, frames, symbols, vocabulary = shape
    for call in log_probs_calls(batch_of(frames, symbols, vocabulary), vocabulary, dtype):
        inputs = list(call.inputs)
        if call.op == "log_probs":
            inputs[0] = inputs[0].contiguous()
            check(replace(call, inputs=tuple(inputs)), rtol, atol)
            continue
        logits = inputs[1] = inputs[1].contiguous()
        expected = poison(*logits.shape, dtype=dtype)
        FALLBACKS[call.op](*inputs, expected)
        moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
        got = moved[1] if in_place else poison(*logits.shape, dtype=dtype).cuda()
        if moved[-3] == 1:  # given log-probabilities
            got.zero_()
        torch.ops.pruned_rnnt.log_probs_backward(*moved, got)
        torch.testing.assert_close(got.cpu(), expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [8, 57, 64, 65, 300, 448, 500, 504, 511, 512, 513])
def test_rows_in_registers(vocabulary, dtype) -> None:
    """Rows of aligned vectors; up to 512 logits a group of lanes holds a row in registers."""
    torch.manual_seed(vocabulary)
    for call in held_row_calls(batch_of([23, 9, 17], [6, 4, 0], vocabulary), vocabulary, dtype):
        check(call, 2e-5, 1e-4)


@pytest.mark.parametrize("frames", [500, 800, 1600], ids=lambda x: f"T{x}")
def test_several_rows_in_registers_one_after_the_other(frames) -> None:
    """As many rows as let a group take two, four and eight of them."""
    torch.manual_seed(frames)
    lengths = ([frames, frames // 2, frames], [10, 10, 3])
    for call in held_row_calls(batch_of(*lengths, 70), 70, torch.bfloat16):
        check(call, 2e-5, 1e-4)
