"""Validation: losses, error rates, and examples with their pictures; leaves training unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FeatureKind
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import Search, build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.decode_set import Decoded, search_batch, to_texts
from pruned_rnnt.decode.emission_delay import word_delays
from pruned_rnnt.decode.scoring.error_rates import SetErrors
from pruned_rnnt.decode.word_times import FEATURE_SECONDS, FRAME_SECONDS, frame_seconds
from pruned_rnnt.diagnostics import band_edge_mass, lattice_figure, retained_mass
from pruned_rnnt.diagnostics.utterance_figure import spectrogram_figure
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.model.speech_model import BLANK, ModelLosses, SpeechModel
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.memory import out_of_memory_in

# Greedy search, as in runtimes of exported models.
_GREEDY = DecodeConfig()
_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Results of a validation. Over all processes:

    losses: by part, over the whole set, per encoder frame and (as `NAME_per_symbol`) per symbol.
    masses: of the band, means over utterances; empty with the full loss.
    errors: of greedy search, in words and in characters.
    delays: in seconds, of the correct words whose times are known.

    Of this process:

    samples: some decoded utterances.
    example_batch, example_losses: the first batch with its losses and occupancies, None if there
        was no batch.
    too_large: batches that did not fit into memory, with the allocator's message; no result counts
        them.
    without_loss: ids of utterances whose loss is infinite, NaN or undefined; only the errors count
        them.
    """

    losses: dict[str, float]
    masses: dict[str, float]
    errors: SetErrors
    delays: tuple[float, ...]
    samples: tuple[Decoded, ...]
    example_batch: Batch | None
    example_losses: ModelLosses | None
    too_large: tuple[tuple[Batch, str], ...]
    without_loss: tuple[str, ...]


@dataclass
class _Sums:
    """Plain sums, which are added over the processes."""

    losses: dict[str, float] = field(default_factory=dict)
    masses: dict[str, float] = field(default_factory=dict)
    utterances: int = 0
    frames: int = 0
    symbols: int = 0
    errors: SetErrors = field(default_factory=SetErrors)
    delays: list[float] = field(default_factory=list)

    def add_losses(
        self, losses: ModelLosses, masses: Mapping[str, Tensor], batch: Batch, counts_N: Tensor
    ) -> None:
        """Set the sums to those over the utterances of a batch for which `counts_N` is true."""
        self.utterances += int(counts_N.sum())
        self.frames += int(losses.frame_lengths.cpu()[counts_N].sum())
        self.symbols += int(batch.target_lengths_N[counts_N].sum())
        for name, values_N in {"total": losses.total, **losses.parts}.items():
            self.losses[name] = float(values_N.cpu()[counts_N].double().sum())
        for name, values_N in masses.items():
            self.masses[name] = float(values_N.cpu()[counts_N].double().sum())

    def add(self, other: _Sums) -> None:
        for own, more in ((self.losses, other.losses), (self.masses, other.masses)):
            for name, value in more.items():
                own[name] = own.get(name, 0.0) + value
        self.utterances += other.utterances
        self.frames += other.frames
        self.symbols += other.symbols
        self.errors += other.errors
        self.delays += other.delays


class _Validation:
    """The validation of one process, batch by batch."""

    def __init__(
        self,
        model: SpeechModel,
        losses: Callable[[Batch], ModelLosses],
        tokenizer: Tokenizer,
    ) -> None:
        self.model = model
        self.losses = losses
        self.device = next(model.parameters()).device
        self.tokenizer = tokenizer
        self.search: Search = build_search(model, _GREEDY)
        self.sums = _Sums()
        self.samples: list[Decoded] = []
        self.without_loss: list[str] = []
        self.example: tuple[Batch, ModelLosses] | None = None

    def add(self, batch: Batch) -> None:
        """Compute losses and search; results are added only if all of it succeeds.

        Validation sets are not filtered: an utterance may be too short for its symbols, or even for
        one encoder frame.
        """
        frames_N = self.model.encoder.output_lengths(batch.feature_lengths_N)
        measured = batch.select(frames_N >= least_frames(batch, self.model.loss_config))
        sums = _Sums()
        finite: set[str] = set()
        losses: ModelLosses | None = None
        if len(measured) > 0:
            losses = self.losses(measured.to(self.device))
            if not isinstance(losses, ModelLosses):
                raise TypeError(
                    f"`losses` of the task returned a {type(losses).__name__}: a validation needs "
                    "the ModelLosses that super().losses returns, if need be changed with "
                    "dataclasses.replace"
                )
            finite_N = losses.total.isfinite().cpu()
            finite.update(name for name, kept in zip(measured.ids, finite_N, strict=True) if kept)
            once_N = ~torch.tensor([name in batch.repeats for name in measured.ids])
            masses = band_masses(losses, measured, self.model.loss_config.rnnt_type)
            sums.add_losses(losses, masses, measured, finite_N & once_N)
        found: list[Decoded] = []
        searched = batch.select(frames_N >= 1)
        if len(searched) > 0:
            hypotheses = search_batch(self.model, searched, self.search)
            found = to_texts(searched, hypotheses, self.tokenizer)
        unique = [decoded for decoded in found if not decoded.repeated]
        sums.errors = SetErrors.of([utterance.transcript for utterance in unique])
        seconds = frame_seconds(self.model.encoder)
        sums.delays = [
            delay.seconds
            for decoded in unique
            for best in decoded.hypotheses[:1]
            for delay in word_delays(best, decoded.spoken, self.tokenizer, seconds)
        ]
        self.sums.add(sums)
        self.samples += unique[: _SAMPLES - len(self.samples)]
        self.without_loss += [name for name in batch.ids if name not in finite]
        if losses is not None and self.example is None:
            self.example = (measured, losses)


