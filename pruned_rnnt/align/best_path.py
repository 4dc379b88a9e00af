"""The best path through the lattice of a model's own joiner, or of its CTC head without a joiner.

Axes: N batch, T encoder frames, E encoder width, P predictor width, D joiner width, U symbols,
V vocabulary.

The memory is bounded: the joiner's logits (N, T, U + 1, V) are computed for a few frames at a time.
Only the log-probabilities of the next symbol and of blank are kept for each node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.ctc_alignment import ctc_alignment
from pruned_rnnt.diagnostics import (
    Alignment,
    LogProbRows,
    TdtAlignment,
    TdtLogProbRows,
    log_prob_rows,
    tdt_log_prob_rows,
    tdt_viterbi_alignment,
    viterbi_alignment,
)
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.speech_model import (
    BLANK,
    CtcModel,
    SpeechModel,
    TransducerModel,
    ctc_log_probs,
)

# Values of one layer of the joiner in memory at a time: 128 MB of float32.
_MAX_LOGITS = 2**25
# Lattice nodes in one search, which needs about 40 bytes per node.
_MAX_NODES = 2**23
# Memory of the search of one utterance.
_MOST_BYTES = 8 * 10**9


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
    durations: frames by which each symbol advances; empty for models without durations.
    """

    frames: tuple[int, ...]
    log_probs: tuple[float, ...]
    score: float
    durations: tuple[int, ...] = ()


def too_long(model: SpeechModel, frames: int, symbols: int) -> str:
    """Why the search of one utterance would take too much memory; empty if it would not."""
    durations = len(model.loss_config.durations)
    # Measured. CTC stores one byte for each of its two states by symbol.
    node_bytes = 2 if isinstance(model, CtcModel) else 40 + 7 * durations
    if frames * (symbols + 1) * node_bytes <= _MOST_BYTES:
        return ""
    return (
        f"{frames} frames and {symbols} symbols are too many for one search in memory: split the "
        "audio and its text"
    )


@torch.inference_mode()
def align_symbols(model: SpeechModel, batch: TargetBatch) -> list[SymbolAlignment | None]:
    """The most probable path of each utterance through its targets; None if there is no path, and
    for utterances that are `too_long`.

    The paths of a transducer are those of the topology that it was trained with. All but 'regular'
    emit at most one symbol per frame, so that more symbols than frames have no path. A model
    without a joiner has the paths of CTC, in which equal neighbours also need a blank between them.
    """
    nodes = batch.encoded_NTE.size(1) * (batch.targets_NU.size(1) + 1)
    nodes *= 1 + len(model.loss_config.durations)
    utterances = max(1, _MAX_NODES // max(1, nodes))
    parts = zip(*(tensor.split(utterances) for tensor in batch), strict=True)
    return [path for part in parts for path in _align_part(model, TargetBatch(*part))]


def _align_part(model: SpeechModel, batch: TargetBatch) -> list[SymbolAlignment | None]:
    batch = _without_padding(batch)
    # Only a part of one utterance can be.
    if too_long(model, batch.encoded_NTE.size(1), batch.targets_NU.size(1)):
        return [None]
    return _align_ctc(model, batch) if isinstance(model, CtcModel) else _align(model, batch)


def _without_padding(batch: TargetBatch) -> TargetBatch:
    """Trim the padding: a part of a batch may be shorter than the whole batch."""
    return batch._replace(
        encoded_NTE=batch.encoded_NTE[:, : max(1, int(batch.lengths.max()))],
        targets_NU=batch.targets_NU[:, : int(batch.target_lengths.max())],
    )


def _align_ctc(model: SpeechModel, batch: TargetBatch) -> list[SymbolAlignment | None]:
    log_probs_NTV = ctc_log_probs(model, batch.encoded_NTE)
    device = log_probs_NTV.device
    lengths, target_lengths = batch.lengths.to(device), batch.target_lengths.to(device)
    best = ctc_alignment(log_probs_NTV, lengths, batch.targets_NU, target_lengths, blank=BLANK)
    has_path = ((best.score_N > -torch.inf) & (lengths > 0)).tolist()
    return _results(has_path, best.frames_NU, best.log_probs_NU, best.score_N, batch.target_lengths)


def _align(model: SpeechModel, batch: TargetBatch) -> list[SymbolAlignment | None]:
    model = as_transducer(model, "alignment by the joiner")
    rows = lattice_rows(model, batch)
    lengths = batch.lengths, batch.target_lengths
    best: Alignment | TdtAlignment
    if isinstance(rows, TdtLogProbRows):
        durations = model.loss_config.durations
        best = tdt_viterbi_alignment(rows, *lengths, durations=durations)
    else:
        rnnt_type = model.loss_config.rnnt_type
        best = viterbi_alignment(rows.emit, rows.blank, *lengths, rnnt_type=rnnt_type)
    frames_NU = best.frames.long()
    frames_N1U = frames_NU.clamp(min=0)[:, None]
    emitted_NU = rows.emit[:, :, :-1].gather(1, frames_N1U)[:, 0]
    has_path = (best.score > -torch.inf).tolist()
    results = _results(has_path, frames_NU, emitted_NU, best.score, batch.target_lengths)
    if not isinstance(best, TdtAlignment):
        return results
    return [
        path and path._replace(durations=tuple(taken[: len(path.frames)]))
        for path, taken in zip(results, best.durations.tolist(), strict=True)
    ]


def _results(
    has_path: list[bool],
    frames_NU: Tensor,
    log_probs_NU: Tensor,
    score_N: Tensor,
    target_lengths: Tensor,
) -> list[SymbolAlignment | None]:
    frames, log_probs, scores = frames_NU.tolist(), log_probs_NU.tolist(), score_N.tolist()
    return [
        SymbolAlignment(tuple(frames[n][:count]), tuple(log_probs[n][:count]), scores[n])
        if has_path[n]
        else None
        for n, count in enumerate(target_lengths.tolist())
    ]


@torch.inference_mode()
def lattice_rows(model: TransducerModel, batch: TargetBatch) -> LogProbRows | TdtLogProbRows:
    """(N, T, U + 1) log-probabilities of the next symbol and of blank in every node, and of the
    durations, if the model has any."""
    am_NTD = model.joiner.encoder_proj(batch.encoded_NTE)
    lm_NUD = model.joiner.decoder_proj(model.predictor.forward_targets(batch.targets_NU))
    # The joiner also makes hidden values, which are more for a small vocabulary.
    width = max(model.vocab_size, am_NTD.size(2))
    frames = max(1, _MAX_LOGITS // (lm_NUD.size(0) * lm_NUD.size(1) * width))
    has_durations = bool(model.loss_config.durations)
    chunks: list[LogProbRows | TdtLogProbRows] = []
    for begin in range(0, am_NTD.size(1), frames):
        am_NTUD = am_NTD[:, begin : begin + frames, None]
        inputs = am_NTUD, lm_NUD[:, None]
        lengths = (batch.lengths - begin).clamp(0, am_NTUD.size(1)), batch.target_lengths
        if has_durations:
            logits = model.joiner.with_durations(*inputs)
            chunks.append(tdt_log_prob_rows(*logits, batch.targets_NU, *lengths, blank=BLANK))
        else:
            hat = model.loss_config.hat
            rows = log_prob_rows(
                model.joiner(*inputs), batch.targets_NU, *lengths, blank=BLANK, hat=hat
            )
            chunks.append(rows)
    joined = (torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    return TdtLogProbRows(*joined) if has_durations else LogProbRows(*joined)
