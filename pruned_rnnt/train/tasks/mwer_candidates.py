"""The hypotheses of a batch among which minimum word error rate training compares errors.

Axes: N batch, K hypotheses of an utterance, H = N * K, U symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruned_rnnt.data.input.batch import Batch, pad_targets
from pruned_rnnt.data.tokens.scripts import written_without_spaces
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.scoring.headline import MetricChoice
from pruned_rnnt.decode.scoring.wer import Transcript, count_errors
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.model.model_config import LossConfig

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
