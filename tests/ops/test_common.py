"""The ops of ops/common: column sums at larger sizes than in native_cases.py, scale, lengths and
row splits that go to the device together.
"""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.autograd import scale
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.matrix_products import column_sums, parts_of
from pruned_rnnt.ops.common.row_geometry import packed_splits
from pruned_rnnt.ops.common.utterances import HostLengths, Utterances
from tests.loss import loss_cases as cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# More tensors than one launch takes; odd sizes, an empty one, and one for many blocks.
SHAPES = [(6, 5, 7), (6,), (6, 0), (6, 1 << 15), (6, 3), (6, 16)]
FRAMES, SYMBOLS = [7, 1, 1 << 30], [3, 0, 12]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_scales_all(device, dtype, single, in_place) -> None:
    torch.manual_seed(1)
    sources = [torch.randn(shape).to(device, dtype) for shape in SHAPES]
    factors = torch.tensor([1.0, -0.3, 2.0, 0.0, 1.0, 7.0], dtype=accumulator(dtype), device=device)
    factor = factors[1] if single else factors
    wanted = [
        (x.to(factor.dtype) * (factor if single else factor.view(-1, *[1] * (x.dim() - 1)))).to(
            dtype
        )
        for x in sources
    ]
    results = sources if in_place else [torch.full_like(x, float("nan")) for x in sources]
    scale(None if in_place else sources, factor, results)
    for got, want in zip(results, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_factors_of_one_keep_mixed_dtypes(device) -> None:
    sources = [torch.randn(33).to(device, dtype) for dtype in DTYPES[1:]]
    before = [x.clone() for x in sources]
    scale(None, torch.ones((), device=device), sources)
    assert all(torch.equal(left, right) for left, right in zip(sources, before, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("rows", "columns"), [(3, 100_000), (20_000, 1), (9_001, 504), (257, 2049)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_exact_numbers(device, rows, columns, dtype) -> None:
    # Small integers: every order of summation gives the same sum.
    x = torch.randint(-8, 9, (rows, columns), dtype=torch.int8)
    sums = torch.arange(columns, dtype=torch.float32, device=device)
    column_sums(x.to(device, dtype), sums, add=True)
    assert torch.equal(sums.cpu(), x.float().sum(0) + torch.arange(columns))


def test_parts_fill_a_device_without_large_workspace() -> None:
    assert parts_of(0, 5) == 1
    assert parts_of(47_700, 504) == 512
    for columns in (1, 1024, 100_000, 1 << 24):
        assert parts_of(1 << 30, columns) * columns <= max(columns, 512 * 1024)


@pytest.mark.gpu
def test_more_elements_than_int32_can_index() -> None:
    rows, columns = (1 << 31) // 1024 + 5, 1024
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    sums = torch.empty(columns, device="cuda")
    column_sums(x, sums, add=False)
    assert torch.equal(sums, torch.full_like(sums, rows + 2))


def utterances(device: str, lengths_dtype: torch.dtype) -> Utterances:
    lengths = [torch.tensor(x, dtype=lengths_dtype) for x in (FRAMES, SYMBOLS)]
    targets = torch.zeros(3, 12, dtype=torch.int32, device=device)
    return Utterances(targets, *lengths, HostLengths(FRAMES, SYMBOLS))


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [None, 5])
def test_lengths_and_splits_on_the_device(device, lengths_dtype, columns) -> None:
    given = utterances(device, lengths_dtype)
    packed = given.host_lengths.packed_rows(columns)
    there, splits = given.on_device_with(packed.row_splits)
    # Beyond 32 bits.
    expected = packed_splits(given.logit_lengths, given.target_lengths, columns)
    assert splits.dtype == torch.int64
    assert splits.device == given.targets.device
    assert torch.equal(splits.cpu(), expected)
    for each in (there, given.on_device(), there.on_device()):
        for found, numbers in zip(each.lengths, (FRAMES, SYMBOLS), strict=True):
            assert found.dtype == torch.int32
            assert found.device == given.targets.device
            assert found.is_contiguous()
            assert found.tolist() == numbers
    assert packed.widths == ([4, 1, 13] if columns is None else [5] * 3)


def test_lengths_that_are_on_the_device_stay_there() -> None:
    given = utterances("cpu", torch.int32)._replace(host_lengths=None)
    assert given.on_device() is given
