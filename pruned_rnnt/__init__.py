"""Pruned RNN-T: transducer losses and training for PyTorch.

The way of the data. Axes: N batch, T frames, U symbols, S band, E encoder dim, D joiner dim,
V vocabulary.

|  # | stage         | where                                | in -> out                           |
| -- | ------------- | ------------------------------------ | ----------------------------------- |
|  1 | waveform      | data/ (lhotse)                       | cut -> wave_N                       |
|  2 | features      | data/                                | -> feats_NTF, lengths               |
|  3 | encoder       | model/                               | -> enc_NTE, lengths                 |
|  4 | am, lm        | model/transducer_model, predictor    | -> am_NTV, lm_NUV (trivial joiner)  |
|  5 | simple loss   | loss/                                | -> loss, emit and blank occupancy   |
|  6 | bounds        | ops/pruning/prune_bounds             | -> start_NT, S                      |
|  7 | gather        | ops/pruning/band_gather              | -> am_NTSD, lm_NTSD                 |
|  8 | joiner        | loss/joiner                          | -> logits_NTSV (fused: not stored)  |
|  9 | pruned loss   | ops/joiner/log_probs, ops/lattice    | -> loss                             |
| 10 | optimiser     | train/                               | step                                |
| 11 | checkpoint    | train/engine/checkpoint              | model, optimiser, sampler, RNG, ... |
| 12 | decoding      | decode/                              | -> hypotheses, times                |
| 13 | scoring       | decode/scoring/wer                   | -> errors by type, WER              |
| 14 | export        | export/                              | -> ONNX files a recogniser runs     |
| 15 | alignment     | align/                               | text -> times of words and symbols  |

`import pruned_rnnt` gives the losses and needs torch alone. `pruned_rnnt.diagnostics` is imported
when it is first used; the other parts are imported by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pruned_rnnt.loss import (
    Bounds,
    Joiner,
    LatticeOccupancy,
    MutualInformation,
    Occupancy,
    PrunedInputs,
    PrunedTransducerLoss,
    SimpleLoss,
    TransducerLosses,
    ctc_loss,
    mutual_information,
    packed_row_splits,
    prune,
    prune_bounds,
    rnnt_loss,
    rnnt_loss_fused,
    rnnt_loss_pruned,
    rnnt_loss_simple,
    row_splits_to_row_ids,
)
from pruned_rnnt.ops import backend_report, backend_summary

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pruned_rnnt import diagnostics
    from pruned_rnnt.transcribe.recogniser import Recogniser

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
    "__version__",
    "backend_report",
    "backend_summary",
    "ctc_loss",
    "diagnostics",
    "load",
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

__version__ = "0.1.0"  # pyproject.toml reads it here


def __getattr__(name: str) -> Any:
    if name == "diagnostics":
        return importlib.import_module("pruned_rnnt.diagnostics")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "diagnostics"})


def load(path: Path | str, device: torch.device | str = "cpu") -> Recogniser:
    """A model which `pruned-rnnt export RUN --format torch` wrote, ready for `.transcribe(file)`.

    Raises:
        ValueError: no such file, or another kind of file; the message says which.
        MissingPackageError: a package of the extra `train` is not installed.
    """
    # Here and not above: the losses need torch alone, a recogniser much more.
    from pruned_rnnt.optional_packages import missing_packages_named

    with missing_packages_named():
        from pruned_rnnt.transcribe import recogniser

    return recogniser.load(path, device)
