"""Errors of exported ONNX files on a prepared split, decoded by onnxruntime, and the inputs that
their graphs get meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.decode.scoring.significance import PairedDifference, paired_difference
from pruned_rnnt.decode.scoring.wer import ErrorCounts, Transcript, count_errors
from pruned_rnnt.pretrained.onnx_recogniser import Feeds, OnnxRecogniser
from pruned_rnnt.transcribe.segments import SegmentConfig

# Runtimes decode an utterance once.
AS_SHERPA = SegmentConfig(lost_speech="ignore")
# Runs of a graph that are kept, evenly spread: between these numbers and twice as many. The
# decoder and the joiner run for one frame at a time; the state of a stream takes much memory.
_RUNS, _RUNS_OF_FRAMES = 12, 512
_FRAME_GRAPHS = ("decoder", "joiner")


class Utterance(NamedTuple):
    """audio: log-mel features (T, F) on the CPU, or samples (S,) at 16 kHz for models in NeMo's
    layout, whose files have other features."""

    id: str
    audio: Tensor | FloatArray
    text: str


class FileErrors(NamedTuple):
    """Errors of one precision: of the set, and of each utterance."""

    counts: ErrorCounts
    errors: tuple[int, ...]
    words: tuple[int, ...]

    def minus(self, other: FileErrors) -> PairedDifference:
        """This error rate minus that of another precision, by paired bootstrap."""
        return paired_difference(other.errors, self.errors, self.words)


def utterances(batches: Iterable[Batch], *, are_samples: bool = False) -> list[Utterance]:
    """The utterances of batches, without padding.

    Args:
        are_samples: the batches have rows of samples (`FeatureKind`).
    """

    def audio(rows: Tensor) -> Tensor | FloatArray:
        return rows.flatten().numpy() if are_samples else rows

    return [
        Utterance(name, audio(features_TF[:length].clone()), text)
        for batch in batches
        for name, features_TF, length, text in zip(
            batch.ids,
            batch.features_NTF.cpu(),
            batch.feature_lengths_N.tolist(),
            batch.texts,
            strict=True,
        )
        if name not in batch.repeats
    ]


def file_errors(folder: Path, precision: str, measured: Iterable[Utterance]) -> FileErrors:
    """Decode with the files of a precision by greedy search."""
    recogniser = OnnxRecogniser(folder, precision=precision, threads=1, segments=AS_SHERPA)
    return errors_of(
        Transcript(
            id=utterance.id,
            reference=tuple(utterance.text.split()),
            hypothesis=tuple(text_of(recogniser, utterance).split()),
        )
        for utterance in measured
    )


def text_of(recogniser: OnnxRecogniser, utterance: Utterance) -> str:
    """What a recogniser makes of an utterance."""
    (found,) = recogniser.transcribe_each([utterance.audio], words=False)
    if isinstance(found, Exception):
        raise found
    return found.text


def errors_of(transcripts: Iterable[Transcript]) -> FileErrors:
    """The errors of one precision in its transcripts."""
    each = [count_errors([transcript]) for transcript in transcripts]
    return FileErrors(
        sum(each, ErrorCounts()),
        tuple(counts.errors for counts in each),
        tuple(counts.reference_words for counts in each),
    )


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
