"""rnnt_loss_fused against the losses of stored logits, over chunks, layouts and dtypes."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from pruned_rnnt.loss import fused
from pruned_rnnt.ops.common.utterances import PackedRows
from pruned_rnnt.ops.joiner import fused_joiner
from tests.loss import loss_cases as cases

WIDTH = 12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(23)


def inputs(batch, dtype=torch.float64) -> list[Tensor]:
    shapes = [
        (batch.size, batch.frames, WIDTH),
        (batch.size, batch.symbols + 1, WIDTH),
        (batch.vocabulary, WIDTH),
        (batch.vocabulary,),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def stored_loss(batch, tensors, bounds, activation, **options) -> Tensor:
    am, lm, weight, bias = tensors
    act = {"tanh": torch.tanh, "relu": torch.relu, "none": lambda x: x}[activation]
    lengths = batch.lengths("cpu")
    if bounds is None:
        logits = act(am[:, :, None] + lm[:, None]) @ weight.T + bias
        return pruned_rnnt.rnnt_loss(logits, batch.targets, *lengths, reduction="none", **options)
    am_p, lm_p = pruned_rnnt.prune(am, lm, bounds)
    logits = act(am_p + lm_p) @ weight.T + bias
    return pruned_rnnt.rnnt_loss_pruned(
        logits, batch.targets, bounds, *lengths, reduction="none", **options
    )


def band_of(batch, s_range: int = 3) -> Bounds:
    occupancy = pruned_rnnt.rnnt_loss_simple(
        torch.randn(batch.size, batch.frames, 9),
        torch.randn(batch.size, batch.symbols + 1, 9),
        batch.targets % 8 + 1,
        *batch.lengths("cpu"),
    ).occupancy
    return pruned_rnnt.prune_bounds(occupancy, *batch.lengths("cpu"), s_range)


fused_loss = partial(cases.loss_on_device, pruned_rnnt.rnnt_loss_fused)


# Lengths on the CPU give packed rows; on the losses' own device, if that is another, padded rows.
PLACES = [
    ("cpu", "cpu"),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
]
# Bytes of workspace: one chunk, several chunks, one frame per chunk.
WORKSPACES = [64 << 20, 3000, 1]


@pytest.mark.parametrize(("device", "lengths_on"), PLACES)
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("activation", ["tanh", "relu", "none"])
@pytest.mark.parametrize("banded", [True, False], ids=["band", "full"])
@pytest.mark.parametrize("vocabulary", [13, 16])
def test_equals_the_loss_of_stored_logits(
    vocabulary, banded, activation, workspace, device, lengths_on, monkeypatch
) -> None:
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", workspace)
    batch = cases.make_batch([9, 11, 4], [4, 6, 0], vocabulary, 0)
    tensors = inputs(batch)
    bounds = band_of(batch) if banded else None
    expected = stored_loss(batch, tensors, bounds, activation)
    loss = fused_loss(batch, tensors, bounds, device, lengths_on, activation=activation)
    # Twice: the second pass computes the last chunk again.
    for _ in range(2):
        cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), *tensors)


@pytest.mark.parametrize(("device", "lengths_on"), PLACES)
@pytest.mark.parametrize("rnnt_type", ["modified", "constrained", "rna"])
@pytest.mark.parametrize(
    "options",
    [
        {"delay_penalty": 0.2, "blank": 12},
        {"hat": True, "fastemit_lambda": 0.3},
        {"clamp": 0.05, "blank": 2},
    ],
    ids=lambda x: "-".join(x),
)
def test_options(options, rnnt_type, device, lengths_on) -> None:
    batch = cases.make_batch([9, 11, 4], [4, 6, 0], 13, options.get("blank", 0))
    tensors = inputs(batch)
    start = (torch.arange(11) // 2).clamp_max(torch.tensor([2, 4, 0])[:, None])
    bounds = Bounds(start.int(), 3)
    expected = stored_loss(batch, tensors, bounds, "tanh", rnnt_type=rnnt_type, **options)
    loss = fused_loss(batch, tensors, bounds, device, lengths_on, rnnt_type=rnnt_type, **options)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), *tensors)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.tolerances(float32=1e-4, float16=1e-2, bfloat16=8e-2)
def test_dtypes(dtype, tolerance, device) -> None:
    batch = cases.make_batch([19, 23, 8], [6, 9, 3], 33, 0)
    tensors = [x.detach().mul(0.3).to(dtype) for x in inputs(batch)]
    wide = [x.double().requires_grad_() for x in tensors]
    given = [x.to(device).requires_grad_() for x in tensors]
    expected = stored_loss(batch, wide, None, "tanh")
    loss = fused_loss(batch, given, None, device)
    cases.assert_near_float64(loss, expected, batch.upstream(), given, wide, tolerance)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_no_bias(device) -> None:
    batch = cases.make_batch([5, 4], [2, 1], 13, 0)
    am, lm, weight, _ = (x.to(device) for x in inputs(batch))
    arguments = (batch.targets.to(device), None, *batch.lengths("cpu"))
    without = pruned_rnnt.rnnt_loss_fused(am, lm, weight, None, *arguments)
    zeros = torch.zeros(13, dtype=torch.float64, device=device)
    assert torch.equal(without, pruned_rnnt.rnnt_loss_fused(am, lm, weight, zeros, *arguments))


@pytest.mark.parametrize("device", cases.DEVICES)
def test_autocast_runs_in_its_dtype(device) -> None:
    """The same as casting the inputs by hand; gradients come back in the inputs' dtype."""
    batch = cases.make_batch([9, 7], [4, 3], 16, 0)
    tensors = [x.detach().float().to(device).requires_grad_() for x in inputs(batch)]
    with torch.autocast(device, torch.bfloat16):
        loss = fused_loss(batch, tensors, None, device)
    by_hand = fused_loss(batch, [x.bfloat16() for x in tensors], None, device)
    assert torch.equal(loss, by_hand)
    for grad in torch.autograd.grad(loss.sum(), tensors):
        assert grad.dtype == torch.float32


