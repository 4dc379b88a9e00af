"""NaN, infinite and huge parameters are described."""

from __future__ import annotations

import math

import pytest
import torch

from pruned_rnnt.model.parameter_values import describe_broken


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_first_broken_parameter_is_described(device: str, dtype: torch.dtype) -> None:
    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    fine = {"weight": tensor(1.0, -6e4), "count": torch.tensor(2**40), "none": tensor()}
    assert describe_broken(fine) == ""
    assert describe_broken({}) == ""
    broken = {**fine, "a": tensor(1.0, math.nan, math.inf)}
    assert describe_broken(broken) == "parameter a has NaN values (1 of 3)"
    broken["b"] = tensor(math.nan)
    assert describe_broken(broken) == ("parameter a has NaN values (1 of 3); 1 more are broken")
    assert describe_broken({"c": tensor(0.0, -math.inf)}) == (
        "parameter c has infinite values (1 of 2)"
    )


def test_huge_values_are_broken() -> None:
    assert describe_broken({"a": torch.tensor([-2e6])}) == "parameter a has values up to 2.0e+06"
    assert describe_broken({"a": torch.tensor([9e5])}) == ""
    beyond = torch.tensor([1e300], dtype=torch.float64)
    assert describe_broken({"a": beyond}) == "parameter a has values beyond float32"
