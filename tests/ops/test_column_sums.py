"""column_sums at larger sizes than in native_cases.py."""

import pytest
import torch

from pruned_rnnt.ops.common.column_sums import column_sums, parts_of


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
