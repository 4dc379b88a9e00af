"""Extreme sizes of lattices, bands, vocabularies and batches, and tensors with more than 2^31
elements.

Axes: N batch, T frames, U symbols, S columns of the band, D joiner width, V vocabulary.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.cuda.training_step import HAS_KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="the CUDA library is not built"),
]


@pytest.fixture(autouse=True)
def _free_device_memory() -> Iterator[None]:
    torch.manual_seed(7)
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


class Sizes(NamedTuple):
    batch: int
    frames: int
    symbols: int
    s_range: int
    vocabulary: int


SHAPES = {
    "U_4000": Sizes(1, 300, 4000, 15, 11),
    "T_30000": Sizes(1, 30_000, 40, 5, 11),
    "S_512": Sizes(2, 600, 800, 512, 11),
    "V_100000": Sizes(2, 12, 5, 4, 100_000),
    "N_2000": Sizes(2000, 15, 6, 4, 17),
}
DTYPES = [torch.float64, torch.float32]


def gradient_bound(name: str, dtype: torch.dtype) -> float:
    """Largest error of a gradient, relative to its largest element. In float32 the log-probability
    of 4000 random symbols, about -10000, has a rounding error of 0.0005, and the errors add up."""
    if dtype == torch.float64:
        return 1e-9
    return {"U_4000": 0.3, "T_30000": 0.3, "S_512": 0.05}.get(name, 1e-2)


def blank_bonus(name: str) -> float:
    """Added to the logits of the blank, so that 30,000 frames with few symbols are likely, as in
    speech."""
    return 10.0 if name == "T_30000" else 0.0


def random_batch(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Targets and lengths; utterance 0 has full lengths, the others are up to a fifth shorter."""
    targets = torch.randint(1, sizes.vocabulary, (sizes.batch, sizes.symbols), dtype=torch.int32)
    lengths = []
    for size in (sizes.frames, sizes.symbols):
        length = torch.randint(size - size // 5, size + 1, (sizes.batch,), dtype=torch.int32)
        length[0] = size
        lengths.append(length)
    return targets, lengths[0], lengths[1]


def check_cuda_against_cpu(
    losses: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype, bound: float
) -> None:
    """Compare losses(device, *inputs) (N,) and gradients: CUDA in dtype with the CPU in float64."""
    rounded = [x.to(dtype) for x in inputs]
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [x.to(device, kind).requires_grad_() for x in rounded]
        loss = losses(device, *leaves)
        upstream = torch.linspace(-1, 1.5, loss.shape[0], dtype=loss.dtype, device=device)
        results.append([loss, *torch.autograd.grad(loss, leaves, upstream)])
    (expected, *wanted), (loss, *grads) = results
    tolerance = 1e-11 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=tolerance, atol=0)
    for grad, want in zip(grads, wanted, strict=True):
        scale = want.abs().max().item()
        torch.testing.assert_close(grad.cpu().double(), want, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_full_loss(name, dtype) -> None:
    sizes, bound = SHAPES[name], gradient_bound(name, dtype)
    batch = random_batch(sizes)
    shape = (sizes.batch, sizes.frames, sizes.symbols + 1, sizes.vocabulary)

    def losses(device: str, logits: Tensor) -> Tensor:
        moved = (x.to(device) for x in batch)
        return pruned_rnnt.rnnt_loss(logits, *moved, reduction="none")

    logits = torch.randn(shape)
    logits[..., 0] += blank_bonus(name)
    check_cuda_against_cpu(losses, [logits], dtype, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_simple_bounds_and_fused(name, dtype) -> None:
    sizes, bound = SHAPES[name], gradient_bound(name, dtype)
    batch = random_batch(sizes)
    size, frames, symbols, s_range, vocabulary = sizes
    am, lm = torch.randn(size, frames, vocabulary), torch.randn(size, symbols + 1, vocabulary)
    am[..., 0] += blank_bonus(name)
    lm[..., 0] += blank_bonus(name)

    def simple(device: str, *inputs: Tensor) -> Tensor:
        moved = (x.to(device) for x in batch)
        return pruned_rnnt.rnnt_loss_simple(
            *inputs, *moved, lm_only_scale=0.25, reduction="none"
        ).loss

    check_cuda_against_cpu(simple, [am, lm], dtype, bound)

    occupancy = pruned_rnnt.rnnt_loss_simple(am.double(), lm.double(), *batch).occupancy
    bounds = pruned_rnnt.prune_bounds(occupancy, *batch[1:], s_range)
    moved = pruned_rnnt.Occupancy(*(x.cuda() for x in occupancy))
    on_gpu = pruned_rnnt.prune_bounds(moved, *(x.cuda() for x in batch[1:]), s_range)
    assert torch.equal(on_gpu.start.cpu(), bounds.start)

    def fused(device: str, *inputs: Tensor) -> Tensor:
        targets, *lengths = batch
        band = Bounds(bounds.start.to(device), s_range)
        return pruned_rnnt.rnnt_loss_fused(
            *inputs, targets.to(device), band, *lengths, reduction="none"
        )

    width = 16
    am, lm = torch.randn(size, frames, width), torch.randn(size, symbols + 1, width)
    layer = [torch.randn(vocabulary, width), torch.randn(vocabulary)]
    layer[1][0] += 2 * blank_bonus(name)
    check_cuda_against_cpu(fused, [am, lm, *layer], dtype, bound)


# --- more than 2^31 elements: some utterances are compared with a batch of one -------------------
def needs_memory(gibibytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")


def random_logits(*shape: int) -> Tensor:
    logits = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert logits.numel() > 2**31
    return logits.requires_grad_()


def random_targets(batch: int, symbols: int, vocabulary: int) -> Tensor:
    return torch.randint(1, vocabulary, (batch, symbols), dtype=torch.int32, device="cuda")


def assert_same(loss: Tensor, gradient: Tensor, alone_loss: Tensor, alone_gradient: Tensor) -> None:
    torch.testing.assert_close(loss, alone_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, alone_gradient, rtol=1e-2, atol=1e-6)


def test_padded_lattice_beyond_32_bits() -> None:
    needs_memory(40)
    size, frames, symbols, vocabulary = 128, 1500, 300, 50
    logits = random_logits(size, frames, symbols + 1, vocabulary)
    targets = random_targets(size, symbols, vocabulary)
    loss = pruned_rnnt.rnnt_loss(logits, targets, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    for n in (0, 77, 95, 127):
        alone = logits.detach()[n : n + 1].requires_grad_()
        one = pruned_rnnt.rnnt_loss(alone, targets[n : n + 1], reduction="none")
        assert_same(
            loss[n : n + 1], gradient[n : n + 1], one, torch.autograd.grad(one.sum(), alone)[0]
        )


@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
def test_packed_lattice_beyond_32_bits(lengths_on) -> None:
    needs_memory(40)
    size, symbols, vocabulary = 128, 300, 50
    frames_N = torch.arange(1500, 1500 - size, -1, dtype=torch.int32)
    symbols_N = symbols - torch.arange(size, dtype=torch.int32) % 7
    splits = pad((frames_N * (symbols_N + 1).long()).cumsum(0), (1, 0))
    logits = random_logits(int(splits[-1]), vocabulary)
    targets = random_targets(size, symbols, vocabulary)
    lengths = [x.to(lengths_on) for x in (frames_N, symbols_N)]
    loss = pruned_rnnt.rnnt_loss(logits, targets, *lengths, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    for n in (0, 90, 101, 127):
        rows = slice(int(splits[n]), int(splits[n + 1]))
        used = int(symbols_N[n])
        shape = (1, int(frames_N[n]), used + 1, vocabulary)
        alone = logits.detach()[rows].view(shape).requires_grad_()
        one = pruned_rnnt.rnnt_loss(alone, targets[n : n + 1, :used], reduction="none")
        (grad,) = torch.autograd.grad(one.sum(), alone)
        assert_same(loss[n : n + 1], gradient[rows], one, grad.view(-1, vocabulary))


def diagonal_band(batch: int, frames: int, symbols: int, s_range: int) -> Bounds:
    """A band along the straight line from the first to the last symbol."""
    start = torch.arange(frames, device="cuda") * (symbols + 1 - s_range) // (frames - 1)
    return Bounds(start.int().expand(batch, -1).contiguous(), s_range)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_band_beyond_32_bits(packed) -> None:
    needs_memory(40)
    size, frames, symbols, s_range, vocabulary = 64, 1500, 90, 5, 4800
    bounds = diagonal_band(size, frames, symbols, s_range)
    targets = random_targets(size, symbols, vocabulary)
    logits = random_logits(size, frames, s_range, vocabulary)
    lengths = torch.full((size,), frames), torch.full((size,), symbols)
    given = logits.view(-1, vocabulary) if packed else logits
    loss = pruned_rnnt.rnnt_loss_pruned(given, targets, bounds, *lengths, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    for n in (0, 40, 60, 63):
        alone = logits.detach()[n : n + 1].requires_grad_()
        band = Bounds(bounds.start[n : n + 1], s_range)
        one = pruned_rnnt.rnnt_loss_pruned(alone, targets[n : n + 1], band, reduction="none")
        assert_same(
            loss[n : n + 1], gradient[n : n + 1], one, torch.autograd.grad(one.sum(), alone)[0]
        )


def test_gather_beyond_32_bits() -> None:
    needs_memory(40)
    size, frames, symbols, s_range, width = 64, 1500, 90, 45, 512
    bounds = diagonal_band(size, frames, symbols, s_range)
    am = torch.empty(size, frames, 1, device="cuda", dtype=torch.bfloat16)
    lm = torch.randn(size, symbols + 1, width, device="cuda", dtype=torch.bfloat16)
    lm.requires_grad_()
    gathered = pruned_rnnt.prune(am, lm, bounds).lm
    assert gathered.numel() > 2**31
    upstream = torch.randn_like(gathered)
    (gradient,) = torch.autograd.grad(gathered, lm, upstream)
    columns = bounds.start[0, :, None] + torch.arange(s_range, device="cuda")
    for n in (0, 62, 63):
        assert torch.equal(gathered[n], lm[n, columns])
        expected = torch.zeros(symbols + 1, width, device="cuda")
        expected.index_add_(0, columns.flatten(), upstream[n].flatten(0, 1).float())
        torch.testing.assert_close(gradient[n].float(), expected, rtol=1e-2, atol=1e-2)


def test_simple_loss_beyond_32_bits() -> None:
    needs_memory(60)
    size, frames, symbols, vocabulary = 64, 1700, 20, 20_000
    am = random_logits(size, frames, vocabulary)
    lm = torch.randn(size, symbols + 1, vocabulary, device="cuda", dtype=torch.bfloat16)
    lm.requires_grad_()
    targets = random_targets(size, symbols, vocabulary)
    loss = pruned_rnnt.rnnt_loss_simple(am, lm, targets, lm_only_scale=0.25, reduction="none").loss
    grads = torch.autograd.grad(loss.sum(), (am, lm))
    for n in (0, 62, 63):
        own = slice(n, n + 1)
        alone = [x.detach()[own].requires_grad_() for x in (am, lm)]
        one = pruned_rnnt.rnnt_loss_simple(
            *alone, targets[own], lm_only_scale=0.25, reduction="none"
        ).loss
        torch.testing.assert_close(loss[own], one, rtol=1e-5, atol=0)
        for grad, want in zip(grads, torch.autograd.grad(one.sum(), alone), strict=True):
            bound = 1e-2 * want.abs().max().item()
            torch.testing.assert_close(grad[own], want, rtol=2e-2, atol=bound)


def test_mutual_information_beyond_32_bits() -> None:
    needs_memory(60)
    size, symbols, frames = 2000, 900, 1200
    px = torch.randn(size, symbols, frames + 1, device="cuda")
    py = torch.randn(size, symbols + 1, frames, device="cuda")
    assert px.numel() > 2**31
    total, occupancy = pruned_rnnt.mutual_information(px, py)
    for n in (0, 1987, 1999):
        one, own = pruned_rnnt.mutual_information(px[n : n + 1], py[n : n + 1])
        torch.testing.assert_close(total[n : n + 1], one, rtol=1e-6, atol=0)
        for whole, alone in zip(occupancy, own, strict=True):
            torch.testing.assert_close(whole[n : n + 1], alone, rtol=0, atol=1e-6)


def test_shared_memory_of_48_kib_beside_arrays_of_the_kernel() -> None:
    """In a process of its own, as a kernel that has had more once may have it from then on."""
    program = (
        "import torch, pruned_rnnt; n = torch.tensor;"
        "logits = [torch.randn(1, 200, 127, v, device='cuda') for v in (5, 2)];"
        "targets = torch.ones(1, 126, dtype=torch.int32, device='cuda');"
        "print(pruned_rnnt.rnnt_loss_tdt(*logits, targets, n([200]), n([126]), durations=(0, 1)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
