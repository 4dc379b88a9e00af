"""Products of matrices whose number of rows is on the device, against products in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pruned_rnnt.ops.common.matrix_products import (
    can_count_rows,
    counted_rows_product,
    counted_rows_sums,
    counted_rows_weight_sums,
    row_blocks,
)
from tests.ops.tensor_core_products import product, split

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNTOUCHED = 7.0


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def assert_near(found: Tensor, a: Tensor, b: Tensor, extra: Tensor | float = 0.0) -> None:
    """found is a b + extra with the rounding errors of a float32 product."""
    size = a.double().abs() @ b.double().abs() + 1
    error = (found.double() - a.double() @ b.double() - extra).abs()
    assert float((error / size).max() if error.numel() else 0.0) <= 1e-6


def matrix(rows: int, columns: int, *, pitch: int = 0, offset: int = 0) -> Tensor:
    """Random, with rows `pitch` elements apart that begin `offset` elements into the memory."""
    pitch = pitch or columns
    memory = torch.randn(offset + rows * pitch)
    return memory[offset:].view(rows, pitch)[:, :columns]


def moved(x: Tensor, device: str) -> Tensor:
    """A copy on the device, with the same strides and offset."""
    extent = sum(size * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.empty(x.storage_offset() + extent, device=device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "pitch", "offset"),
    [
        (300, 512, 504, 0, 0),
        (300, 504, 512, 520, 4),
        (257, 16, 128, 0, 0),
        (130, 20, 132, 0, 0),
        (150, 5, 9, 0, 0),
        (150, 33, 1, 37, 3),
        (129, 1, 130, 0, 0),
        (140, 60, 7, 64, 1),
    ],
)
def test_products_of_the_rows_that_exist(
    rows: int, depth: int, columns: int, pitch: int, offset: int, transposed: bool, device: str
) -> None:
    torch.manual_seed(rows + columns)
    a = matrix(rows, depth, pitch=pitch, offset=offset)
    b = matrix(columns, depth).t() if transposed else matrix(depth, columns, offset=offset)
    bias = torch.randn(columns)
    for exist in (0, 1, 8, 127, 128, 129, rows, rows + 50):
        for begin in (0, 1000):
            count = min(exist, rows)
            # What does not exist is not used.
            a[count:] = float("nan")
            total = torch.tensor(exist + begin, device=device)
            for added in (None, bias):
                out = torch.full((rows, columns), UNTOUCHED, device=device)
                factors = (moved(a, device), moved(b, device))
                counted_rows_product(
                    *factors, None if added is None else added.to(device), total, begin, out
                )
                extra = 0.0 if added is None else added.double()
                assert_near(out[:count].cpu(), a[:count], b, extra)
                assert bool((out[count:] == UNTOUCHED).all())
            a[count:] = torch.randn(rows - count, depth)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_before_the_begin(device: str) -> None:
    a, b = torch.randn(40, 8, device=device), torch.randn(8, 16, device=device)
    out = torch.full((40, 16), UNTOUCHED, device=device)
    counted_rows_product(a, b, None, torch.tensor(90, device=device), 100, out)
    assert bool((out == UNTOUCHED).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize(
    ("rows", "height", "width", "offset"),
    [(1000, 504, 512, 0), (500, 128, 128, 0), (300, 20, 132, 0), (300, 13, 5, 1), (70, 8, 1, 0)],
)
def test_sums_over_the_rows_that_exist(
    rows: int, height: int, width: int, offset: int, blocks: int, device: str
) -> None:
    torch.manual_seed(rows + width)
    a, b = matrix(rows, height, offset=offset), matrix(rows, width, pitch=width + 4 * offset)
    for exist in (0, 1, 7, 8, 9, 63, 65, rows - 1, rows, rows + 9):
        count = min(exist, rows)
        left, right = moved(a, device), moved(b, device)
        left[count:] = right[count:] = float("nan")
        total = torch.tensor(exist + 30, device=device)
        out = torch.full((blocks, height, width), float("nan"), device=device)
        counted_rows_sums(left, right, total, 30, False, out)
        assert_near(out.double().sum(0).cpu(), a[:count].t(), b[:count])
        out.fill_(1.0)
        counted_rows_sums(left, right, total, 30, True, out)
        assert_near(out.double().sum(0).cpu(), a[:count].t(), b[:count], float(blocks))
        sums = torch.ones(height, width, device=device)
        room = torch.empty(blocks * sums.numel() - 1, device=device)
        counted_rows_weight_sums(left, right, total, 30, sums, add=True, room=room)
        assert_near(sums.cpu(), a[:count].t(), b[:count], 1.0)
        counted_rows_weight_sums(left, right, total, 30, sums, add=False, room=room)
        assert_near(sums.cpu(), a[:count].t(), b[:count])


def test_blocks_of_rows_fill_the_device() -> None:
    assert row_blocks(tiles=1, at_once=1, most=20) == 1
    # 256 of 264 thread blocks.
    assert row_blocks(tiles=32, at_once=264, most=20) == 8
    assert row_blocks(tiles=32, at_once=264, most=5) == 5
    assert row_blocks(tiles=32, at_once=264, most=0) == 1
    assert row_blocks(tiles=264, at_once=264, most=20) == 1


@pytest.mark.parametrize("sign", [torch.Tensor.clone, torch.Tensor.abs], ids=["signed", "positive"])
def test_products_of_tf32_parts_are_as_precise_as_float32(
    sign: Callable[[Tensor], Tensor],
) -> None:
    """The arithmetic of the kernel, emulated: its error is below that of a chain of float32
    additions, also where truncated sums would all err in the same direction."""
    torch.manual_seed(1)
    x = torch.randn(1000)
    high, low = split(x)
    assert float(((high.double() + low.double() - x.double()) / x.double()).abs().max()) <= 2.0**-22
    for depth in (512, 4096):
        a, b = sign(torch.randn(8, depth)), sign(torch.randn(depth, 12))
        exact = a.double() @ b.double()
        chain = torch.zeros(8, 12)
        for k in range(depth):
            chain = torch.addcmul(chain, a[:, k : k + 1], b[k : k + 1])
        assert relative_error(product(a, b), exact) <= relative_error(chain, exact)


@pytest.fixture
def without_tf32() -> Iterator[None]:
    """Restores the setting, which monkeypatch would delete: it is no attribute of its module."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.gpu
