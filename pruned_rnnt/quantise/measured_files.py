"""Errors of exported ONNX files on a prepared split, decoded by onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.decode.scoring.significance import PairedDifference, paired_difference
from pruned_rnnt.decode.scoring.wer import ErrorCounts, Transcript, count_errors
from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser
from pruned_rnnt.transcribe.segments import SegmentConfig

# Runtimes decode an utterance once.
AS_SHERPA = SegmentConfig(lost_speech="ignore")


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
