"""The best path through the lattice of a model's own joiner, in bounded memory.

Axes: N batch, T encoder frames, E encoder width, P predictor width, D joiner width, U symbols,
V vocabulary.

The joiner's logits (N, T, U + 1, V) exist for a few frames at a time; of each node only the
log-probabilities of its symbol and of blank are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.diagnostics import LogProbRows, log_prob_rows, viterbi_alignment
from pruned_rnnt.model.transducer_model import BLANK, TransducerModel

# Logits held at once: 128 MB of float32.
_LOGITS = 2**25
# Lattice nodes searched at once; the search takes about 40 bytes a node.
_NODES = 2**23


class SymbolAlignment(NamedTuple):
    """The best path of one utterance.

    frames: encoder frame in which each symbol is emitted, never decreasing.
    log_probs: log-probability of each emission where it happened.
    score: log-probability of the whole path.
    """

    frames: tuple[int, ...]
    log_probs: tuple[float, ...]
    score: float


@torch.inference_mode()
def align_symbols(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    targets_NU: Tensor,
    target_lengths: Tensor,
) -> list[SymbolAlignment | None]:
    """The most probable way in which the model emits the targets; None where there is no way.

    The paths are those of the topology that the model was trained with: all but 'regular' emit
    one symbol a frame at most, so that more symbols than frames have no path.

    Args:
        encoded_NTE: (N, T, E) output of `model.encode`; lengths: (N,) its frames.
        targets_NU: (N, U) integer symbols; target_lengths: (N,).
    """
    found: list[SymbolAlignment | None] = []
    nodes = encoded_NTE.size(1) * (targets_NU.size(1) + 1)
    part = max(1, _NODES // max(1, nodes))
    for begin in range(0, encoded_NTE.size(0), part):
        some = slice(begin, begin + part)
        found += _align(
            model, encoded_NTE[some], lengths[some], targets_NU[some], target_lengths[some]
        )
    return found


def _align(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    targets_NU: Tensor,
    target_lengths: Tensor,
) -> list[SymbolAlignment | None]:
    symbol_counts = target_lengths.tolist()
    # Padding of the whole batch is none of this part's business.
    encoded_NTE = encoded_NTE[:, : max(1, int(lengths.max()))]
    targets_NU = targets_NU[:, : max(symbol_counts)]
    rows = lattice_rows(model, encoded_NTE, lengths, targets_NU, target_lengths)
    frames_N = lengths.clamp(min=1)
    best = viterbi_alignment(
        rows.emit, rows.blank, frames_N, target_lengths, rnnt_type=model.loss_config.rnnt_type
    )
    frames_NU = best.frames.long()
    emitted_NU = rows.emit[:, :, :-1].gather(1, frames_NU.clamp(min=0)[:, None])[:, 0]
    reached = ((best.score > -torch.inf) & (lengths.to(best.score.device) > 0)).tolist()
    frames, log_probs, scores = frames_NU.tolist(), emitted_NU.tolist(), best.score.tolist()
    return [
        SymbolAlignment(tuple(frames[n][:count]), tuple(log_probs[n][:count]), scores[n])
        if reached[n]
        else None
        for n, count in enumerate(symbol_counts)
    ]


@torch.inference_mode()
def lattice_rows(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    targets_NU: Tensor,
    target_lengths: Tensor,
) -> LogProbRows:
    """(N, T, U + 1) log-probabilities of the next symbol and of blank; arguments as above."""
    frame_count = encoded_NTE.size(1)
    am_NTD = model.joiner.encoder_proj(encoded_NTE)
    lm_NUD = model.joiner.decoder_proj(model.predictor.forward_targets(targets_NU))
    step = max(1, _LOGITS // (lm_NUD.size(0) * lm_NUD.size(1) * model.vocab_size))
    chunks = []
    for begin in range(0, frame_count, step):
        am = am_NTD[:, begin : begin + step, None]
        chunks.append(
            log_prob_rows(
                model.joiner(am, lm_NUD[:, None]),
                targets_NU,
                (lengths - begin).clamp(0, am.size(1)),
                target_lengths,
                blank=BLANK,
                hat=model.loss_config.hat,
            )
        )
    return LogProbRows(
        torch.cat([chunk.emit for chunk in chunks], dim=1),
        torch.cat([chunk.blank for chunk in chunks], dim=1),
    )
