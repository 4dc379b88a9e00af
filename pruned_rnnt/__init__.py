"""Pruned RNN-T: transducer losses and training for PyTorch.

The flow of data. Axes: N batch, T frames, U symbols, S band, E encoder width, D joiner width,
V vocabulary.

|  # | stage         | where                                | in -> out                           |
| -- | ------------- | ------------------------------------ | ----------------------------------- |
|  1 | waveform      | data/ (lhotse)                       | cut -> wave_N                       |
|  2 | features      | data/                                | -> feats_NTF, lengths               |
|  3 | encoder       | model/                               | -> enc_NTE, lengths                 |
|  4 | am, lm        | model/speech_model, predictor        | -> am_NTV, lm_NUV (trivial joiner)  |
|  5 | simple loss   | loss/                                | -> loss, emit and blank occupancy   |
|  6 | bounds        | ops/pruning/prune_bounds             | -> start_NT, S                      |
|  7 | gather        | ops/pruning/band_gather              | -> am_NTSD, lm_NTSD                 |
|  8 | joiner        | loss/joiner                          | -> logits_NTSV (fused: not stored)  |
|  9 | pruned loss   | ops/joiner/log_probs, ops/lattice    | -> loss                             |
| 10 | optimiser     | train/                               | step                                |
| 11 | checkpoint    | train/engine/checkpoint              | model, optimiser, sampler, RNG, ... |
| 12 | decoding      | decode/                              | -> hypotheses, times                |
| 13 | scoring       | decode/scoring/error_rates           | -> errors by type, WER              |
| 14 | export        | export/                              | -> ONNX files for recognisers       |
| 15 | alignment     | align/                               | text -> times of words and symbols  |

`import pruned_rnnt` takes milliseconds: the losses, which need torch alone, and
`pruned_rnnt.diagnostics` are imported at their first use. Other parts need an import of their own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from pruned_rnnt import diagnostics
    from pruned_rnnt.public import *
    from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
    from pruned_rnnt.transcribe.segments import SegmentConfig

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
    "__version__",
    "backend_report",
    "backend_summary",
    "ctc_consistency_loss",
    "ctc_loss",
    "diagnostics",
    "load",
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

# Names of earlier versions, and what does their work now.
_REMOVED = {
    "TdtSimpleLoss": "the results of PrunedTransducerLoss(..., durations=...)",
    "packed_row_splits": "(logit_lengths * (target_lengths + 1)).cumsum(0)",
    "prune_bounds_tdt": "prune_bounds(..., durations=...)",
    "rnnt_loss_tdt_simple": "the simple_loss of PrunedTransducerLoss(..., durations=...)",
    "row_splits_to_row_ids": "torch.repeat_interleave(row_splits.diff())",
}

# Parts that need no import of their own.
_PARTS = ("diagnostics", "loss", "ops")

__version__ = "0.2.0"  # read by pyproject.toml


def __getattr__(name: str) -> Any:
    """Import what a name needs when it is first used; later uses do not come here."""
    if name in _PARTS:
        return importlib.import_module(f"pruned_rnnt.{name}")
    # Nothing else: Python also asks for submodules here before it imports them.
    if name in __all__:
        public = importlib.import_module("pruned_rnnt.public")
        globals().update({each: getattr(public, each) for each in public.__all__})
        return globals()[name]
    message = f"module {__name__!r} has no attribute {name!r}"
    if name in _REMOVED:
        message += f"; it was removed: use {_REMOVED[name]}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load(
    path: Path | str,
    device: torch.device | str = "cpu",
    *,
    settings: Sequence[str] = (),
    segments: SegmentConfig | None = None,
) -> AudioRecogniser:
    """Loads a trained model of any kind, for `.transcribe("a.wav").text`.

    Args:
        path: the folder of a run or one of its checkpoints; a model.pt of `pruned-rnnt export
            --format torch` or its folder; a folder of `--format onnx`, which onnxruntime runs on
            the CPU; a .pt file of icefall's Zipformer recipe with bpe.model or tokens.txt near it,
            or their folder; a `.nemo` archive, or a folder of transformers with a Parakeet model;
            or a repository of the Hugging Face hub with one of these,
            `owner/name` or `hf://owner/name@revision`.
        device: of the model, for example `cuda`; `auto` uses a CUDA device if there is one.
        settings: `decode.key=value` as for `pruned-rnnt transcribe`, such as
            `decode.method=modified_beam`. A run has those of its configuration by default.
        segments: how long audio is cut.

    Returns:
        An object with `transcribe` (paths, samples, or lists of them), `model` (None for ONNX),
        `tokenizer` and `sampling_rate`.

    Raises:
        ValueError: there is no model at the path, or it is damaged; the message says what is there.
        MissingPackageError: a package of the extra `train`, for ONNX of `export`, or for a
            repository of `hub`, is not installed.
    """
    # Imported here because the losses need torch alone.
    from pruned_rnnt.system.openmp import sharing_processors
    from pruned_rnnt.system.optional_packages import missing_packages_named

    with sharing_processors():
        with missing_packages_named():
            from pruned_rnnt.pretrained import load as pretrained_load

        return pretrained_load.load(path, device, settings=settings, segments=segments)
