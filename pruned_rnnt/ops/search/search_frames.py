"""Searches of some frames, greedy and modified beam, for joiners of linear layers and stateless
predictors.

    greedy   frame t, at most M times:  v = argmax log p(v | act(am(t) + lm)), the lowest of equal
             ones; blank or silent v: the next frame

    beam     frame t:  added(b, v) = log p(v | act(am(t) + lm(b))) + fusion(b, v)
             the B best of score(b) + added(b, v) become the rows (parent b, symbol v)
             of rows with equal sequences, the first gets the sum of their probabilities

Axes: N batch, T frames, M symbols of a frame, B rows of a beam, C symbols of a context,
P predictor width, D joiner width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.ops.common.library import NEG_INF, Out, op
from pruned_rnnt.ops.joiner.joiner_rows import activated
from pruned_rnnt.ops.search.beam_rows import extend_beam, joint_log_probs, merge_equal

# The most rows of a beam on a GPU.
MOST_GPU_BEAM = 32
# Rows of a tile, elements between them beside its width, and static shared memory of the kernels:
# csrc/cuda/search/search_model.cuh.
_TILE_ROWS, _TILE_GAP, _STATIC_BYTES = 8, 16, 4096


class SearchModel(NamedTuple):
    """Predictor, joiner and options of a search; all tensors contiguous.

    tables: (C,V+1,P), what each symbol adds to the predictor's output at each place of the context,
        the last row for -1; with C > 1, a ReLU follows the sum.
    decoder_weight (D,P), decoder_bias (D), output_weight (V,D), output_bias (V): of the joiner.
    silent: (V) bool, symbols that are never emitted: impossible in a beam, and as blank when
        greedy search finds them the most probable.
    activation: a value of ACTIVATIONS; hat: log-probabilities as `joint_log_probs`.
    """

    tables: Tensor
    decoder_weight: Tensor
    decoder_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    silent: Tensor
    blank: int
    activation: int
    hat: bool


def gpu_shared_bytes(model: SearchModel, beam: int) -> int:
    """Shared memory that a block on a GPU needs for one utterance; beam: B, 0 for greedy search."""
    places, _, width = model.tables.shape
    vocabulary, joiner = model.output_weight.shape
    tiles = -(-max(beam, 1) // _TILE_ROWS)
    elements = tiles * _TILE_ROWS * (-(-max(width, joiner) // 32) * 32 + _TILE_GAP)
    if beam:
        elements += beam * (2 * joiner + vocabulary + 2 * places + 2)
    else:
        elements += joiner + places
    return 4 * elements + _STATIC_BYTES


def predicted(context: Tensor, model: SearchModel) -> Tensor:
    """The projected output (..., D) of the predictor after contexts (..., C)."""
    tables = model.tables
    summed = tables[0][context[..., 0]]
    for place in range(1, tables.shape[0]):
        summed = summed + tables[place][context[..., place]]
    output = summed.relu() if tables.shape[0] > 1 else summed
    return functional.linear(output, model.decoder_weight, model.decoder_bias)


class BeamState(NamedTuple):
    """The rows of the beams: score (N,B), hash (N,B) int64 and length (N,B) int64 of the symbols,
    lm (N,B,D) the projected output of the predictor after context (N,B,C) int64."""

    score: Tensor
    hash: Tensor
    length: Tensor
    lm: Tensor
    context: Tensor


class BeamSteps(NamedTuple):
    """The origin of each row of the beams in each frame, (N,T,B) each: parent row int64, symbol
    int64 (-1: none), and the score that the symbol or blank added."""

    parent: Tensor
    symbol: Tensor
    added: Tensor


@op
def beam_frames(
    am: Tensor,
    lengths: Tensor,
    begin: int,
    fusion: Tensor | None,
    model: SearchModel,
    state: Out[BeamState],
    steps: Out[BeamSteps],
    end: Out[Tensor],
) -> None:
    """Search frames of am (N,T,D) from `begin` on; floating-point tensors are float32.

    lengths (N) int64: in frames from there on, rows stay as they are. fusion (N,B,V): scores of
    other models after the sequences of the rows; then the search stops after the first frame that
    changes a sequence or the order of rows. The kernel for GPUs takes no fusion, and beams within
    MOST_GPU_BEAM and `gpu_shared_bytes`. state is that before and after the frames. end (1)
    int64 is the frame at which the search stopped, T without fusion; steps are written from `begin`
    until there. Rows of probability 0 have any parent, and symbols that do not matter.
    """
    frames, blank = am.shape[1], model.blank
    own_row = torch.arange(state.score.shape[1], device=am.device)
    for t in range(begin, frames):
        hidden = activated(am[:, t, None] + state.lm, model.activation)
        logits = functional.linear(hidden, model.output_weight, model.output_bias)
        added = joint_log_probs(logits, blank, model.hat).masked_fill(model.silent, NEG_INF)
        if fusion is not None:
            added = added + fusion
        best = extend_beam(state.score, state.hash, added, blank)
        alive = lengths[:, None] > t
        emits = alive & best.emits
        parent = torch.where(alive, best.parent, own_row)
        context = state.context.gather(1, parent[:, :, None].expand_as(state.context))
        following = torch.cat((context[:, :, 1:], best.symbol[:, :, None]), dim=2)
        lm = state.lm.gather(1, parent[:, :, None].expand_as(state.lm))
        next_lm = predicted(following, model)
        grown = BeamState(
            torch.where(alive, merge_equal(best.score, best.hash), state.score),
            torch.where(alive, best.hash, state.hash),
            state.length.gather(1, parent) + emits,
            torch.where(emits[:, :, None], next_lm, lm),
            torch.where(emits[:, :, None], following, context),
        )
        for own, new in zip(state, grown, strict=True):
            own.copy_(new)
        steps.parent[:, t] = parent
        steps.symbol[:, t] = torch.where(emits, best.symbol, -1)
        steps.added[:, t] = best.added.masked_fill(~alive, 0)
        changed = (best.score > NEG_INF) & (emits | (parent != own_row))
        if fusion is not None and bool(changed.any()):
            frames = t + 1
            break
    end.fill_(frames)


class PredictorState(NamedTuple):
    """lm (N,D): the projected output of the predictor after context (N,C) int64."""

    lm: Tensor
    context: Tensor


@op
def greedy_frames(
    am: Tensor,
    lengths: Tensor,
    model: SearchModel,
    state: Out[PredictorState],
    symbols: Out[Tensor],
    scores: Out[Tensor],
) -> None:
    """Search the frames of am (N,T,D); floating-point tensors are float32.

    lengths (N) int64. state is that before and after the frames. symbols (N,T,M) int64: -1 for
    none; scores (N,T,M): the log-probabilities of symbols and of what ended a frame, 0 for places
    that the search did not reach.
    """
    symbols.fill_(-1)
    scores.zero_()
    for t in range(am.shape[1]):
        alive = lengths > t
        for place in range(symbols.shape[2]):
            hidden = activated(am[:, t] + state.lm, model.activation)
            logits = functional.linear(hidden, model.output_weight, model.output_bias)
            best, symbol = joint_log_probs(logits, model.blank, model.hat).max(dim=-1)
            scores[:, t, place] = torch.where(alive, best, 0)
            alive = alive & (symbol != model.blank) & ~model.silent[symbol]
            symbols[:, t, place] = torch.where(alive, symbol, -1)
            following = torch.cat((state.context[:, 1:], symbol[:, None]), dim=1)
            grown = PredictorState(predicted(following, model), following)
            for own, new in zip(state, grown, strict=True):
                own.copy_(torch.where(alive[:, None], new, own))
