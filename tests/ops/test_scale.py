"""scale: several tensors times one number or one for each index of their first dimension."""

import pytest
import torch

from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.scale import scale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# More tensors than one launch takes; odd sizes, an empty one, and one for many blocks.
SHAPES = [(6, 5, 7), (6,), (6, 0), (6, 1 << 15), (6, 3), (6, 16)]


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
