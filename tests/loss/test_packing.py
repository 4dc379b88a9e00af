"""The packed layout: which row belongs to which utterance."""

import pytest
import torch

import pruned_rnnt
from tests.loss.loss_cases import DEVICES
from tests.loss.unread import not_reading


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
    ids = pruned_rnnt.row_splits_to_row_ids(splits, 3)
    assert ids.tolist() == [1, 1, 3]
    assert ids.dtype == dtype
    assert pruned_rnnt.row_splits_to_row_ids(splits[:1], 0).tolist() == []


@pytest.mark.parametrize("device", DEVICES)
def test_row_splits_that_do_not_fit_are_refused(device) -> None:
    splits = torch.tensor([0, 4, 2], device=device)
    with pytest.raises(ValueError, match=r"row_splits is \[0, 4, 2\]; it must not decrease"):
        pruned_rnnt.row_splits_to_row_ids(splits)
    with pytest.raises(ValueError, match="row_count is -1; it must be at least 0"):
        pruned_rnnt.row_splits_to_row_ids(splits[:2], -1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_count_that_is_not_read_gives_rows_of_the_last_utterance(device) -> None:
    splits = torch.tensor([0, 2, 3], device=device)
    with not_reading():
        assert pruned_rnnt.row_splits_to_row_ids(splits, 5).tolist() == [0, 0, 1, 1, 1]
        assert pruned_rnnt.row_splits_to_row_ids(splits, 2).tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_lattices_without_frames_are_refused_without_reading(device) -> None:
    targets = torch.ones(2, 1, dtype=torch.int32, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    am, lm, weight = (torch.zeros(x, device=device) for x in ((2, 0, 4), (2, 2, 4), (5, 4)))
    joiner = pruned_rnnt.Joiner(4, 4, 4, 5)
    module = pruned_rnnt.PrunedTransducerLoss(joiner, 4, 4, 5).to(device)
    calls = [
        lambda: pruned_rnnt.rnnt_loss(am.new_zeros(2, 0, 2, 5), targets, lengths, lengths),
        lambda: pruned_rnnt.rnnt_loss_simple(am, lm, targets, lengths, lengths),
        lambda: pruned_rnnt.rnnt_loss_fused(am, lm, weight, None, targets, None, lengths, lengths),
        lambda: pruned_rnnt.ctc_loss(am, targets, lengths, lengths),
        lambda: module(am, lm, targets, lengths, lengths, 0),
    ]
    for call in calls:
        with not_reading(), pytest.raises(ValueError, match="has no frames; there must be"):
            call()
    occupancy = pruned_rnnt.Occupancy(am.new_zeros(2, 3, 0), am.new_zeros(2, 3, 0))
    with not_reading(), pytest.raises(ValueError, match="occupancy has no columns"):
        pruned_rnnt.prune_bounds(occupancy, lengths, lengths)


def test_row_splits_of_another_dtype_or_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row_splits is torch.float32; it must be int32"):
        pruned_rnnt.row_splits_to_row_ids(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"row_splits has shape \(2, 2\); it must be \(N\+1,\)"):
        pruned_rnnt.row_splits_to_row_ids(torch.zeros(2, 2).long())
