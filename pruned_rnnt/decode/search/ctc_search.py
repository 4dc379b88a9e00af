"""Searches of a CTC head: greedy, and prefix beam search (Hannun et al. 2014, arXiv 1408.2873),
batched and on the device.

Axes: N batch, T encoder frames, E encoder width, B beam, K best, V vocabulary; R = N * B rows.

In prefix beam search, a hypothesis is a sequence of symbols with the probability of all its paths,
divided into those that end in a blank (b) and those that end in its last symbol (s). In a frame
with log-probabilities p, a hypothesis of last symbol l

    stays:      b' = (b + s) p[blank]          s' = s p[l]
    grows by v: s' of the longer sequence = (b + s) p[v], or b p[v] if v = l

in probabilities. If the longer sequence is in the beam as well, its s' is the sum of both. So the
sequences of a beam are always distinct, and with a beam that holds all sequences the scores are
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pruned_rnnt.decode.search.back_pointers import pending_trace, stack_steps
from pruned_rnnt.decode.search.ctc_alignment import launch_alignments
from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, SearchByFrames
from pruned_rnnt.decode.search.interface import Hypothesis, check_beam, silent_mask
from pruned_rnnt.decode.search.states import (
    Rows,
    TokenScorer,
    add_final_scores,
    advance_scorers,
    take_rows,
)
from pruned_rnnt.model.speech_model import BLANK, SpeechModel, ctc_log_probs
from pruned_rnnt.ops.search.beam_rows import best_rows, hash_after
from pruned_rnnt.ops.search.search_frames import BeamSteps


def _check_ctc_head(model: SpeechModel) -> None:
    """Raise ValueError for a model without a CTC head."""
    if model.ctc_head is None:
        raise ValueError(
            "this search needs a CTC head, and the model was trained with loss.ctc_scale=0: use "
            "decode.method=greedy or modified_beam"
        )


class CtcGreedySearch(SearchByFrames):
    """The most probable path; a run of frames with one symbol emits it in its first frame.

    Args:
        model: in evaluation mode, with a CTC head.
        silent_symbols: ids that are treated as blank when they are the most probable (such as
            `<unk>`).

    Raises:
        ValueError: the model has no CTC head.
    """

    def __init__(self, model: SpeechModel, *, silent_symbols: Sequence[int] = ()) -> None:
        _check_ctc_head(model)
        self.model = model
        self._silent_V = silent_mask(model.vocab_size, silent_symbols)

    def start(self, streams: int, device: torch.device) -> Rows:
        """The state before the first frame: the symbol of the frame before, here blank."""
        return (torch.full((streams,), BLANK, device=device),)

    @torch.inference_mode()
    def frames(self, encoded_NTE: Tensor, lengths_N: Tensor, state: Rows) -> GreedyFrames:
        """Decode the next frames of streams; arguments as for `GreedySearch.frames`."""
        log_probs_NTV = ctc_log_probs(self.model, encoded_NTE)
        if self._silent_V.device != encoded_NTE.device:
            self._silent_V = self._silent_V.to(encoded_NTE.device)
        best_NT, symbol_NT = log_probs_NTV.max(dim=2)
        alive_NT = torch.arange(symbol_NT.size(1), device=symbol_NT.device) < lengths_N[:, None]
        symbol_NT = symbol_NT.masked_fill(self._silent_V[symbol_NT] | ~alive_NT, BLANK)
        before_NT = torch.cat((state[0][:, None], symbol_NT), dim=1)
        emits_NT = (symbol_NT != BLANK) & (symbol_NT != before_NT[:, :-1])
        return GreedyFrames(
            torch.where(emits_NT, symbol_NT, -1)[:, :, None],
            torch.where(alive_NT, best_NT, 0.0)[:, :, None],
            (before_NT[:, -1],),
        )


@dataclass(frozen=True)
class _Beam:
    """The hypotheses after some frames.

    blank_NB, symbol_NB: log-probabilities of the paths that end in a blank, and in the last symbol.
    fusion_NB: sum of the scorers' scores of the symbols.
    last_NB: last symbol, -1 for the empty sequence; hash_NB: see `hash_after`.
    scorers: state of each scorer, R rows.
    """

    blank_NB: Tensor
    symbol_NB: Tensor
    fusion_NB: Tensor
    last_NB: Tensor
    hash_NB: Tensor
    scorers: tuple[Rows, ...]

    @property
    def total_NB(self) -> Tensor:
        return self.blank_NB.logaddexp(self.symbol_NB)

    def where(self, alive_N1: Tensor, other: _Beam) -> _Beam:
        """This beam for utterances with frames left, and the other for those that have ended."""
        return _Beam(
            blank_NB=torch.where(alive_N1, self.blank_NB, other.blank_NB),
            symbol_NB=torch.where(alive_N1, self.symbol_NB, other.symbol_NB),
            fusion_NB=torch.where(alive_N1, self.fusion_NB, other.fusion_NB),
            last_NB=torch.where(alive_N1, self.last_NB, other.last_NB),
            hash_NB=torch.where(alive_N1, self.hash_NB, other.hash_NB),
            scorers=self.scorers,
        )


class CtcPrefixBeamSearch:
    """Finds the most probable sequences of each utterance, best first.

    The score of a hypothesis is the log-probability of its paths in the beam, plus the scores of
    its symbols from the scorers. Frames and scores of single symbols are those of its best path,
    without the scorers.

    Args:
        model: in evaluation mode, with a CTC head.
        beam_size: hypotheses kept after each frame.
        num_best: maximum number of hypotheses returned.
        silent_symbols: ids that are never emitted (such as `<unk>`).
        scorers: other scores of symbols (language models, hotwords).

    Raises:
        ValueError: the model has no CTC head; beam_size or num_best is below 1, or num_best is
            above beam_size.
    """

    def __init__(
        self,
        model: SpeechModel,
        *,
        beam_size: int = 4,
        num_best: int = 1,
        silent_symbols: Sequence[int] = (),
        scorers: Sequence[TokenScorer] = (),
    ) -> None:
        _check_ctc_head(model)
        check_beam(beam_size, num_best)
        self.model = model
        self.beam_size = beam_size
        self.num_best = num_best
        self.scorers = tuple(scorers)
        self._silent_V = silent_mask(model.vocab_size, silent_symbols)

    @torch.inference_mode()
    def __call__(self, encoded_NTE: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances.

        Args:
            encoded_NTE: (N, T, E) output of `model.encode`.
            lengths: (N,) integer encoder frames.
        """
        log_probs_NTV = ctc_log_probs(self.model, encoded_NTE)
        self._silent_V = self._silent_V.to(encoded_NTE.device)
        log_probs_NTV.masked_fill_(self._silent_V, -torch.inf)
        lengths_N = lengths.to(encoded_NTE.device)
        beam = self._start(len(encoded_NTE), encoded_NTE.device)
        steps: list[BeamSteps] = []
        for t in range(log_probs_NTV.size(1)):
            beam, step = self._grow(beam, log_probs_NTV[:, t], (lengths_N > t)[:, None])
            steps.append(step)
        score_NB = beam.total_NB + beam.fusion_NB
        score_NB = add_final_scores(score_NB, self.scorers, beam.scorers)
        stacked = stack_steps(steps, beam.hash_NB)
        found = pending_trace(*best_rows(score_NB, self.num_best), stacked)
        return _with_times(found.result(), log_probs_NTV, lengths_N)

    def _start(self, batch: int, device: torch.device) -> _Beam:
        """One empty hypothesis per utterance; the other rows have probability 0."""
        nothing_NB = torch.full((batch, self.beam_size), -torch.inf, device=device)
        blank_NB = nothing_NB.clone()
        blank_NB[:, 0] = 0.0
        zeros_NB = torch.zeros_like(nothing_NB, dtype=torch.int64)
        rows = batch * self.beam_size
        return _Beam(
            blank_NB,
            nothing_NB,
            torch.zeros_like(nothing_NB),
            zeros_NB - 1,
            zeros_NB,
            tuple(scorer.start(rows, device) for scorer in self.scorers),
        )

    def _grow(self, beam: _Beam, log_probs_NV: Tensor, alive_N1: Tensor) -> tuple[_Beam, BeamSteps]:
        """Keep or extend each hypothesis, and keep the best B; ended utterances do not change."""
        vocab_size = log_probs_NV.size(1)
        stay_blank_NB = beam.total_NB + log_probs_NV[:, BLANK, None]
        stay_symbol_NB, longer_NBV = _extended(beam, log_probs_NV)
        stay_NB = stay_blank_NB.logaddexp(stay_symbol_NB) + beam.fusion_NB
        fusion_NBV = torch.zeros_like(longer_NBV)
        for scorer, rows in zip(self.scorers, beam.scorers, strict=True):
            fusion_NBV += scorer.scores(rows).view_as(fusion_NBV)
        grown_NBV = longer_NBV + fusion_NBV + beam.fusion_NB[:, :, None]
        candidates = torch.cat((stay_NB, grown_NBV.flatten(1)), dim=1)
        _, index_NB = candidates.topk(self.beam_size, dim=1)
        stays_NB = index_NB < self.beam_size
        place_NB = (index_NB - self.beam_size).clamp(min=0)
        parent_NB = torch.where(stays_NB, index_NB, place_NB // vocab_size)
        symbol_NB = place_NB % vocab_size
        unmoved_NB = torch.arange(self.beam_size, device=parent_NB.device).expand_as(parent_NB)
        step = BeamSteps(
            torch.where(alive_N1, parent_NB, unmoved_NB),
            torch.where(stays_NB | ~alive_N1, -1, symbol_NB),
            torch.zeros_like(stay_NB),
        )
        grown = _Beam(
            blank_NB=stay_blank_NB.gather(1, parent_NB).masked_fill(~stays_NB, -torch.inf),
            symbol_NB=torch.where(
                stays_NB,
                stay_symbol_NB.gather(1, parent_NB),
                longer_NBV.flatten(1).gather(1, place_NB),
            ),
            fusion_NB=beam.fusion_NB.gather(1, parent_NB)
            + fusion_NBV.flatten(1).gather(1, place_NB).masked_fill(stays_NB, 0),
            last_NB=torch.where(stays_NB, beam.last_NB.gather(1, parent_NB), symbol_NB),
            hash_NB=torch.where(
                stays_NB,
                beam.hash_NB.gather(1, parent_NB),
                hash_after(beam.hash_NB.gather(1, parent_NB), symbol_NB),
            ),
            scorers=self._advanced(beam, step),
        )
        return grown.where(alive_N1, beam), step

    def _advanced(self, beam: _Beam, step: BeamSteps) -> tuple[Rows, ...]:
        """The scorers' states after a frame; those of ended utterances do not change."""
        batch = len(step.parent)
        first_N1 = torch.arange(batch, device=step.parent.device)[:, None] * self.beam_size
        parent_R, symbol_R = (first_N1 + step.parent).flatten(), step.symbol.flatten()
        emits_R = symbol_R >= 0
        symbol_R = symbol_R.masked_fill(~emits_R, BLANK)
        states = [take_rows(rows, parent_R) for rows in beam.scorers]
        return advance_scorers(self.scorers, states, symbol_R, emits_R)


def _extended(beam: _Beam, log_probs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of paths that end in a symbol: of the same sequences, and one longer.

    Returns (N, B) and (N, B, V). The latter is -inf for sequences in the beam, whose probability is
    in the former.
    """
    total_NB = beam.total_NB
    # For the empty sequence, without paths that end in a symbol, the index may be any symbol.
    last_NB = beam.last_NB.clamp(min=0)
    last_prob_NB = log_probs_NV.gather(1, last_NB)
    same_NB = beam.symbol_NB + last_prob_NB
    longer_NBV = total_NB[:, :, None] + log_probs_NV[:, None, :]
    longer_NBV.scatter_(2, last_NB[:, :, None], (beam.blank_NB + last_prob_NB)[:, :, None])
    longer_NBV[:, :, BLANK] = -torch.inf
    # Parent i and its longer sequence j.
    index_NBB = last_NB[:, None, :].expand(-1, last_NB.size(1), -1)
    is_alive_NB = (total_NB > -torch.inf) & (beam.last_NB >= 0)
    matches_NBB = hash_after(beam.hash_NB[:, :, None], index_NBB) == beam.hash_NB[:, None, :]
    matches_NBB &= is_alive_NB[:, None, :]
    found_NBB = longer_NBV.gather(2, index_NBB).masked_fill(~matches_NBB, -torch.inf)
    same_NB = same_NB.logaddexp(found_NBB.logsumexp(dim=1))
    removed_NBB = torch.full_like(found_NBB, torch.inf).masked_fill_(matches_NBB, -torch.inf)
    longer_NBV.scatter_reduce_(2, index_NBB, removed_NBB, "amin")
    return same_NB, longer_NBV


def _with_times(
    found: list[list[Hypothesis]], log_probs_NTV: Tensor, lengths_N: Tensor
) -> list[list[Hypothesis]]:
    """The hypotheses with the frames and symbol scores of their best paths."""
    ranks = [
        [own[rank].symbols if rank < len(own) else () for own in found]
        for rank in range(max(map(len, found), default=0))
    ]
    aligned = launch_alignments(log_probs_NTV, lengths_N, ranks, blank=BLANK).result()
    frames = [each.frames_NU.tolist() for each in aligned]
    log_probs = [each.log_probs_NU.tolist() for each in aligned]
    return [
        [
            replace(
                hypothesis,
                frames=tuple(frames[rank][n][: len(hypothesis.symbols)]),
                symbol_scores=tuple(log_probs[rank][n][: len(hypothesis.symbols)]),
            )
            for rank, hypothesis in enumerate(own)
        ]
        for n, own in enumerate(found)
    ]
