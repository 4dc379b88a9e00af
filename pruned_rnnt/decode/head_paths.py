"""The frames in which the CTC head places the symbols of known texts or of hypotheses.

A transducer whose encoder sees whole utterances may emit symbols long before they are spoken: its
loss does not depend on the emission times. The CTC head of the same encoder emits near the sounds.

Axes: N batch, T encoder frames, E encoder width, U symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.ctc_alignment import CtcAlignment, launch_alignments
from pruned_rnnt.decode.search.interface import Pending
from pruned_rnnt.model.speech_model import BLANK, SpeechModel, ctc_log_probs
from pruned_rnnt.system.device import to_device

# States times frames of one search, which stores one byte for each.
_MAX_CELLS = 2**29


class Spikes(NamedTuple):
    """The symbols that the CTC head emits by itself, and the first frame of each."""

    symbols: tuple[int, ...]
    frames: tuple[int, ...]


class HeadPath(NamedTuple):
    """The best CTC path through a text: the first frame of each symbol, and its log-probability
    there.

    spikes: of the best path through any text.
    """

    frames: tuple[int, ...]
    log_probs: tuple[float, ...]
    spikes: Spikes = Spikes((), ())


def head_paths(
    model: SpeechModel, encoded_NTE: Tensor, lengths: Tensor, texts: Sequence[Sequence[int]]
) -> list[HeadPath | None]:
    """The path of each utterance through its symbols.

    None if the model has no CTC head, if there is no path (too many symbols for the frames), or if
    one search would take too much memory.

    Args:
        encoded_NTE, lengths: (N, T, E) output of `model.encode` and (N,) its frames.
        texts: the ids of N texts, without blanks.
    """
    return launch_head_paths(model, encoded_NTE, lengths, texts).result()


def launch_head_paths(
    model: SpeechModel, encoded_NTE: Tensor, lengths: Tensor, texts: Sequence[Sequence[int]]
) -> Pending[list[HeadPath | None]]:
    """`head_paths` without waiting for the device."""
    return launch_ranked_head_paths(model, encoded_NTE, lengths, [texts]).map(
        lambda found: found[0]
    )


@torch.inference_mode()
def launch_ranked_head_paths(
    model: SpeechModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    ranks: Sequence[Sequence[Sequence[int]]],
) -> Pending[list[list[HeadPath | None]]]:
    """`launch_head_paths` for several texts of each utterance, with one pass of the head.

    Args:
        ranks: for each rank, the texts of the N utterances.
    """
    states = [2 * max(map(len, texts), default=0) + 1 for texts in ranks]
    fits = [encoded_NTE.size(0) * encoded_NTE.size(1) * each <= _MAX_CELLS for each in states]
    if model.ctc_head is None or not any(fits):
        return Pending((), lambda _: [[None] * len(texts) for texts in ranks])
    lengths = to_device(lengths, encoded_NTE.device)
    log_probs_NTV = ctc_log_probs(model, encoded_NTE)
    first = Pending([_first_frames(log_probs_NTV, lengths)], lambda found: found[0])
    fitting = [texts for texts, fit in zip(ranks, fits, strict=True) if fit]
    aligned = launch_alignments(log_probs_NTV, lengths, fitting, blank=BLANK)

    def paths(_: object) -> list[list[HeadPath | None]]:
        spikes, of_rank = [_spikes(first_T) for first_T in first.result()], iter(aligned.result())
        return [
            _paths(texts, next(of_rank), spikes) if fit else [None] * len(texts)
            for texts, fit in zip(ranks, fits, strict=True)
        ]

    return Pending((), paths)


def _first_frames(log_probs_NTV: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T): the symbol that begins in each frame of the best path, or blank."""
    best_NT = log_probs_NTV.argmax(dim=2)
    frames_T = torch.arange(best_NT.size(1), device=best_NT.device)
    begins_NT = frames_T < lengths_N[:, None]
    begins_NT[:, 1:] &= best_NT[:, 1:] != best_NT[:, :-1]
    return best_NT.masked_fill(~begins_NT, BLANK)


def _spikes(first_T: Tensor) -> Spikes:
    (frames_K,) = (first_T != BLANK).nonzero(as_tuple=True)
    return Spikes(tuple(first_T[frames_K].tolist()), tuple(frames_K.tolist()))


def _paths(
    texts: Sequence[Sequence[int]], best: CtcAlignment, spikes: Sequence[Spikes]
) -> list[HeadPath | None]:
    """The paths of N utterances, on the CPU."""
    frames, log_probs = best.frames_NU.tolist(), best.log_probs_NU.tolist()
    has_path = (best.score_N > -torch.inf).tolist()
    return [
        HeadPath(tuple(frames[n][: len(text)]), tuple(log_probs[n][: len(text)]), spikes[n])
        if has_path[n]
        else None
        for n, text in enumerate(texts)
    ]
