"""The packed layout: which row belongs to which utterance."""

import pytest
import torch

import pruned_rnnt
from tests.loss.loss_cases import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_row_splits_and_ids(device) -> None:
    splits = pruned_rnnt.packed_row_splits(
        torch.tensor([3, 1, 2], device=device), torch.tensor([1, 0, 2], device=device)
    )
    assert splits.tolist() == [0, 6, 7, 13]
    assert splits.dtype == torch.int64
    expected = [0] * 6 + [1] + [2] * 6
    assert pruned_rnnt.row_splits_to_row_ids(splits).tolist() == expected
    assert pruned_rnnt.row_splits_to_row_ids(splits, 13).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_utterances_without_rows(dtype, device) -> None:
    splits = torch.tensor([0, 0, 2, 2, 3, 3], dtype=dtype, device=device)
    ids = pruned_rnnt.row_splits_to_row_ids(splits)
    assert ids.tolist() == [1, 1, 3]
    assert ids.dtype == dtype
    assert pruned_rnnt.row_splits_to_row_ids(splits[:1]).tolist() == []


def test_row_splits_of_another_dtype_or_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row_splits is torch.float32; it must be int32"):
        pruned_rnnt.row_splits_to_row_ids(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"row_splits has shape \(2, 2\); it must be \(N\+1,\)"):
        pruned_rnnt.row_splits_to_row_ids(torch.zeros(2, 2).long())
