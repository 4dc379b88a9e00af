"""The recursion of `ctc_alignment` and the walk back along its path, in one kernel each.

    score(t, s) = emit(t, s) + max(score(t-1, s), score(t-1, s-1), score(t-1, s-2) if s may skip)

A program takes one utterance, with all of its states:

    s ->  [ . . . . . ]  BLOCK_S states, two impossible ones before them

One frame needs the scores of the frame before at its neighbours, which other threads hold: they are
exchanged through memory, between barriers. Plain torch launches about ten kernels for each frame.

Axes: N batch, T encoder frames, V vocabulary, S states.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel, power_of_two

_IMPOSSIBLE = 2


@kernel("frames", "states", "vocabulary")
def _forward_kernel(
    log_probs_ptr,
    lengths_ptr,
    labels_ptr,
    skips_ptr,
    exchange_ptr,
    steps_ptr,
    score_ptr,
    frames,
    states,
    vocabulary,
    BLOCK_S: tl.constexpr,
):
    utterance = tl.program_id(0).to(tl.int64)
    state = tl.arange(0, BLOCK_S)
    inside = state < states
    label = tl.load(labels_ptr + utterance * states + state, mask=inside, other=0)
    may_skip = tl.load(skips_ptr + utterance * states + state, mask=inside, other=0) != 0
    own = exchange_ptr + utterance * (BLOCK_S + 2) + state
    # Written by the host: impossible states, and the start in state 0.
    score = tl.load(own + 2)
    for t in range(tl.minimum(tl.load(lengths_ptr + utterance), frames).to(tl.int32)):
        one = tl.load(own + 1)
        two = tl.where(may_skip, tl.load(own), float("-inf"))
        frame = utterance * frames + t
        emit = tl.load(log_probs_ptr + frame * vocabulary + label, mask=inside, other=0.0)
        best = tl.maximum(score, one)
        # Of equal scores, that of the nearest state is taken.
        step = tl.where(two > best, 2, tl.where(one > score, 1, 0))
        tl.store(steps_ptr + frame * states + state, step.to(tl.uint8), mask=inside)
        score = tl.maximum(best, two) + emit.to(tl.float64)
        tl.debug_barrier()
        tl.store(own + 2, score)
        tl.debug_barrier()
    tl.store(score_ptr + utterance * states + state, score, mask=inside)


@kernel("frames", "states")
def _walk_kernel(steps_ptr, lengths_ptr, last_ptr, first_ptr, frames, states):
    utterance = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + utterance), frames).to(tl.int32)
    state = tl.load(last_ptr + utterance)
    for back in range(1, length):
        t = length - back
        tl.store(first_ptr + utterance * states + state, t)
        state -= tl.load(steps_ptr + (utterance * frames + t) * states + state).to(tl.int64)
    tl.store(first_ptr + utterance * states + state, 0)


def forward(
    log_probs_NTV: Tensor, lengths_N: Tensor, labels_NS: Tensor, skips_NS: Tensor
) -> tuple[Tensor, Tensor]:
    """As `_forward` of `ctc_alignment`; steps beyond the end of an utterance are undefined."""
    batch, frames, vocabulary = log_probs_NTV.shape
    states, device = labels_NS.size(1), log_probs_NTV.device
    block = power_of_two(states)
    exchange = torch.full(
        (batch, block + _IMPOSSIBLE), -torch.inf, dtype=torch.float64, device=device
    )
    exchange[:, _IMPOSSIBLE] = 0.0
    steps_NTS = torch.empty((batch, frames, states), dtype=torch.uint8, device=device)
    score_NS = torch.empty((batch, states), dtype=torch.float64, device=device)
    _forward_kernel(
        (batch,),
        log_probs_NTV.contiguous(),
        lengths_N.long(),
        labels_NS.contiguous(),
        skips_NS.to(torch.uint8),
        exchange,
        steps_NTS,
        score_NS,
        frames,
        states,
        vocabulary,
        block,
    )
    return steps_NTS, score_NS


def first_frames(steps_NTS: Tensor, lengths_N: Tensor, last_N: Tensor) -> Tensor:
    """As `_first_frames` of `ctc_alignment`."""
    batch, frames, states = steps_NTS.shape
    first_NS = torch.full((batch, states), frames, device=steps_NTS.device)
    _walk_kernel(
        (batch,),
        steps_NTS,
        lengths_N.long(),
        last_N.long(),
        first_NS,
        frames,
        states,
        num_warps=1,
    )
    return first_NS
