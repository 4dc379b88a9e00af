"""The recursion in float32 on scores whose exponentials overflow, against float64."""

import pytest
import torch

from pruned_rnnt.ops.common.library import FALLBACKS, RNNT_TYPES
from pruned_rnnt.ops.lattice.lattice import split_workspace
from tests.ops.native_batches import batch_of
from tests.ops.random_bands import log_softmax_like, random_start

BATCH = batch_of([67, 30, 12], [21, 29, 3], 5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
@pytest.mark.parametrize("columns", [4, None])
@pytest.mark.parametrize(("scale", "mask"), [(1.0, None), (1.0, -1e8), (1e3, None), (1e5, None)])
def test_sums_of_scores_of_any_size(device, rnnt_type, columns, scale, mask) -> None:
    torch.manual_seed(7)
    start = None if columns is None else random_start(BATCH, columns)
    columns = columns or BATCH.symbols + 1
    rows = BATCH.size * BATCH.frames * columns
    px, py = scale * log_softmax_like(2, rows, dtype=torch.float32)
    if mask is not None:
        px[5::9] = py[7::11] = mask
    geometry = (BATCH.logit_lengths, BATCH.target_lengths, start, None, BATCH.frames, columns)

    def results(function, where: str, dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = (BATCH.size, rows, rows)
        outputs = [torch.zeros(size, dtype=dtype, device=where) for size in sizes]
        moved = [x.to(where) if isinstance(x, torch.Tensor) else x for x in geometry]
        arcs = px.to(where, dtype), py.to(where, dtype)
        work = split_workspace(arcs[0], BATCH.size, columns, BATCH.size * BATCH.frames)
        function(*arcs, *moved, rnnt_type, 0.0, work, *outputs)
        return [x.cpu().double() for x in outputs]

    want = results(FALLBACKS["band_lattice"], "cpu", torch.float64)
    got = results(torch.ops.pruned_rnnt.band_lattice, device, torch.float32)
    assert want[0].isfinite().any()
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-4)
