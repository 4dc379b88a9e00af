"""Minimum word error rate training: the expected errors over the hypotheses of a beam search.

Axes: N batch, K hypotheses of an utterance, H = N * K, T encoder frames, E encoder width,
U symbols, D joiner width.

Source: Prabhavalkar et al. 2018 (arXiv 1712.01818), for transducers: the search finds alignments,
and each hypothesis then gets its exact log-probability, the sum over all alignments, by the loss
that never stores logits. All hypotheses of an utterance share one pass of the encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.data.input.batch import Batch, pad_targets
from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.scoring.error_rates import MetricChoice, Transcript, count_errors
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.model.sequence_log_probs import sequence_log_probs
from pruned_rnnt.model.speech_model import ModelLosses, TransducerModel

Symbols = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Different symbol sequences of each utterance, the best first; on the CPU.

    An utterance with fewer than K sequences has empty ones after them, which are not present.

    sequences: those of each utterance.
    targets_HU, target_lengths_H: int32, all K sequences of the first utterance, then of the second.
    present_NK: bool.
    """

    sequences: tuple[tuple[Symbols, ...], ...]
    targets_HU: Tensor
    target_lengths_H: Tensor
    present_NK: Tensor


def candidates_of(
    found: Sequence[Sequence[Hypothesis]],
    frames_N: Sequence[int],
    loss: LossConfig,
    references: Sequence[Symbols] | None = None,
) -> Candidates:
    """The sequences of a search that have a path, without repetition; and the references, if given.

    An utterance without any gets the empty sequence, which always has a path.

    Args:
        found: hypotheses of each utterance, best first.
        frames_N: encoder frames of each utterance, at least 1.
        loss: of the model; its topology and durations bound the symbols of a path.
    """
    sequences: list[tuple[Symbols, ...]] = []
    for n, (hypotheses, frames) in enumerate(zip(found, frames_N, strict=True)):
        symbols = [hypothesis.symbols for hypothesis in hypotheses]
        if references is not None:
            symbols.append(references[n])
        most = _most_symbols(frames, loss)
        unique = dict.fromkeys(each for each in symbols if most is None or len(each) <= most)
        sequences.append(tuple(unique) or ((),))
    width = max(len(each) for each in sequences)
    padded = [own + ((),) * (width - len(own)) for own in sequences]
    targets_HU, target_lengths_H = pad_targets([each for own in padded for each in own])
    counts_N1 = torch.tensor([[len(own)] for own in sequences])
    return Candidates(
        sequences=tuple(sequences),
        targets_HU=targets_HU,
        target_lengths_H=target_lengths_H,
        present_NK=torch.arange(width) < counts_N1,
    )


def _most_symbols(frames: int, loss: LossConfig) -> int | None:
    """The length of the longest sequence that has a path; None without a bound."""
    if loss.durations and min(loss.durations) > 0:
        # Each symbol takes a frame, as does the last blank.
        return frames - 1
    if loss.rnnt_type == "regular":
        return None
    return frames - 1 if loss.rnnt_type == "rna" else frames


