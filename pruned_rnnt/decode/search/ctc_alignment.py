"""The most probable CTC path through a known sequence of symbols.

Axes: N batch, T encoder frames, U symbols, V vocabulary, S = 2 U + 1 states: a blank before,
between and after the symbols.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    labels_NS = torch.full((batch, 2 * symbols + 1), blank, device=device)
    labels_NS[:, 1::2] = targets_NU
    # A path may leave out the blank between two different symbols.
    skips_NS = labels_NS != blank
    skips_NS[:, :2] = False
    skips_NS[:, 2:] &= labels_NS[:, 2:] != labels_NS[:, :-2]
    score_NS = torch.full(labels_NS.shape, -torch.inf, dtype=torch.float64, device=device)
    score_NS[:, 0] = 0.0
    steps: list[Tensor] = []
    for t in range(log_probs_NTV.size(1)):
        choices_3NS = torch.stack(
            (
                score_NS,
                _shifted(score_NS, 1),
                _shifted(score_NS, 2).masked_fill(~skips_NS, -torch.inf),
            )
        )
        best_NS, step_NS = choices_3NS.max(dim=0)
        grown_NS = best_NS + log_probs_NTV[:, t].gather(1, labels_NS)
        alive_N1 = (t < lengths_N)[:, None]
        score_NS = torch.where(alive_N1, grown_NS, score_NS)
        steps.append(torch.where(alive_N1, step_NS, 0).to(torch.uint8))
    ends_N2 = (2 * target_lengths_N.long())[:, None] - torch.arange(2, device=device)
    end_scores_N2 = score_NS.gather(1, ends_N2.clamp(min=0)).masked_fill(ends_N2 < 0, -torch.inf)
    score_N, last_N = end_scores_N2.max(dim=1)
    state_N1 = ends_N2.gather(1, last_N[:, None]).clamp(min=0)
    frames_NS = torch.zeros(labels_NS.shape, dtype=torch.int64, device=device)
    for t in range(len(steps) - 1, -1, -1):
        # The last frame written to a state is its first one.
        alive_N1 = (t < lengths_N)[:, None]
        before_N1 = frames_NS.gather(1, state_N1)
        frames_NS.scatter_(1, state_N1, torch.where(alive_N1, t, before_N1))
        state_N1 = state_N1 - steps[t].gather(1, state_N1)
    frames_NU = frames_NS[:, 1::2]
    if not steps:
        empty_N = torch.where(target_lengths_N > 0, -torch.inf, 0.0)
        return CtcAlignment(frames_NU, torch.zeros_like(frames_NU).double(), empty_N)
    log_probs_NU = log_probs_NTV[torch.arange(batch, device=device)[:, None], frames_NU, targets_NU]
    return CtcAlignment(frames_NU, log_probs_NU, score_N)


def _shifted(score_NS: Tensor, states: int) -> Tensor:
    """Scores moved by `states` positions: each state gets that of an earlier state."""
    return torch.nn.functional.pad(score_NS, (states, 0), value=-torch.inf)[:, : score_NS.size(1)]