@pytest.mark.usefixtures("without_tf32")
def test_errors_are_those_of_float32_products() -> None:
    torch.manual_seed(2)
    rows = 200_000
    hidden = torch.randn(rows, 512, device="cuda").tanh()
    gradient = torch.randn(rows, 504, device="cuda").square()
    weight = torch.randn(504, 512, device="cuda")
    total = torch.tensor(rows, device="cuda")
    few = 4096
    logits = torch.empty(few, 504, device="cuda")
    grad_hidden = torch.empty(few, 512, device="cuda")
    sums = torch.empty(504, 512, device="cuda")
    room = torch.empty(8 * sums.numel(), device="cuda")
    counted_rows_product(hidden[:few], weight.t(), None, total, 0, logits)
    counted_rows_product(gradient[:few], weight, None, total, 0, grad_hidden)
    counted_rows_weight_sums(gradient, hidden, total, 0, sums, add=False, room=room)
    for found, a, b in (
        (logits, hidden[:few], weight.t()),
        (grad_hidden, gradient[:few], weight),
        (sums, gradient.t(), hidden),
    ):
        exact = a.double() @ b.double()
        assert relative_error(found, exact) <= 2 * relative_error(a @ b, exact)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_tf32")
def test_cublas_multiplies_where_tf32_is_allowed() -> None:
    x = torch.zeros(1, device="cuda")
    fast = torch.cuda.get_device_capability() in ((8, 0), (9, 0))
    assert can_count_rows(x) == fast
    assert not can_count_rows(x.half())
    torch.backends.cuda.matmul.allow_tf32 = True
    assert not can_count_rows(x)


@pytest.mark.gpu
def test_results_are_the_same_every_time_and_follow_the_count_in_a_graph() -> None:
    torch.manual_seed(3)
    a, b = torch.randn(3000, 504, device="cuda"), torch.randn(3000, 512, device="cuda")
    weight = torch.randn(504, 512, device="cuda")
    total = torch.tensor(3000, device="cuda")
    out = torch.zeros(3000, 512, device="cuda")
    sums = torch.zeros(504, 512, device="cuda")
    room = torch.empty(8 * sums.numel(), device="cuda")

    def step() -> None:
        counted_rows_product(a, weight, None, total, 100, out)
        counted_rows_weight_sums(a, b, total, 100, sums, add=False, room=room)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for count in (2900, 1, 0, 1555):
        total.fill_(count + 100)
        out.fill_(UNTOUCHED)
        graph.replay()
        found = out.clone(), sums.clone()
        assert_near(found[0][:count], a[:count], weight)
        assert bool((found[0][count:] == UNTOUCHED).all())
        assert_near(found[1], a[:count].t(), b[:count])
        out.fill_(UNTOUCHED)
        step()
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], sums)
