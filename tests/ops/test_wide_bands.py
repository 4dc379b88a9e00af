"""band_lattice with bands wider than a block has threads, and wide or narrow ones that go back."""

import pytest
import torch

from pruned_rnnt.ops.common.library import FALLBACKS, RNNT_TYPES
from pruned_rnnt.ops.lattice.lattice import split_workspace
from tests.ops.native_batches import NEG_INF, batch_of
from tests.ops.random_bands import log_softmax_like, random_start


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
@pytest.mark.parametrize(("columns", "back"), [(512, 0), (1100, 0), (600, 2), (4, 2), (33, 1)])
def test_every_topology_and_width_of_band(device, columns, back, rnnt_type) -> None:
    torch.manual_seed(columns)
    symbols = [columns + 30, 8, columns - 1]
    batch = batch_of([14, 9, columns // 8 + 3], symbols, 4)
    start = random_start(batch, columns)
    start[:, 3:6] -= back
    if back:
        start[:, 7] += 1
    start.clamp_(min=0)
    rows = start.numel() * columns
    px, py = log_softmax_like(2, rows, dtype=torch.float64)
    px[torch.rand(rows) < 0.05] = NEG_INF
    inputs = (px, py, batch.logit_lengths, batch.target_lengths, start, None, batch.frames, columns)

    def outputs(where: str) -> list[torch.Tensor]:
        return [torch.full((n,), 7.0, dtype=px.dtype, device=where) for n in (3, rows, rows)]

    work = split_workspace(px, batch.size, columns, batch.size * batch.frames)
    want = outputs("cpu")
    FALLBACKS["band_lattice"](*inputs, rnnt_type, 0.1, work, *want)
    got = outputs(device)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.ops.pruned_rnnt.band_lattice(*moved, rnnt_type, 0.1, work.to(device), *got)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left.cpu(), right, rtol=1e-9, atol=1e-10)