@pytest.mark.parametrize("device", cases.DEVICES)
def test_padding_has_no_effect(device) -> None:
    batch = cases.make_batch([6, 4], [3, 1], 16, 0)
    clean = [x.detach() for x in inputs(batch)]
    dirty = [x.clone() for x in clean]
    dirty[0][1, 4:] = float("nan")
    dirty[1][1, 2:] = float("nan")
    grads = []
    for values in (clean, dirty):
        leaves = [x.to(device).requires_grad_() for x in values]
        loss = fused_loss(batch, leaves, None, device)
        grads.append(torch.autograd.grad(loss.sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("limit", [1, 5, 7, 16, 40, 10_000])
def test_ragged_chunks_are_whole_frames(limit) -> None:
    frames_N, widths_N = [3, 5, 1, 2], [4, 1, 9, 3]
    packed = PackedRows([0, 12, 17, 26, 32], widths_N)
    offsets = fused_joiner.ragged_chunk_offsets(packed, 1, limit)
    ends, row = {0}, 0
    for frames, width in zip(frames_N, widths_N, strict=True):
        ends |= {row + t * width for t in range(frames + 1)}
        row += frames * width
    assert offsets[0] == 0
    assert offsets[-1] == row
    assert set(offsets) <= ends
    for begin, end in pairwise(offsets):
        assert begin < end
        inner = [e for e in ends if begin < e < end]
        assert end - begin <= limit or not inner


def test_chunks_of_a_large_weight(monkeypatch) -> None:
    """As large as its gradient, though a chunk could be smaller."""
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(fused_joiner, "_LARGE_GRADIENT_BYTES", 1)
    offsets, _ = fused_joiner.row_chunks(
        600, 3, logit_bytes=80, hidden_bytes=20, gradient_bytes=5000
    )
    # Seven even chunks of at most 99 rows, the whole frames of 10,000 bytes.
    assert offsets == [*range(0, 600, 87), 600]


def test_columns_behind_the_symbols_are_not_computed(monkeypatch) -> None:
    batch = cases.make_batch([9, 11, 4], [4, 6, 0], 13, 0)
    tensors = inputs(batch)
    start = torch.zeros(batch.size, batch.frames, dtype=torch.int32)
    planned = []
    plan = fused.planned_joiner
    monkeypatch.setattr(
        fused, "planned_joiner", lambda *x, **y: planned.append(y["columns"]) or plan(*x, **y)
    )
    wide, narrow = (
        fused_loss(batch, tensors, Bounds(start, s_range), "cpu") for s_range in (400, 7)
    )
    assert planned == [7, 7]
    assert torch.equal(wide, narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("frames", [60, 1200], ids=["all rows", "active rows"])
def test_tensors_may_begin_anywhere_in_a_buffer(frames, bias_dtype) -> None:
    """As parameters and activations of modules that keep theirs in one flat buffer."""
    size = cases.make_batch([frames, frames - 9], [60, 31], 64, 0)
    shapes = [(2, frames, 16), (2, 61, 16), (64, 16), (64,)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.bfloat16, bias_dtype]

    def placed(offset: int) -> list[Tensor]:
        torch.manual_seed(3)
        made = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            values = 0.3 * torch.randn(shape)
            flat = torch.empty(values.numel() + offset, dtype=dtype, device="cuda")
            flat[offset:] = values.flatten()
            made.append(flat[offset:].view(shape).requires_grad_())
        return made

    found = []
    for offset in (0, 1):
        tensors = placed(offset)
        lengths = size.lengths("cuda")
        loss = pruned_rnnt.rnnt_loss_fused(*tensors, size.targets.cuda(), None, *lengths)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), tensors)])
    for aligned, anywhere in zip(*found, strict=True):
        torch.testing.assert_close(anywhere, aligned, rtol=0.02, atol=0.02)
