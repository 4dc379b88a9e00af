"""Lengths and row splits that go to the device together."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.row_geometry import packed_splits
from pruned_rnnt.ops.common.utterances import HostLengths, Utterances
from tests.loss import loss_cases as cases

FRAMES, SYMBOLS = [7, 1, 1 << 30], [3, 0, 12]


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
