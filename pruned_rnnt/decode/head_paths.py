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

from pruned_rnnt.decode.search.ctc_alignment import ctc_alignment
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


@torch.inference_mode()
def launch_head_paths(
    model: SpeechModel, encoded_NTE: Tensor, lengths: Tensor, texts: Sequence[Sequence[int]]
) -> Pending[list[HeadPath | None]]:
    """`head_paths` without waiting for the device."""
    longest = max((len(text) for text in texts), default=0) or 1
    cells = encoded_NTE.size(0) * encoded_NTE.size(1) * (2 * longest + 1)
    if model.ctc_head is None or cells > _MAX_CELLS:
        return Pending((), lambda _: [None] * len(texts))
    device = encoded_NTE.device
    targets_NU = torch.tensor([[*text, *[BLANK] * (longest - len(text))] for text in texts])
    counts_N = torch.tensor([len(text) for text in texts])
    log_probs_NTV = ctc_log_probs(model, encoded_NTE)
    lengths = to_device(lengths, device)
    best = ctc_alignment(
        log_probs_NTV,
        lengths,
        to_device(targets_NU, device),
        to_device(counts_N, device),
        blank=BLANK,
    )
    counts = [len(text) for text in texts]
    return Pending(
        [best.frames_NU, best.log_probs_NU, best.score_N, _first_frames(log_probs_NTV, lengths)],
        lambda found: _paths(counts, *found),
    )


def _first_frames(log_probs_NTV: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T): the symbol that begins in each frame of the best path, or blank."""
    best_NT = log_probs_NTV.argmax(dim=2)
    frames_T = torch.arange(best_NT.size(1), device=best_NT.device)
    begins_NT = frames_T < lengths_N[:, None]
    begins_NT[:, 1:] &= best_NT[:, 1:] != best_NT[:, :-1]
    return best_NT.masked_fill(~begins_NT, BLANK)


def _paths(
    counts: Sequence[int],
    frames_NU: Tensor,
    log_probs_NU: Tensor,
    score_N: Tensor,
    first_NT: Tensor,
) -> list[HeadPath | None]:
    """The paths of utterances with these numbers of symbols."""
    frames, log_probs = frames_NU.tolist(), log_probs_NU.tolist()
    has_path = (score_N > -torch.inf).tolist()
    paths: list[HeadPath | None] = []
    for n, count in enumerate(counts):
        spikes_K = (first_NT[n] != BLANK).nonzero()[:, 0]
        spikes = Spikes(tuple(first_NT[n, spikes_K].tolist()), tuple(spikes_K.tolist()))
        path = HeadPath(tuple(frames[n][:count]), tuple(log_probs[n][:count]), spikes)
        paths.append(path if has_path[n] else None)
    return paths
