"""The losses and what belongs to them, as names of the package: `pruned_rnnt.rnnt_loss`.

The package imports this module, and with it torch, when one of the names is first used.
"""

from __future__ import annotations

from pruned_rnnt.loss.bounds import prune, prune_bounds
from pruned_rnnt.loss.ctc import ctc_consistency_loss, ctc_loss
from pruned_rnnt.loss.fused import rnnt_loss_fused, rnnt_loss_tdt_fused
from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.loss.logit_losses import (
    rnnt_loss,
    rnnt_loss_multi_blank,
    rnnt_loss_pruned,
    rnnt_loss_tdt,
)
from pruned_rnnt.loss.mutual_information import mutual_information
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.loss.results import (
    Bounds,
    LatticeOccupancy,
    MutualInformation,
    Occupancy,
    PrunedInputs,
    SimpleLoss,
    TdtOccupancy,
    TransducerLosses,
)
from pruned_rnnt.loss.simple import rnnt_loss_simple
from pruned_rnnt.ops import backend_report, backend_summary

__all__ = [
    "Bounds",
    "Joiner",
    "LatticeOccupancy",
    "MutualInformation",
    "Occupancy",
    "PrunedInputs",
    "PrunedTransducerLoss",
    "SimpleLoss",
    "TdtOccupancy",
    "TransducerLosses",
    "backend_report",
    "backend_summary",
    "ctc_consistency_loss",
    "ctc_loss",
    "mutual_information",
    "prune",
    "prune_bounds",
    "rnnt_loss",
    "rnnt_loss_fused",
    "rnnt_loss_multi_blank",
    "rnnt_loss_pruned",
    "rnnt_loss_simple",
    "rnnt_loss_tdt",
    "rnnt_loss_tdt_fused",
]
