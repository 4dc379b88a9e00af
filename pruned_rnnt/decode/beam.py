"""Modified beam search: at most one symbol a frame, equal sequences merged; all on the device.

Axes: N batch, T encoder frames, E encoder width, D joiner width, B beam, C context size,
V vocabulary.

A hypothesis is a row of the beam: its log-probability, its last C symbols, and a 64-bit hash of
the whole sequence which tells equal sequences apart from different ones. The sequences themselves
are read from back pointers once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruned_rnnt.decode.hypothesis import Hypothesis, joint_log_probs
from pruned_rnnt.model.transducer import TransducerModel

# Odd, so that multiplying by it modulo 2**64 loses nothing; the usual 64-bit LCG multiplier.
_HASH_MULTIPLIER = 6364136223846793005


@dataclass(frozen=True)
class _Beam:
    """score_NB, hash_NB, context_NBC as in the module's text; length_NB counts symbols."""

    score_NB: Tensor
    hash_NB: Tensor
    length_NB: Tensor
    context_NBC: Tensor


@torch.inference_mode()
def modified_beam_search(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    *,
    beam_size: int = 4,
    num_best: int = 1,
    length_norm: bool = True,
    silent_symbols: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """The best sequences of each utterance, best first.

    The score of a hypothesis is the log-probability of all its paths which stayed in the beam.

    Args:
        encoded_NTE: (N, T, E) output of `model.encode`.
        lengths: (N,) integer encoder frames.
        beam_size: hypotheses kept after each frame.
        num_best: hypotheses returned at most; fewer when fewer have a path.
        length_norm: order by score / (symbols + C) instead of by score, C being the context size
            of the predictor; the scores returned are never divided.
        silent_symbols: ids which are never emitted (such as `<unk>`).

    Raises:
        ValueError: beam_size or num_best below 1, num_best above beam_size.
    """
    if beam_size < 1 or not 1 <= num_best <= beam_size:
        raise ValueError(
            f"beam_size is {beam_size} and num_best is {num_best}, need 1 <= num_best <= beam_size"
        )
    num_frames = encoded_NTE.size(1)
    lengths = lengths.to(encoded_NTE.device)
    am_NTD = model.joiner.encoder_proj(encoded_NTE)
    beam = _start(model, encoded_NTE, beam_size)
    parents, symbols = [], []
    for t in range(num_frames):
        log_probs_NBV = _log_probs(model, am_NTD[:, t], beam.context_NBC, silent_symbols)
        grown, parent_NB, symbol_NB = _grow(beam, log_probs_NBV, model.predictor.blank)
        alive_N1 = (t < lengths)[:, None]
        stay_NB = torch.arange(beam_size, device=parent_NB.device).expand_as(parent_NB)
        parents.append(torch.where(alive_N1, parent_NB, stay_NB))
        symbols.append(torch.where(alive_N1, symbol_NB, -1))
        beam = _Beam(
            torch.where(alive_N1, grown.score_NB, beam.score_NB),
            torch.where(alive_N1, grown.hash_NB, beam.hash_NB),
            torch.where(alive_N1, grown.length_NB, beam.length_NB),
            torch.where(alive_N1.unsqueeze(-1), grown.context_NBC, beam.context_NBC),
        )
    rank_NB = beam.score_NB
    if length_norm:
        rank_NB = rank_NB / (beam.length_NB + model.predictor.context_size)
    order_NB = rank_NB.argsort(dim=1, descending=True, stable=True)
    return _trace(order_NB[:, :num_best], beam.score_NB, parents, symbols)


def _start(model: TransducerModel, encoded_NTE: Tensor, beam_size: int) -> _Beam:
    """One empty hypothesis an utterance; the other rows have no probability."""
    batch_size, device = encoded_NTE.size(0), encoded_NTE.device
    score_NB = torch.full((batch_size, beam_size), float("-inf"), device=device)
    score_NB[:, 0] = 0.0
    zeros_NB = torch.zeros((batch_size, beam_size), dtype=torch.int64, device=device)
    context_NC = model.predictor.start_context(batch_size, device)
    return _Beam(
        score_NB, zeros_NB, zeros_NB, context_NC[:, None].repeat(1, beam_size, 1).contiguous()
    )


def _log_probs(
    model: TransducerModel, am_ND: Tensor, context_NBC: Tensor, silent_symbols: Sequence[int]
) -> Tensor:
    """(N, B, V) log-probabilities of the next symbol of every hypothesis."""
    batch_size, beam_size, _ = context_NBC.shape
    predicted = model.predictor(context_NBC.flatten(0, 1))[:, 0]
    lm_NBD = model.joiner.decoder_proj(predicted).unflatten(0, (batch_size, beam_size))
    logits_NBV = model.joiner(am_ND[:, None].expand_as(lm_NBD), lm_NBD)
    log_probs_NBV = joint_log_probs(logits_NBV, model.predictor.blank, model.loss_config.hat)
    if silent_symbols:
        log_probs_NBV[..., list(silent_symbols)] = float("-inf")
    return log_probs_NBV


def _grow(beam: _Beam, log_probs_NBV: Tensor, blank: int) -> tuple[_Beam, Tensor, Tensor]:
    """The best B of all hypotheses grown by blank or a symbol, with parents and symbols (-1)."""
    _, beam_size, vocab_size = log_probs_NBV.shape
    candidates = (beam.score_NB.unsqueeze(-1) + log_probs_NBV).flatten(1)
    score_NB, index_NB = candidates.topk(beam_size, dim=1)
    parent_NB, symbol_NB = index_NB // vocab_size, index_NB % vocab_size
    emits_NB = symbol_NB != blank
    hash_NB = beam.hash_NB.gather(1, parent_NB)
    hash_NB = torch.where(emits_NB, hash_NB * _HASH_MULTIPLIER + symbol_NB + 1, hash_NB)
    context_NBC = beam.context_NBC.gather(1, parent_NB.unsqueeze(-1).expand_as(beam.context_NBC))
    grown_NBC = torch.cat((context_NBC[..., 1:], symbol_NB.unsqueeze(-1)), dim=-1)
    grown = _Beam(
        _merge_equal(score_NB, hash_NB),
        hash_NB,
        beam.length_NB.gather(1, parent_NB) + emits_NB,
        torch.where(emits_NB.unsqueeze(-1), grown_NBC, context_NBC),
    )
    return grown, parent_NB, torch.where(emits_NB, symbol_NB, -1)


def _merge_equal(score_NB: Tensor, hash_NB: Tensor) -> Tensor:
    """Give the first of equal sequences the sum of their probabilities, the others none."""
    equal_NBB = hash_NB.unsqueeze(2) == hash_NB.unsqueeze(1)
    spread_NBB = score_NB.unsqueeze(1).masked_fill(~equal_NBB, float("-inf"))
    first_NB = equal_NBB.int().argmax(dim=2) == torch.arange(
        score_NB.size(1), device=score_NB.device
    )
    return spread_NBB.logsumexp(dim=2).masked_fill(~first_NB, float("-inf"))


def _trace(
    kept_NK: Tensor, score_NB: Tensor, parents: list[Tensor], symbols: list[Tensor]
) -> list[list[Hypothesis]]:
    """Read the kept rows of the last beam back to the first frame."""
    kept, scores = kept_NK.tolist(), score_NB.tolist()
    parents_TNB = [table.tolist() for table in parents]
    symbols_TNB = [table.tolist() for table in symbols]
    results = []
    for n, rows in enumerate(kept):
        hypotheses = []
        for last_row in rows:
            score = scores[n][last_row]
            if score == float("-inf"):
                continue
            row, emitted = last_row, []
            for t in reversed(range(len(parents))):
                if symbols_TNB[t][n][row] >= 0:
                    emitted.append((symbols_TNB[t][n][row], t))
                row = parents_TNB[t][n][row]
            emitted.reverse()
            hypotheses.append(
                Hypothesis(
                    symbols=tuple(symbol for symbol, _ in emitted),
                    frames=tuple(frame for _, frame in emitted),
                    score=score,
                )
            )
        results.append(hypotheses)
    return results
