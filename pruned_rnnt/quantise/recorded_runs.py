"""What the graphs of an exported folder get as inputs while audio is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pruned_rnnt.pretrained.onnx_recogniser import Feeds, OnnxRecogniser
from pruned_rnnt.quantise.measured_files import AS_SHERPA, Utterance, text_of

# Runs of a graph that are kept, evenly spread: between these numbers and twice as many. The
# decoder and the joiner run for one frame at a time; the state of a stream takes much memory.
_RUNS, _RUNS_OF_FRAMES = 12, 512
_FRAME_GRAPHS = ("decoder", "joiner")


class _SpreadRuns:
    """Keeps every second, fourth and so on of the runs, so that their number is bounded."""

    def __init__(self, least: int) -> None:
        self.kept: list[Feeds] = []
        self._least, self._stride, self._seen = least, 1, 0

    def add(self, feeds: Feeds) -> None:
        if self._seen % self._stride == 0:
            self.kept.append(feeds)
        self._seen += 1
        if len(self.kept) == 2 * self._least:
            self.kept = self.kept[::2]
            self._stride *= 2


def recorded_runs(folder: Path, audio: Iterable[Utterance]) -> dict[str, list[Feeds]]:
    """Decode with the float32 files; the inputs of some runs of each graph, by its name.

    The inputs of the decoder and the joiner are joined to one batch.
    """
    found: dict[str, _SpreadRuns] = {}

    def keep(graph: str, feeds: Feeds) -> None:
        if graph not in found:
            found[graph] = _SpreadRuns(_RUNS_OF_FRAMES if graph in _FRAME_GRAPHS else _RUNS)
        found[graph].add(feeds)

    recogniser = OnnxRecogniser(folder, threads=1, on_run=keep, segments=AS_SHERPA)
    for utterance in audio:
        text_of(recogniser, utterance)
    return {
        graph: [_joined(runs.kept)] if graph in _FRAME_GRAPHS else runs.kept
        for graph, runs in found.items()
    }


def _joined(runs: list[Feeds]) -> Feeds:
    return {
        # The states of models in NeMo's layout have the batch as their second axis.
        name: np.concatenate([feeds[name] for feeds in runs], axis=int(name.startswith("states.")))
        for name in runs[0]
    }
