"""The losses: functions of tensors, and one module (transducer.py)."""

from pruned_rnnt.loss.bounds import prune, prune_bounds
from pruned_rnnt.loss.ctc import ctc_loss
from pruned_rnnt.loss.full import rnnt_loss
from pruned_rnnt.loss.fused import rnnt_loss_fused
from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.loss.mutual_information import mutual_information
from pruned_rnnt.loss.packing import packed_row_splits, row_splits_to_row_ids
from pruned_rnnt.loss.pruned import rnnt_loss_pruned
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.loss.results import (
    Bounds,
    LatticeOccupancy,
    MutualInformation,
    Occupancy,
    PrunedInputs,
    SimpleLoss,
    TransducerLosses,
)
from pruned_rnnt.loss.simple import rnnt_loss_simple

__all__ = [
    "Bounds",
    "Joiner",
    "LatticeOccupancy",
    "MutualInformation",
    "Occupancy",
    "PrunedInputs",
    "PrunedTransducerLoss",
    "SimpleLoss",
    "TransducerLosses",
    "ctc_loss",
    "mutual_information",
    "packed_row_splits",
    "prune",
    "prune_bounds",
    "rnnt_loss",
    "rnnt_loss_fused",
    "rnnt_loss_pruned",
    "rnnt_loss_simple",
    "row_splits_to_row_ids",
]