def references_of(batch: Batch) -> list[Symbols]:
    """The symbols of each reference; waits for the device of the batch."""
    rows = batch.targets_NU.tolist()
    lengths = batch.target_lengths_N.tolist()
    return [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def errors_of(
    candidates: Candidates, batch: Batch, tokenizer: Tokenizer, metric: MetricChoice
) -> Tensor:
    """(N, K) float32 on the CPU: errors in words, or in characters without spaces; 0 if absent."""
    errors_NK = torch.zeros(candidates.present_NK.shape)
    for n, (own, reference) in enumerate(zip(candidates.sequences, batch.texts, strict=True)):
        in_characters = written_without_spaces(reference) if metric == "auto" else metric == "cer"
        for k, symbols in enumerate(own):
            words = Transcript(
                id=batch.ids[n],
                reference=tuple(reference.split()),
                hypothesis=tuple(tokenizer.decode(symbols).split()),
            )
            transcript = words.characters() if in_characters else words
            errors_NK[n, k] = count_errors([transcript]).errors
    return errors_NK


@dataclass(frozen=True, kw_only=True)
class MwerConfig:
    """Minimum word error rate training (arXiv 1712.01818), the last stage of training.

    It starts from a trained model and minimises the expected number of errors over the hypotheses
    of a beam search, whose probabilities are renormalised to sum to 1.

    enabled: minimise expected errors; otherwise the other settings of this section have no effect.
    nbest: width of the beam, and hypotheses per utterance.
    transducer_scale: factor of the ordinary loss of the reference (section `loss`), which is added
        so that the model keeps modelling the reference.
    add_reference: count the reference among the hypotheses even if the search does not find it.
    metric: wer or cer: count errors in words, or in characters without spaces; `auto`: in
        characters for references in a script without spaces between words.
    """

    enabled: bool = False
    nbest: int = 4
    transducer_scale: float = 0.1
    add_reference: bool = False
    metric: MetricChoice = "auto"

    def __post_init__(self) -> None:
        check_at_least("mwer", self, nbest=2, transducer_scale=0)


class ExpectedErrors(NamedTuple):
    """Results of `expected_errors`, (N,) each.

    excess: expected errors minus the mean number of errors of the hypotheses; differentiable.
    expected: expected errors, without gradient.
    oracle: errors of the best hypothesis.
    mass: probability of all hypotheses together, before it is renormalised; without gradient.
    """

    excess: Tensor
    expected: Tensor
    oracle: Tensor
    mass: Tensor


def expected_errors(log_probs_NK: Tensor, errors_NK: Tensor, present_NK: Tensor) -> ExpectedErrors:
    """Expected errors with probabilities that are renormalised over the hypotheses present.

    The gradient with respect to the log-probability of a hypothesis is its renormalised probability
    times its errors minus the expected ones; it is 0 where all hypotheses have equally many errors,
    as with a single one. Subtracting the mean changes the value alone: it is below 0 if the more
    probable hypotheses are better than the others.

    Args:
        log_probs_NK: (N, K) log P(hypothesis | utterance), finite where present.
        errors_NK: (N, K) number of errors.
        present_NK: (N, K) bool; each utterance has at least one hypothesis.
    """
    log_probs_NK = log_probs_NK.masked_fill(~present_NK, -torch.inf)
    errors_NK = errors_NK.to(log_probs_NK.dtype).masked_fill(~present_NK, 0.0)
    mean_N1 = errors_NK.sum(dim=1, keepdim=True) / present_NK.sum(dim=1, keepdim=True)
    share_NK = log_probs_NK.softmax(dim=1)
    excess_N = (share_NK * (errors_NK - mean_N1)).sum(dim=1)
    return ExpectedErrors(
        excess=excess_N,
        expected=excess_N.detach() + mean_N1[:, 0],
        oracle=errors_NK.masked_fill(~present_NK, torch.inf).amin(dim=1),
        mass=log_probs_NK.detach().logsumexp(dim=1).exp(),
    )


class MinimumWordError:
    """Computes the losses of a batch; the model is in training mode.

    Args:
        model: its topology, durations and `hat` also hold for the probabilities of hypotheses; its
            delay penalty, FastEmit and sigma do not, as they are no part of a probability.
    """

    def __init__(self, model: TransducerModel, tokenizer: Tokenizer, config: MwerConfig) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        decoding = DecodeConfig(
            method="modified_beam", beam_size=config.nbest, num_best=config.nbest, length_norm=False
        )
        self._search = build_search(model, decoding)

    def losses(self, batch: Batch, reference: ModelLosses) -> ModelLosses:
        """Expected errors, plus transducer_scale times the ordinary loss of the references.

        The host counts errors while the device computes the losses.

        Args:
            reference: the ordinary losses of the batch.
        """
        candidates = self._candidates(reference.encoded, reference.frame_lengths, batch)
        log_probs_NK = sequence_log_probs(
            self.model,
            reference.encoded,
            reference.frame_lengths,
            candidates.targets_HU,
            candidates.target_lengths_H,
        )
        errors_NK = errors_of(candidates, batch, self.tokenizer, self.config.metric)
        found = expected_errors(
            log_probs_NK,
            errors_NK.to(log_probs_NK.device),
            candidates.present_NK.to(log_probs_NK.device),
        )
        excess_N, scale = found.excess, self.config.transducer_scale
        return dataclasses.replace(
            reference,
            objective=excess_N.sum() + scale * reference.objective,
            total=excess_N.detach() + scale * reference.total,
            parts={"mwer": excess_N.detach(), **reference.parts},
            measures={
                "expected_errors": found.expected,
                "oracle_errors": found.oracle,
                "nbest_mass": found.mass,
            },
        )

    def _candidates(self, encoded_NTE: Tensor, frames_N: Tensor, batch: Batch) -> Candidates:
        """Search with the encoder's output of training, and the other parts in evaluation mode."""
        frames = frames_N.tolist()
        with _evaluation_mode(self.model.predictor, self.model.joiner):
            found = self._search(encoded_NTE.detach()[:, : max(frames)], frames_N)
        # The search has filled the cache of autocast with copies that pass no gradient back.
        torch.clear_autocast_cache()
        references = references_of(batch) if self.config.add_reference else None
        return candidates_of(found, frames, self.model.loss_config, references)


@contextmanager
def _evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Put all submodules that are in training mode into evaluation mode in this context."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
