"""What the graphs of an exported folder get as inputs while audio is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pruned_rnnt.pretrained.onnx_recogniser import Feeds, OnnxRecogniser
from pruned_rnnt.quantise.measured_files import Utterance

# Runs of an encoder that are kept, evenly spread, and rows of the decoder's and joiner's inputs.
_ENCODER_RUNS, _ROWS = 24, 512


def recorded_runs(folder: Path, audio: Iterable[Utterance]) -> dict[str, list[Feeds]]:
    """Decode with the float32 files; the inputs of some runs of each graph, by its name.

    The inputs of the decoder and the joiner, which run for one frame at a time, are joined to one.
    """
    found: dict[str, list[Feeds]] = {}
    recogniser = OnnxRecogniser(
        folder, threads=1, on_run=lambda graph, feeds: found.setdefault(graph, []).append(feeds)
    )
    for utterance in audio:
        recogniser.transcribe_features(utterance.features_TF)
    return {
        graph: [_joined(_spread(runs, _ROWS))]
        if graph in ("decoder", "joiner")
        else _spread(runs, _ENCODER_RUNS)
        for graph, runs in found.items()
    }


def _spread(runs: list[Feeds], most: int) -> list[Feeds]:
    step = max(1, -(-len(runs) // most))
    return runs[::step]


def _joined(runs: list[Feeds]) -> Feeds:
    return {name: np.concatenate([feeds[name] for feeds in runs]) for name in runs[0]}
