"""What decodes the batches of `batches`, at first and again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

import torch

from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.transcribe.batch_input import BatchInput

# The best path through each utterance, and that of the CTC head, if there is one.
BestPaths = list[tuple[Hypothesis, HeadPath | None]]


class BatchDecoder(NamedTuple):
    """Decodes batches.

    best_paths: called with a batch and whether the paths of the CTC head are needed; makes the best
        paths, and yields before it waits for the device.
    device: where it decodes.
    least_frames: feature frames that a segment needs; shorter segments have no path.
    frame_step: feature frames of an output frame.
    needs_samples: whether the batches need samples, because the model has features of its own.
    """

    best_paths: Callable[[BatchInput, bool], Generator[None, None, BestPaths]]
    device: torch.device
    least_frames: int
    frame_step: int = SUBSAMPLING_FACTOR
    needs_samples: bool = False