def least_frames(batch: Batch, loss: LossConfig) -> Tensor:
    """Encoder frames (N,) that utterances need to have a finite loss."""
    least_N = torch.ones_like(batch.feature_lengths_N)
    if loss.kind == "ctc":
        targets_NU = batch.targets_NU.cpu()
        # Equal neighbours need a blank between them; the padding is blank.
        repeats_NU = (targets_NU[:, 1:] == targets_NU[:, :-1]) & (targets_NU[:, 1:] != BLANK)
        return least_N.maximum(batch.target_lengths_N + repeats_NU.sum(1))
    if loss.rnnt_type != "regular":
        least_N += batch.target_lengths_N
    elif loss.kind == "pruned":
        # The band moves up by at most s_range - 1 symbols a frame, also with durations.
        columns = loss.s_range - 1
        least_N = least_N.maximum((batch.target_lengths_N + columns - 1) // columns)
    if loss.durations:
        least_N = least_N.maximum(1 + min(loss.durations) * batch.target_lengths_N)
    return least_N


def band_masses(losses: ModelLosses, batch: Batch, rnnt_type: str) -> dict[str, Tensor]:
    """Fractions of each utterance's probability within the band and on its edges, (N,) each.

    Empty with the full loss, which has no band.
    """
    if losses.occupancy is None or losses.bounds is None:
        return {}
    lengths = (losses.frame_lengths, batch.target_lengths_N)
    kept = retained_mass(losses.occupancy, losses.bounds, *lengths, rnnt_type=rnnt_type)
    edges = band_edge_mass(losses.occupancy, losses.bounds, *lengths)
    return {
        "retained_mass": kept.total,
        "retained_symbol_mass": kept.emit,
        "band_edge_mass": edges.lower + edges.upper,
    }


@torch.no_grad()
def validate(
    model: SpeechModel,
    losses: Callable[[Batch], ModelLosses],
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    *,
    ranks: Ranks,
) -> ValidationReport:
    """Losses and error rates over a set, with the model in evaluation mode for the duration.

    Random generators keep their states, so the number of validations does not affect training.

    Args:
        losses: `SpeechTask.losses` of a step.
    """
    was_training = model.training
    model.eval()
    validation = _Validation(model, losses, tokenizer)
    too_large: list[tuple[Batch, str]] = []
    graphs = model.inference_graphs
    release = (lambda: None) if graphs is None else graphs.release
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            if message := out_of_memory_in(partial(validation.add, batch), release):
                too_large.append((batch, message))
    model.train(was_training)
    total = _Sums()
    # A process has no parts of the loss if none of its batches fitted into memory.
    for sums in ranks.gather(validation.sums):
        total.add(sums)
    utterances, frames, symbols = (
        max(count, 1) for count in (total.utterances, total.frames, total.symbols)
    )
    by_name = dict(sorted(total.losses.items()))
    return ValidationReport(
        losses={
            **{name: loss / frames for name, loss in by_name.items()},
            **{f"{name}_per_symbol": loss / symbols for name, loss in by_name.items()},
        },
        masses={name: mass / utterances for name, mass in total.masses.items()},
        errors=total.errors,
        delays=tuple(total.delays),
        samples=tuple(validation.samples),
        example_batch=validation.example[0] if validation.example else None,
        example_losses=validation.example[1] if validation.example else None,
        too_large=tuple(too_large),
        without_loss=tuple(validation.without_loss),
    )


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
