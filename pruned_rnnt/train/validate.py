"""Validation: losses, word error rate, and material for pictures, without touching training."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pruned_rnnt.data.batch import Batch
from pruned_rnnt.data.tokens import Tokenizer
from pruned_rnnt.decode.search import DecodeConfig, Decoded, build_search, search_batch, to_texts
from pruned_rnnt.decode.wer import ErrorCounts, count_errors
from pruned_rnnt.model.transducer import ModelLosses, TransducerModel
from pruned_rnnt.train.distributed import Ranks

# Greedy search as recognisers which run exported models do it.
_GREEDY = DecodeConfig()
# With several processes the sampler repeats utterances so that each has as many batches.
_REPEATED = re.compile(r"_dup\d+$")
_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """losses: by part, over the whole set, per encoder frame and (as `NAME_per_symbol`) per symbol;
    errors: of greedy search.

    samples: some decoded utterances. example_batch, example_losses: one batch with its losses and
    occupancies, of this process (None when it had no batch).
    """

    losses: dict[str, float]
    errors: ErrorCounts
    samples: tuple[Decoded, ...]
    example_batch: Batch | None
    example_losses: ModelLosses | None


@torch.no_grad()
def validate(
    model: TransducerModel,
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    *,
    step: int,
    ranks: Ranks,
) -> ValidationReport:
    """Losses and WER over a set, with the model in evaluation mode while it lasts.

    No random generator is touched, so validating more often changes no training.
    """
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    sums: dict[str, float] = {}
    frames = symbols = 0.0
    decoded: list[Decoded] = []
    example: tuple[Batch, ModelLosses] | None = None
    search = build_search(model, _GREEDY)
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            here = batch.to(device)
            losses = model(
                here.features_NTF,
                here.feature_lengths_N,
                here.targets_NU,
                here.target_lengths_N,
                step,
            )
            for name, values in {"total": losses.total, **losses.parts}.items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
            frames += float(losses.frame_lengths.sum())
            symbols += float(batch.target_lengths_N.sum())
            decoded += to_texts(batch, search_batch(model, batch, search), tokenizer)
            example = (batch, losses)
    model.train(was_training)
    unique = [utterance for utterance in decoded if not _REPEATED.search(utterance.id)]
    errors = count_errors([utterance.transcript for utterance in unique])
    names = sorted(sums)
    totals = ranks.sum(
        [
            frames,
            symbols,
            errors.insertions,
            errors.deletions,
            errors.substitutions,
            errors.reference_words,
            *(sums[name] for name in names),
        ]
    )
    frames, symbols, insertions, deletions, substitutions, words, *loss_sums = totals
    by_name = dict(zip(names, loss_sums, strict=True))
    return ValidationReport(
        losses={
            **{name: total / max(frames, 1.0) for name, total in by_name.items()},
            **{f"{name}_per_symbol": t / max(symbols, 1.0) for name, t in by_name.items()},
        },
        errors=ErrorCounts(
            insertions=int(insertions),
            deletions=int(deletions),
            substitutions=int(substitutions),
            reference_words=int(words),
        ),
        samples=tuple(unique[:_SAMPLES]),
        example_batch=example[0] if example else None,
        example_losses=example[1] if example else None,
    )
