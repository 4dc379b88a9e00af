"""Errors of exported ONNX files on a prepared split, decoded by onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.decode.scoring.significance import PairedDifference, paired_difference
from pruned_rnnt.decode.scoring.wer import ErrorCounts, Transcript, count_errors
from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser


class Utterance(NamedTuple):
    """features_TF: log-mel features of T frames and F bins, on the CPU."""

    id: str
    features_TF: Tensor
    text: str


class FileErrors(NamedTuple):
    """Errors of one precision: of the set, and of each utterance."""

    counts: ErrorCounts
    errors: tuple[int, ...]
    words: tuple[int, ...]

    def minus(self, other: FileErrors) -> PairedDifference:
        """This error rate minus that of another precision, by paired bootstrap."""
        return paired_difference(other.errors, self.errors, self.words)


def utterances(batches: Iterable[Batch]) -> list[Utterance]:
    """The utterances of batches, without padding."""
    return [
        Utterance(name, features_TF[:length].clone(), text)
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
    recogniser = OnnxRecogniser(folder, precision=precision, threads=1)
    each = [
        count_errors(
            [
                Transcript(
                    id=utterance.id,
                    reference=tuple(utterance.text.split()),
                    hypothesis=tuple(
                        recogniser.transcribe_features(utterance.features_TF).text.split()
                    ),
                )
            ]
        )
        for utterance in measured
    ]
    return FileErrors(
        sum(each, ErrorCounts()),
        tuple(counts.errors for counts in each),
        tuple(counts.reference_words for counts in each),
    )
