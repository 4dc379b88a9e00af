"""Batches that are copied to the device while it computes."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.step import BatchCopies


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(4, 1000, 80, generator=generator)
    return Batch(
        features_NTF=features,
        feature_lengths_N=torch.full((4,), 1000),
        targets_NU=torch.randint(1, 500, (4, 30), generator=generator).int(),
        target_lengths_N=torch.full((4,), 30, dtype=torch.int32),
        texts=("",) * 4,
        ids=("a", "b", "c", "d"),
        durations=(10.0,) * 4,
        words=((),) * 4,
        second_view_NTF=features.flip(0) if seed % 2 else None,
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def test_kernels_read_the_batch_that_was_copied(device: str) -> None:
    """Also if the device is late and the memory of one batch is used for another."""
    copies = BatchCopies(torch.device(device))
    totals, expected = [], []
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
    for seed in range(8):
        batch = make_batch(seed)
        moved = copies(batch.pin_memory() if device == "cuda" else batch)
        assert moved.ids == batch.ids
        assert moved.feature_lengths_N.device.type == "cpu"
        views = [moved.features_NTF, moved.targets_NU]
        views += [] if moved.second_view_NTF is None else [moved.second_view_NTF]
        assert all(view.device.type == device for view in views)
        totals.append([view.double().cos().sum() for view in views])
        sources = [batch.features_NTF, batch.targets_NU, batch.second_view_NTF]
        expected.append([x.double().cos().sum() for x in sources if x is not None])
        del moved, views
    for found, wanted in zip(totals, expected, strict=True):
        torch.testing.assert_close([x.cpu() for x in found], wanted, rtol=1e-9, atol=1e-6)
