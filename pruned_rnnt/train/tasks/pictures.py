"""Pictures of a validation for TensorBoard: the lattice, features, decoded samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pruned_rnnt.data.audio.feature_kinds import FeatureKind
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import Decoded
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS, FRAME_SECONDS
from pruned_rnnt.diagnostics import lattice_figure
from pruned_rnnt.diagnostics.utterance_figure import spectrogram_figure
from pruned_rnnt.train.tasks.validate import ValidationReport


def lattice_of_example(
    report: ValidationReport,
    tokenizer: Tokenizer,
    title: str,
    durations: Sequence[int] = (),
    frame_seconds: float = FRAME_SECONDS,
) -> Any:
    """Figure of the longest utterance of the report's example batch, None without occupancies.

    durations: those of the loss, if any. frame_seconds: of an encoder frame.
    """
    batch, losses = report.example_batch, report.example_losses
    if batch is None or losses is None or losses.occupancy is None:
        return None
    index = int(losses.frame_lengths.argmax())
    symbols = int(batch.target_lengths_N[index])
    names = tokenizer.symbols
    return lattice_figure(
        losses.occupancy,
        losses.bounds,
        index=index,
        logit_length=int(losses.frame_lengths[index]),
        target_length=symbols,
        tokens=[names[int(symbol)] for symbol in batch.targets_NU[index, :symbols]],
        title=f"{title}: {batch.ids[index]}",
        frame_seconds=frame_seconds,
        durations=durations,
    )


def spectrogram_of_example(report: ValidationReport, title: str, kind: FeatureKind) -> Any:
    """Figure of the features of the utterance that `lattice_of_example` shows, None without one.

    kind: of the batch.
    """
    batch, losses = report.example_batch, report.example_losses
    if batch is None or losses is None:
        return None
    index = int(losses.frame_lengths.argmax())
    features_TF = batch.features_NTF[index, : int(batch.feature_lengths_N[index])]
    energies_TF = kind.energies(features_TF)
    return spectrogram_figure(energies_TF, FEATURE_SECONDS, title=f"{title}: {batch.ids[index]}")


def samples_as_markdown(samples: tuple[Decoded, ...]) -> str:
    """A table of references and hypotheses."""
    rows = [f"| {s.id} | {s.reference} | {s.texts[0] if s.texts else ''} |" for s in samples]
    return "\n".join(["| utterance | reference | recognised |", "| --- | --- | --- |", *rows])
