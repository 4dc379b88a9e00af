"""The best path through the lattice of a model's own joiner, in bounded memory.

Axes: N batch, T encoder frames, E encoder width, P predictor width, D joiner width, U symbols,
V vocabulary.

The joiner's logits (N, T, U + 1, V) are computed for a few frames at a time. Only the
log-probabilities of the next symbol and of blank are kept for each node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.diagnostics import LogProbRows, log_prob_rows, viterbi_alignment
from pruned_rnnt.model.transducer_model import BLANK, TransducerModel

# Logits in memory at a time: 128 MB of float32.
_MAX_LOGITS = 2**25
# Lattice nodes in one search, which needs about 40 bytes per node.
_MAX_NODES = 2**23


class TargetBatch(NamedTuple):
    """Encoder output and targets of a batch.

    encoded_NTE: (N, T, E) output of `model.encode`; lengths: (N,) integer, its frames.
    targets_NU: (N, U) integer symbols; target_lengths: (N,) integer.
    """

    encoded_NTE: Tensor
    lengths: Tensor
    targets_NU: Tensor
    target_lengths: Tensor


class SymbolAlignment(NamedTuple):
    """The best path of one utterance.

    frames: encoder frame in which each symbol is emitted, never decreasing.
    log_probs: log-probability of each symbol in that frame.
    score: log-probability of the whole path.
    """

    frames: tuple[int, ...]
    log_probs: tuple[float, ...]
    score: float


@torch.inference_mode()
def align_symbols(model: TransducerModel, batch: TargetBatch) -> list[SymbolAlignment | None]:
    """The most probable path of each utterance through its targets; None if there is no path.

    The paths are those of the topology that the model was trained with. All but 'regular' emit at
    most one symbol per frame, so that more symbols than frames have no path.
    """
    nodes = batch.encoded_NTE.size(1) * (batch.targets_NU.size(1) + 1)
    utterances = max(1, _MAX_NODES // max(1, nodes))
    parts = zip(*(tensor.split(utterances) for tensor in batch), strict=True)
    return [path for part in parts for path in _align(model, TargetBatch(*part))]


def _align(model: TransducerModel, batch: TargetBatch) -> list[SymbolAlignment | None]:
    symbol_counts = batch.target_lengths.tolist()
    # The part may be shorter than the whole batch, whose padding is cut off.
    batch = batch._replace(
        encoded_NTE=batch.encoded_NTE[:, : max(1, int(batch.lengths.max()))],
        targets_NU=batch.targets_NU[:, : max(symbol_counts)],
    )
    rows = lattice_rows(model, batch)
    best = viterbi_alignment(
        rows.emit,
        rows.blank,
        batch.lengths.clamp(min=1),
        batch.target_lengths,
        rnnt_type=model.loss_config.rnnt_type,
    )
    frames_NU = best.frames.long()
    emitted_NU = rows.emit[:, :, :-1].gather(1, frames_NU.clamp(min=0)[:, None])[:, 0]
    has_frames_N = batch.lengths.to(best.score.device) > 0
    has_path = ((best.score > -torch.inf) & has_frames_N).tolist()
    frames, log_probs, scores = frames_NU.tolist(), emitted_NU.tolist(), best.score.tolist()
    return [
        SymbolAlignment(tuple(frames[n][:count]), tuple(log_probs[n][:count]), scores[n])
        if has_path[n]
        else None
        for n, count in enumerate(symbol_counts)
    ]


@torch.inference_mode()
def lattice_rows(model: TransducerModel, batch: TargetBatch) -> LogProbRows:
    """(N, T, U + 1) log-probabilities of the next symbol and of blank in every node."""
    am_NTD = model.joiner.encoder_proj(batch.encoded_NTE)
    lm_NUD = model.joiner.decoder_proj(model.predictor.forward_targets(batch.targets_NU))
    frames = max(1, _MAX_LOGITS // (lm_NUD.size(0) * lm_NUD.size(1) * model.vocab_size))
    chunks = []
    for begin in range(0, am_NTD.size(1), frames):
        am_NTUD = am_NTD[:, begin : begin + frames, None]
        chunks.append(
            log_prob_rows(
                model.joiner(am_NTUD, lm_NUD[:, None]),
                batch.targets_NU,
                (batch.lengths - begin).clamp(0, am_NTUD.size(1)),
                batch.target_lengths,
                blank=BLANK,
                hat=model.loss_config.hat,
            )
        )
    return LogProbRows(
        torch.cat([chunk.emit for chunk in chunks], dim=1),
        torch.cat([chunk.blank for chunk in chunks], dim=1),
    )
