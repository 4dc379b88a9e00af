"""Greedy search of some frames on the CPU, for joiners of linear layers and stateless predictors.

    frame t, at most M times:  v = argmax log p(v | act(am(t) + lm)), the lowest of equal ones
                               blank or silent v: the next frame

Axes: N batch, T frames, M symbols of a frame, C symbols of a context, D joiner width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.joiner.joiner_rows import activated
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from pruned_rnnt.ops.search.search_model import SearchModel, predicted


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
