"""Greedy search on the CPU for models that the compiled one does not take, such as those with an
LSTM: the predictor runs once per symbol, the joiner once per span of frames.

Until the next symbol, the predictor's output does not change. The joiner therefore computes the
next few frames at once, in one matrix product, and those after the first symbol are discarded.

Axes: N batch, T encoder frames, A utterances that have not ended, K frames of a span, D joiner
width, M maximum symbols per frame, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows, take_rows
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs

# Speech has about eight frames per symbol. With many utterances, matrix products are large anyway.
_SPAN, _SPAN_OF_MANY, _MANY = 8, 4, 16


class _Place:
    """Where the search of an utterance is: its frame, and the symbols emitted in this frame."""

    __slots__ = ("count", "end", "frame")

    def __init__(self, end: int) -> None:
        self.frame = self.count = 0
        self.end = end


def greedy_spans(
    model: TransducerModel,
    am_NTD: Tensor,
    lengths_N: Tensor,
    predictor: Rows,
    *,
    silent: frozenset[int],
    most: int,
) -> tuple[tuple[Tensor, Tensor], Rows]:
    """Symbols (N, T, M), -1 for none, and their or blanks' log-probabilities; and the new state.

    Args:
        am_NTD: projected encoder output, on the CPU.
        predictor: state before the first frame.
        silent: ids that are treated as blank.
        most: M.
    """
    batch, frames, _ = am_NTD.shape
    blank, hat = model.predictor.blank, model.loss_config.hat
    symbols = [[-1] * (frames * most) for _ in range(batch)]
    scores = [[0.0] * (frames * most) for _ in range(batch)]
    places = [_Place(min(length, frames)) for length in lengths_N.tolist()]
    active = [n for n in range(batch) if places[n].end > 0]
    while active:
        am_AKD, lm_A1D = _span(am_NTD, predictor[0], active, places)
        log_probs_AKV = joint_log_probs(model.joiner(am_AKD, lm_A1D), blank, hat)
        best_AK, symbol_AK = log_probs_AKV.max(dim=-1)
        emitting, emitted = [], []
        for n, best_K, symbol_K in zip(active, best_AK.tolist(), symbol_AK.tolist(), strict=True):
            place = places[n]
            for best, symbol in zip(best_K, symbol_K, strict=True):
                if place.frame == place.end:
                    break
                index = place.frame * most + place.count
                scores[n][index] = best
                is_silent = symbol in silent
                if not is_silent:
                    symbols[n][index] = symbol
                    place.count += 1
                if is_silent or place.count == most:
                    place.frame += 1
                    place.count = 0
                if not is_silent:
                    emitting.append(n)
                    emitted.append(symbol)
                    break
        if emitting:
            predictor = _advance(model, predictor, emitting, emitted)
        active = [n for n in active if places[n].frame < places[n].end]
    shape = (batch, frames, most)
    outputs = (
        torch.tensor(symbols, dtype=torch.int64).view(shape),
        torch.tensor(scores, dtype=torch.float32).view(shape),
    )
    return outputs, predictor


def _span(
    am_NTD: Tensor, lm_ND: Tensor, active: Sequence[int], places: Sequence[_Place]
) -> tuple[Tensor, Tensor]:
    """The next K frames of the active utterances, (A, K, D), and their predictor output."""
    if len(active) == 1:
        (n,) = active
        begin = places[n].frame
        return am_NTD[n : n + 1, begin : begin + _SPAN], lm_ND[n : n + 1, None]
    size = _SPAN_OF_MANY if len(active) >= _MANY else _SPAN
    active_A = torch.tensor(active)
    frame_A1 = torch.tensor([[places[n].frame] for n in active])
    frame_AK = (frame_A1 + torch.arange(size)).clamp_(max=am_NTD.size(1) - 1)
    return am_NTD[active_A[:, None], frame_AK], lm_ND[active_A, None]


def _advance(
    model: TransducerModel, predictor: Rows, emitting: Sequence[int], emitted: Sequence[int]
) -> Rows:
    """The predictor after one more symbol of some utterances."""
    symbols_A = torch.tensor(emitted)
    if len(emitting) == len(predictor[0]):
        output_AP, state = model.predictor.step(symbols_A, predictor[1:])
        return model.joiner.decoder_proj(output_AP), *state
    emitting_A = torch.tensor(emitting)
    output_AP, state = model.predictor.step(symbols_A, take_rows(predictor[1:], emitting_A))
    new = (model.joiner.decoder_proj(output_AP), *state)
    return tuple(
        before.index_copy(0, emitting_A, after)
        for before, after in zip(predictor, new, strict=True)
    )
