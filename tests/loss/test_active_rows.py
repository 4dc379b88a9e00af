"""The exact loss that leaves out rows without occupancy, against the loss of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.common.utterances import HostLengths, Utterances
from pruned_rnnt.ops.joiner import active_joiner, active_rows, fused_joiner
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.joiner.log_probs import HAT, LOGITS, RowStatistics
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion
from tests.loss.loss_cases import gradients, make_batch

WIDTH = 16
# Bytes of a chunk: all rows, several chunks, a frame in each chunk.
CHUNKS = [64 << 20, 9000, 1]
OPTIONS = {
    "plain": LossOptions(0, LOGITS, 0, 0.0, 0.0, 0.0),
    "FastEmit, clamp": LossOptions(0, LOGITS, 0, 0.0, 0.3, 0.05),
    "HAT": LossOptions(2, HAT, 0, 0.0, 0.0, 0.0),
    "modified": LossOptions(0, LOGITS, 1, 0.1, 0.0, 0.0),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path over active rows for every device, dtype and size."""
    monkeypatch.setattr(fused_joiner, "uses_active_rows", lambda am, rows: True)


def inputs(batch: Any, width: int = WIDTH) -> list[Tensor]:
    shapes = [
        (batch.size, batch.frames, width),
        (batch.size, batch.symbols + 1, width),
        (batch.vocabulary, width),
        (batch.vocabulary,),
    ]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def loss_of(
    tensors: list[Tensor],
    batch: Any,
    options: LossOptions,
    *,
    skips_rows: bool,
    lengths_on_host: bool,
    activation: str = "tanh",
    is_active: bool | None = None,
) -> Tensor:
    lengths = [x.int() for x in batch.lengths("cpu")]
    numbers = HostLengths(*(x.tolist() for x in lengths)) if lengths_on_host else None
    utterances = Utterances(batch.targets.int(), *lengths, numbers)
    am, lm, *layers = tensors
    with pytest.MonkeyPatch.context() as patch:
        if not skips_rows:
            patch.setattr(fused_joiner, "uses_active_rows", lambda *_: False)
            patch.setattr(fused_joiner, "counts_rows", lambda *_: False)
        planned = fused_joiner.planned_joiner(
            am,
            lm,
            fused_joiner.OutputLayers(*layers),
            utterances,
            start=None,
            columns=batch.symbols + 1,
            activation=ACTIVATIONS[activation],
            recursion=Recursion(options),
        )
    assert (planned.active is not None) == (skips_rows if is_active is None else is_active)
    return fused_joiner.joiner_loss(*planned)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("lengths_on_host", [True, False])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_pass_over_all_rows(
    options: LossOptions, chunk_bytes: int, lengths_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHUNK_BYTES", "DEVICE_CHUNK_BYTES"):
        monkeypatch.setattr(active_joiner, name, chunk_bytes)
    monkeypatch.setattr(active_rows, "DROPPED_OCCUPANCY", 0.0)
    batch = make_batch([9, 11, 4, 6], [4, 6, 0, 3], 13, options.blank)
    tensors = inputs(batch)
    activation = "relu" if options.blank else "tanh"
    found, expected = (
        loss_of(
            tensors,
            batch,
            options,
            skips_rows=skips_rows,
            lengths_on_host=lengths_on_host,
            activation=activation,
        )
        for skips_rows in (True, False)
    )
    torch.testing.assert_close(found, expected)
    weights = torch.rand(batch.size, dtype=torch.float64) + 0.5
    for got, want in zip(
        gradients(found, weights, *tensors), gradients(expected, weights, *tensors), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("active")
def test_rows_left_out_are_a_small_part_of_every_frame_and_symbol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most rows are left out, at most 2^-11 of the occupancy of each frame and position, and the
    gradients are wrong by less."""
    seen: list[tuple[RowStatistics, LatticeRows, Any]] = []
    real = active_rows.active_rows

    def remember(
        statistics: RowStatistics, total: Tensor, rows: LatticeRows, *arguments: Any
    ) -> Any:
        found = real(statistics, total, rows, *arguments)
        seen.append((statistics, rows, found))
        return found

    monkeypatch.setattr(active_rows, "active_rows", remember)
    batch = make_batch([300, 211], [60, 17], 13, 0)
    tensors = inputs(batch)
    options = OPTIONS["plain"]
    losses = [
        loss_of(tensors, batch, options, skips_rows=skips, lengths_on_host=True)
        for skips in (False, True)
    ]
    exact, found = (gradients(loss, torch.ones(2), *tensors) for loss in losses)
    ((statistics, rows, (listed, _)),) = seen
    count = int(listed.places[-1])
    assert 0 < count < 0.5 * statistics.gx.numel()
    nodes = rows.nodes(0, statistics.gx.numel())
    left_out = torch.ones_like(nodes.valid)
    left_out[listed.listed[:count].long()] = False
    for index, leaving in ((nodes.t, statistics.gy), (nodes.u, statistics.gx)):
        lost = torch.zeros(2, 301, dtype=torch.float64)
        lost.index_put_((nodes.n, index), (leaving * left_out).double(), accumulate=True)
        assert 2.0**-14 < float(lost.max()) <= 2.0**-11
    for got, want in zip(found, exact, strict=True):
        assert 0 < float((got - want).norm()) <= 2.0**-11 * float(want.norm())


def test_chunks_begin_at_frames() -> None:
    frames_N, symbols_N = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([3, 2])
    splits = packed_splits(frames_N, symbols_N, None)
    rows = LatticeRows(frames_N, symbols_N.int(), None, splits, 7, 4)
    total = int(splits[-1])
    occupancy = (torch.rand(total) > 0.4).double()
    zeros = torch.zeros(total, dtype=torch.float64)
    statistics = RowStatistics(zeros, occupancy, zeros)
    options = {"left_out": 2.0**-11, "chunk_rows": 5, "blocks": 3}
    large = torch.full((2,), -1e9)
    found, block_ends = active_rows.active_rows(statistics, large, rows, 0.0, **options)
    count = int(occupancy.sum())
    assert found.listed[:count].tolist() == occupancy.nonzero()[:, 0].tolist()
    assert found.begins[0] == 0
    assert found.begins[-1] == count
    assert len(found.begins) == -(-total // 5) + 1
    sizes = found.begins.diff().tolist()
    assert block_ends.tolist() == [[size // 3, 2 * size // 3, size] for size in sizes]
    for place, n, t in zip(*(x.tolist() for x in found[2:]), strict=True):
        if place == count:
            assert (n, t) == (2, 0)
            continue
        first = int(splits[n]) + t * (int(symbols_N[n]) + 1)
        assert int(found.places[first]) == place


def large_case(
    frames: list[int], symbols: list[int], vocabulary: int
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    targets = torch.randint(1, vocabulary, (len(frames), max(symbols)), dtype=torch.int32)
    shapes = [(len(frames), max(frames), 64), (len(frames), max(symbols) + 1, 64)]
    scales = [(shapes[0], 1.0), (shapes[1], 1.0), ((vocabulary, 64), 0.3), ((vocabulary,), 0.3)]
    # Representable in bfloat16, so that only the computation rounds.
    tensors = [(torch.randn(shape) * scale).bfloat16() for shape, scale in scales]
    return tensors, targets, torch.tensor(frames), torch.tensor(symbols)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "relu", "fastemit_lambda": 0.1}, {"hat": True}, {"clamp": 0.02}],
    ids=["plain", "relu, FastEmit", "HAT", "clamp"],
)
@pytest.mark.parametrize(
    ("frames", "symbols", "vocabulary"),
    [([700, 333, 1, 512], [60, 41, 0, 90], 61), ([5200, 3000], [40, 25], 500)],
    ids=["ragged", "long"],
)
def test_bfloat16_on_cuda_is_near_float64(
    frames: list[int],
    symbols: list[int],
    vocabulary: int,
    options: dict[str, Any],
    lengths_on: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, targets, *lengths = large_case(frames, symbols, vocabulary)
    used = []
    real = active_joiner.uses_active_rows
    monkeypatch.setattr(
        fused_joiner, "uses_active_rows", lambda am, rows: used.append(real(am, rows)) or used[-1]
    )

    def losses_and_gradients(device: str, dtype: torch.dtype, on: str) -> tuple[Tensor, Any]:
        leaves = [x.to(device, dtype).requires_grad_() for x in tensors]
        arguments = (targets.to(device), None, *(x.to(on) for x in lengths))
        loss = pruned_rnnt.rnnt_loss_fused(*leaves, *arguments, reduction="none", **options)
        return loss.double().cpu(), gradients(loss, torch.ones_like(loss), *leaves)

    loss, found = losses_and_gradients("cuda", torch.bfloat16, lengths_on)
    assert used == [True]
    exact_loss, exact = losses_and_gradients("cuda", torch.float64, lengths_on)
    torch.testing.assert_close(loss, exact_loss, rtol=2e-3, atol=1e-2)
    for name, got, want in zip(("am", "lm", "weight", "bias"), found, exact, strict=True):
        assert float((got - want).norm()) <= 0.012 * float(want.norm()), name
    again_loss, again = losses_and_gradients("cuda", torch.bfloat16, lengths_on)
    assert torch.equal(again_loss, loss)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.gpu
def test_an_utterance_that_exceeds_the_padding_has_infinite_loss() -> None:
    tensors, targets, frames, symbols = large_case([700, 512, 333], [70, 80, 90], 100)
    leaves = [x.cuda().requires_grad_() for x in tensors]
    frames[1] = 701
    loss = pruned_rnnt.rnnt_loss_fused(
        *leaves, targets.cuda(), None, frames.cuda(), symbols.cuda(), reduction="none"
    )
    assert loss.isinf().tolist() == [False, True, False]
    am_gradient, *_ = torch.autograd.grad(loss[[0, 2]].sum(), leaves)
    assert not am_gradient[1].any()
    assert am_gradient[0].any()
