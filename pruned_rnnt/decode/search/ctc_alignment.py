"""The most probable CTC path through a known sequence of symbols.

Axes: N batch, T encoder frames, U symbols, V vocabulary, S = 2 U + 1 states: a blank before,
between and after the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.decode.search.interface import Pending
from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.system.device import to_device

_Forward = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_FirstFrames = Callable[[Tensor, Tensor, Tensor], Tensor]
# Frames whose log-probabilities are gathered at once on the CPU.
_GATHERED = 256


class CtcAlignment(NamedTuple):
    """The best path of each utterance.

    frames_NU: int64, the first frame of each symbol; undefined beyond the targets and without path.
    log_probs_NU: log-probability of the symbol in that frame.
    score_N: log-probability of the whole path; -inf if there is none.
    """

    frames_NU: Tensor
    log_probs_NU: Tensor
    score_N: Tensor


def ctc_alignment(
    log_probs_NTV: Tensor,
    lengths_N: Tensor,
    targets_NU: Tensor,
    target_lengths_N: Tensor,
    *,
    blank: int = 0,
) -> CtcAlignment:
    """Viterbi's algorithm for all utterances at once; the host does not wait for the device.

    Args:
        log_probs_NTV: (N, T, V).
        lengths_N, target_lengths_N: (N,) integers on its device.
        targets_NU: (N, U) integers; padding may have any values in 0..V-1.
    """
    device = log_probs_NTV.device
    targets_NU = targets_NU.long()
    batch, symbols = targets_NU.shape
    frames = log_probs_NTV.size(1)
    if frames == 0:
        empty_N = torch.where(target_lengths_N > 0, -torch.inf, 0.0)
        frames_NU = torch.zeros_like(targets_NU)
        return CtcAlignment(frames_NU, torch.zeros_like(frames_NU).double(), empty_N)
    labels_NS = torch.full((batch, 2 * symbols + 1), blank, device=device)
    labels_NS[:, 1::2] = targets_NU
    # A path may leave out the blank between two different symbols.
    skips_NS = labels_NS != blank
    skips_NS[:, :2] = False
    skips_NS[:, 2:] &= labels_NS[:, 2:] != labels_NS[:, :-2]
    ends_N2 = (2 * target_lengths_N.long())[:, None] - torch.arange(2, device=device)
    with torch.cuda.device_of(log_probs_NTV):  # fused kernels run on the current device
        forward, first_frames = _functions(log_probs_NTV)
        steps_NTS, score_NS = forward(log_probs_NTV, lengths_N, labels_NS, skips_NS)
        end_scores_N2 = score_NS.gather(1, ends_N2.clamp(min=0))
        score_N, last_N = end_scores_N2.masked_fill(ends_N2 < 0, -torch.inf).max(dim=1)
        state_N = ends_N2.gather(1, last_N[:, None])[:, 0].clamp(min=0)
        first_NS = first_frames(steps_NTS, lengths_N, state_N)
    frames_NU = torch.where(first_NS < frames, first_NS, 0)[:, 1::2]
    log_probs_NU = log_probs_NTV[torch.arange(batch, device=device)[:, None], frames_NU, targets_NU]
    return CtcAlignment(frames_NU, log_probs_NU, score_N)


def text_alignment(
    log_probs_NTV: Tensor, lengths_N: Tensor, texts: Sequence[Sequence[int]], *, blank: int = 0
) -> CtcAlignment:
    """`ctc_alignment` of N texts, given as ids without blanks."""
    longest = max(map(len, texts), default=0) or 1
    padded = [[*text, *[blank] * (longest - len(text))] for text in texts]
    targets_NU = torch.tensor(padded, dtype=torch.int64).view(len(texts), longest)
    counts_N = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    device = log_probs_NTV.device
    targets_NU, counts_N = to_device(targets_NU, device), to_device(counts_N, device)
    return ctc_alignment(log_probs_NTV, lengths_N, targets_NU, counts_N, blank=blank)


def launch_alignments(
    log_probs_NTV: Tensor,
    lengths_N: Tensor,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    blank: int = 0,
) -> Pending[list[CtcAlignment]]:
    """`text_alignment` for each rank, on the CPU in the end, without waiting for the device.

    Args:
        ranks: for each rank, the texts of the N utterances.
    """
    tensors: list[Tensor] = []
    # One rank after the other: all at once would need a copy of the log-probabilities for each.
    for texts in ranks:
        tensors += text_alignment(log_probs_NTV, lengths_N, texts, blank=blank)
    width = len(CtcAlignment._fields)
    return Pending(
        tensors,
        lambda found: [
            CtcAlignment(*found[first : first + width]) for first in range(0, len(found), width)
        ],
    )


def _functions(log_probs_NTV: Tensor) -> tuple[_Forward, _FirstFrames]:
    """The functions for a device: kernels, or plain torch or numpy."""
    if use_kernels(log_probs_NTV):
        from pruned_rnnt.decode.search import ctc_alignment_kernels as kernels

        return kernels.forward, kernels.first_frames
    return _forward_on_cpu if log_probs_NTV.device.type == "cpu" else _forward, _first_frames


def _first_frames(steps_NTS: Tensor, lengths_N: Tensor, last_N: Tensor) -> Tensor:
    """The first frame of each state (N, S) on the paths that end in the states last_N, or T.

    steps_NTS: see `_forward`, 0 beyond the (N,) lengths.
    """
    batch, frames, states = steps_NTS.shape
    path = [last_N[:, None]]
    for t in range(frames - 1, 0, -1):
        path.append(path[-1] - steps_NTS[:, t].gather(1, path[-1]))
    path_NT = torch.cat(path[::-1], dim=1)
    frame_NT = torch.arange(frames, device=steps_NTS.device).expand(batch, -1)
    # Frames beyond the end, in which the path stays, are later than the first one of a state.
    first_NS = torch.full((batch, states), frames, device=steps_NTS.device)
    return first_NS.scatter_reduce(1, path_NT, frame_NT, "amin")


def _forward(
    log_probs_NTV: Tensor, lengths_N: Tensor, labels_NS: Tensor, skips_NS: Tensor
) -> tuple[Tensor, Tensor]:
    """How many states back the best path to each state comes from, (N, T, S), and its score (N, S).

    Beyond the end of an utterance, paths stay where they are.
    """
    # In reverse order, so that the three states before each one are a view: of equal scores, that
    # of the nearest state is taken.
    labels_NS = labels_NS.flip(1)
    bias_NS3 = torch.zeros((*labels_NS.shape, 3), dtype=torch.float64, device=labels_NS.device)
    bias_NS3[..., 2].masked_fill_(~skips_NS.flip(1), -torch.inf)
    score_NS = torch.full(labels_NS.shape, -torch.inf, dtype=torch.float64, device=labels_NS.device)
    score_NS[:, -1] = 0.0
    alive_NT1 = (torch.arange(log_probs_NTV.size(1), device=lengths_N.device) < lengths_N[:, None])[
        ..., None
    ]
    steps = []
    for t in range(log_probs_NTV.size(1)):
        before_NS3 = functional.pad(score_NS, (0, 2), value=-torch.inf).unfold(1, 3, 1)
        best_NS, step_NS = (before_NS3 + bias_NS3).max(dim=2)
        grown_NS = best_NS + log_probs_NTV[:, t].gather(1, labels_NS)
        score_NS = torch.where(alive_NT1[:, t], grown_NS, score_NS)
        steps.append(step_NS.to(torch.uint8))
    steps_NTS = torch.stack(steps, dim=1) * alive_NT1
    return steps_NTS.flip(2), score_NS.flip(1)


def _forward_on_cpu(
    log_probs_NTV: Tensor, lengths_N: Tensor, labels_NS: Tensor, skips_NS: Tensor
) -> tuple[Tensor, Tensor]:
    """As `_forward`, by numpy, whose calls take a fraction of the time of torch's."""
    bias_NS = np.where(skips_NS.numpy(), 0.0, -np.inf)
    (batch, states), frames = labels_NS.shape, log_probs_NTV.size(1)
    ends = lengths_N.tolist()
    all_alive = min(ends, default=0)
    # Two impossible states before the first one.
    padded_NS = np.full((batch, states + 2), -np.inf)
    padded_NS[:, 2] = 0.0
    score_NS, one_NS, two_NS = padded_NS[:, 2:], padded_NS[:, 1:-1], padded_NS[:, :-2]
    steps_TNS = np.zeros((frames, batch, states), dtype=np.uint8)
    for t in range(min(max(ends, default=0), frames)):
        if t % _GATHERED == 0:
            part_NTV = log_probs_NTV.detach()[:, t : t + _GATHERED].double()
            labels_NTS = labels_NS[:, None].expand(-1, part_NTV.size(1), -1)
            emit_TNS = part_NTV.gather(2, labels_NTS).transpose(0, 1).numpy()
        skipped_NS = two_NS + bias_NS
        best_NS = np.maximum(score_NS, one_NS)
        # Of equal scores, that of the nearest state is taken.
        step_NS = (one_NS > score_NS).astype(np.uint8)
        step_NS[skipped_NS > best_NS] = 2
        best_NS = np.maximum(best_NS, skipped_NS) + emit_TNS[t % _GATHERED]
        if t < all_alive:
            score_NS[:], steps_TNS[t] = best_NS, step_NS
        else:
            alive_N = np.array([t < end for end in ends])
            score_NS[alive_N], steps_TNS[t, alive_N] = best_NS[alive_N], step_NS[alive_N]
    return torch.from_numpy(steps_TNS).transpose(0, 1), torch.from_numpy(score_NS.copy())
