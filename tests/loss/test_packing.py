"""Lattices without nodes."""

import pytest
import torch

import pruned_rnnt
from tests.loss.loss_cases import DEVICES
from tests.loss.unread import not_reading


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
