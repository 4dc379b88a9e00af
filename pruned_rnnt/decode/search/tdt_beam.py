"""Modified beam search for token-and-duration transducers (TDT, arXiv 2304.06795), on the device.

Axes: N batch, T encoder frames, E encoder width, D joiner width, B beam, A frames ahead (from the
current frame to the longest duration), L durations above 0, K best, V vocabulary; R = N * B rows.

Each hypothesis has a frame of its own: the one on which its last duration landed. Hypotheses are
compared only with others of the same frame, because the scores of those further ahead include fewer
arcs: every frame has a beam, which collects the hypotheses that land there, with equal sequences
merged, and is extended when the search reaches the frame. A symbol of duration 0 stays on its
frame, so a frame is extended in rounds, one for each symbol that it may emit. A hypothesis ends
with a blank that lands on the end exactly, as in the loss; if the beam is wide enough, its score is
the log-probability of the sequence, over paths with at most one symbol per round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.back_pointers import LastArcs, TraceStep, trace_paths
from pruned_rnnt.decode.search.interface import (
    ChunkSearch,
    Continuation,
    Hypothesis,
    Pending,
    StreamSearch,
    check_beam,
    check_max_symbols,
    silent_mask,
)
from pruned_rnnt.decode.search.states import (
    Rows,
    TokenScorer,
    add_final_scores,
    advance_predictor,
    advance_scorers,
    start_predictor,
)
from pruned_rnnt.decode.search.tdt_landings import Beam, Start, StepStates, empty_beams, shifted
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import best_rows, hash_after, merge_equal

# Default number of rounds per frame; the time of the search is proportional to it.
DEFAULT_ROUNDS = 3


class _Searched(NamedTuple):
    """The beam (N, B) at the end of each utterance, the steps, and the start of the next frames."""

    end: Beam
    steps: list[TraceStep]
    start: Start


class TdtBeamSearch(StreamSearch):
    """Finds the best sequences of each utterance, best first.

    Args:
        model: in evaluation mode, trained with loss.durations.
        beam_size: hypotheses kept for each frame.
        num_best: maximum number of hypotheses returned; fewer if fewer have a path.
        length_norm: see ModifiedBeamSearch.
        max_symbols_per_frame: rounds of a frame; the last one allows no duration 0.
        silent_symbols: ids that are never emitted (such as `<unk>`).
        scorers: other scores of symbols (language models, hotwords).

    Raises:
        ValueError: beam_size, num_best or max_symbols_per_frame is below 1, or num_best is above
            beam_size.
    """

    def __init__(
        self,
        model: TransducerModel,
        *,
        beam_size: int = 4,
        num_best: int = 1,
        length_norm: bool = True,
        max_symbols_per_frame: int = DEFAULT_ROUNDS,
        silent_symbols: Sequence[int] = (),
        scorers: Sequence[TokenScorer] = (),
    ) -> None:
        check_beam(beam_size, num_best)
        check_max_symbols(max_symbols_per_frame)
        self.model = model
        self.beam_size = beam_size
        self.num_best = num_best
        self.length_norm = length_norm
        self.scorers = tuple(scorers)
        self._silent_V = silent_mask(model.vocab_size, silent_symbols)
        durations = model.loss_config.durations
        self._zero_duration_index = durations.index(0) if 0 in durations else None
        forward = [n for n, duration in enumerate(durations) if duration > 0]
        self._forward_L = torch.tensor(forward)
        self._durations_L = torch.tensor([durations[n] for n in forward])
        self._rounds = max_symbols_per_frame if self._zero_duration_index is not None else 1

    @torch.inference_mode()
    def __call__(self, encoded_NTE: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances.

        Args:
            encoded_NTE: (N, T, E) output of `model.encode`.
            lengths: (N,) integer encoder frames.
        """
        if len(encoded_NTE) == 0:
            return []
        start = self._start(len(encoded_NTE), encoded_NTE.device, self.beam_size)
        # Like the other searches, cut lengths that an encoder gives beyond its frames.
        lengths_N = lengths.to(encoded_NTE.device).clamp(max=encoded_NTE.size(1))
        found = self._frames(encoded_NTE, lengths_N, start)
        paths = trace_paths(self._ranked(found.end, self.num_best), found.steps, self._rounds)
        return [[path.part for path in own] for own in paths.result()]

    def start_streams(self, streams: int, device: torch.device) -> Rows:
        return self._start(streams, device, 2 * self.beam_size).pack()

    @torch.inference_mode()
    def search_chunk(self, encoded_NCE: Tensor, lengths_N: Tensor, state: Rows) -> ChunkSearch:
        """As `StreamSearch.search_chunk`.

        The paths of a stream that ends are those with a blank that lands on its end, as in whole
        utterances. If there is none, because the end was not known in the chunk before, they are
        all paths that have landed on a later frame.
        """
        chunk = encoded_NCE.size(1)
        start = self._start(1, encoded_NCE.device, 2 * self.beam_size).unpack(state)
        ends_N = lengths_N < chunk
        left_N = torch.where(ends_N, lengths_N, chunk + self._ahead)
        found = self._frames(encoded_NCE, left_N, start)
        end_NB = found.end.score.masked_fill(~ends_N[:, None], -torch.inf)
        end = found.end._replace(score=end_NB)
        landed = found.start.landed.flat()
        ended, others = (
            trace_paths(self._ranked(beam, beam.score.size(1)), found.steps, self._rounds)
            for beam in (end, landed)
        )

        def paths(_: object) -> list[list[Continuation]]:
            both = zip(ended.result(), others.result(), strict=True)
            return [at_end or later for at_end, later in both]

        return ChunkSearch(found.start.pack(), Pending((), paths))

    @property
    def _ahead(self) -> int:
        return int(max(self.model.loss_config.durations)) + 1

    def _start(self, utterances: int, device: torch.device, width: int) -> Start:
        """One empty hypothesis of each utterance on its first frame; width: B, for streams 2B."""
        landed = empty_beams((utterances, self._ahead, width), device)
        landed.score[:, 0, 0] = 0.0
        rows = landed.score.numel()
        parts = [start_predictor(self.model, rows, device)]
        parts += [scorer.start(rows, device) for scorer in self.scorers]
        return Start(landed, parts)

    def _ranked(self, beam: Beam, most: int) -> LastArcs:
        """The last arcs of the best hypotheses of a beam (N, B), best first."""
        context_size = self.model.predictor.context_size
        divisor_NB = beam.length + context_size if self.length_norm else None
        kept_NK, score_NK = best_rows(beam.score, most, divisor_NB)
        best = beam.take(kept_NK)
        return LastArcs(
            kept_NK, score_NK, TraceStep(best.origin, best.symbol, best.duration, best.added)
        )

    def _frames(self, encoded_NTE: Tensor, lengths_N: Tensor, start: Start) -> _Searched:
        """Search the next frames; synchronises with the device only if a scorer does."""
        device = encoded_NTE.device
        self._silent_V = self._silent_V.to(device)
        self._forward_L = self._forward_L.to(device)
        self._durations_L = self._durations_L.to(device)
        am_NTD = self.model.joiner.encoder_proj(encoded_NTE)
        landed = start.landed
        kept = self._ahead * self._rounds
        states = StepStates(kept, len(am_NTD), self.beam_size, start.states)
        present, end = self._arrived(landed)
        final_NB = self._final(states, end)
        steps: list[TraceStep] = []
        for t in range(am_NTD.size(1)):
            left_N = lengths_N - t
            for rest in reversed(range(self._rounds)):
                now = self._advanced(states, present)
                states.store(len(steps), now)
                arcs = _Arcs(present, *self._scores(present, now, am_NTD[:, t]), left_N, len(steps))
                steps.append(
                    TraceStep(present.origin, present.symbol, present.duration, present.added)
                )
                landed = self._land(landed, arcs)
                if rest > 0:
                    present = self._stayed(arcs)
            landed = shifted(landed)
            present, ended = self._arrived(landed)
            is_end_N1 = (left_N == 1)[:, None]
            end = ended.where(is_end_N1, end)
            if self.scorers:
                final_NB = torch.where(is_end_N1, self._final(states, ended), final_NB)
        end = end._replace(score=end.score + final_NB)
        return _Searched(end, steps, Start(landed, states.at(landed.flat().origin)))

    def _arrived(self, landed: Beam) -> tuple[Beam, Beam]:
        """The beam (N, B) to extend on the first frame, and what is left if that is the end."""
        width = self.beam_size
        return (
            Beam(*(x[:, 0, :width] for x in landed)),
            Beam(*(x[:, 0, -width:] for x in landed)),
        )

    def _final(self, states: StepStates, beam: Beam) -> Tensor:
        """Scores (N, B) from the scorers at the end. The last arc was a blank, so the states are
        those of the origins."""
        _, *parts = states.at(beam.origin)
        return add_final_scores(torch.zeros_like(beam.score), self.scorers, parts)

    def _advanced(self, states: StepStates, beam: Beam) -> list[Rows]:
        """The states after the last arcs of a beam (N, B)."""
        predictor, *parts = states.at(beam.origin)
        emits_R, symbol_R = (beam.symbol >= 0).flatten(), beam.symbol.clamp(min=0).flatten()
        return [
            advance_predictor(self.model, predictor, symbol_R, emits_R),
            *advance_scorers(self.scorers, parts, symbol_R, emits_R),
        ]

    def _scores(
        self, beam: Beam, states: list[Rows], am_ND: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of each next symbol or blank (N, B, V), these with the scorers, and
        log-probabilities of each duration (N, B, K)."""
        predictor, *parts = states
        lm_NBD = predictor[0].unflatten(0, beam.score.shape)
        am_NBD = am_ND[:, None].expand_as(lm_NBD)
        logits_NBV, duration_logits_NBK = self.model.joiner.with_durations(am_NBD, lm_NBD)
        log_probs_NBV = logits_NBV.float().log_softmax(dim=-1)
        scores_NBV = log_probs_NBV = log_probs_NBV.masked_fill(self._silent_V, -torch.inf)
        for scorer, part in zip(self.scorers, parts, strict=True):
            fusion_NBV = scorer.scores(part).view_as(scores_NBV).clone()
            fusion_NBV[..., self.model.predictor.blank] = 0.0
            scores_NBV = scores_NBV + fusion_NBV
        return log_probs_NBV, scores_NBV, duration_logits_NBK.float().log_softmax(dim=-1)

    def _stayed(self, arcs: _Arcs) -> Beam:
        """The best extensions by a symbol of duration 0."""
        assert self._zero_duration_index is not None
        added_NBV = arcs.scores + arcs.log_durations[:, :, self._zero_duration_index, None]
        added_NBV[..., self.model.predictor.blank] = -torch.inf
        added_NBV = added_NBV.masked_fill((arcs.left < 1)[:, None, None], -torch.inf)
        return self._best(arcs, added_NBV, torch.zeros_like(arcs.left)[:, None])

    def _land(self, landed: Beam, arcs: _Arcs) -> Beam:
        """The beams of later frames, with the extensions by durations above 0 merged in."""
        log_durations_NLB = arcs.log_durations.index_select(2, self._forward_L).transpose(1, 2)
        added_NLBV = arcs.scores[:, None] + log_durations_NLB[..., None]
        beyond_NL = arcs.left[:, None] - self._durations_L
        inside = torch.where(beyond_NL > 0, 0.0, -torch.inf)[..., None, None]
        blank = self.model.predictor.blank
        blank_NLB = torch.where(beyond_NL[..., None] >= 0, added_NLBV[..., blank], -torch.inf)
        added_NLBV = added_NLBV + inside
        added_NLBV[..., blank] = blank_NLB
        durations_NL1 = self._durations_L.expand_as(beyond_NL)[..., None]
        before = Beam(*(x[:, self._durations_L] for x in landed))
        parts = [self._merged(before, self._best(arcs, added_NLBV, durations_NL1), 0)]
        if before.score.size(-1) > self.beam_size:
            is_blank_V = torch.arange(added_NLBV.size(-1), device=added_NLBV.device) == blank
            blanks_NLBV = added_NLBV.masked_fill(~is_blank_V, -torch.inf)
            new = self._best(arcs, blanks_NLBV, durations_NL1)
            parts.append(self._merged(before, new, self.beam_size))
        for own, *found in zip(landed, *parts, strict=True):
            own[:, self._durations_L] = torch.cat(found, dim=-1)
        return landed

    def _merged(self, before: Beam, new: Beam, begin: int) -> Beam:
        """The best B of a beam, which begins at that row of `before`, and of new hypotheses."""
        old = (x[..., begin : begin + self.beam_size] for x in before)
        both = Beam(*(torch.cat(x, dim=-1) for x in zip(old, new, strict=True)))
        both = both.take(both.score.argsort(dim=-1, descending=True, stable=True))
        flat = both.score.flatten(0, 1), both.hash.flatten(0, 1)
        both = both._replace(score=merge_equal(*flat).view_as(both.score))
        return both.take(both.score.topk(self.beam_size, dim=-1).indices)

    def _best(self, arcs: _Arcs, added: Tensor, durations: Tensor) -> Beam:
        """The best B of the extensions with scores `added` (N, ..., B, V): a beam (N, ..., B).

        durations: (N, ..., 1).
        """
        beam, vocab_size = arcs.beam, added.size(-1)
        shape = (*added.shape[:-2], self.beam_size)
        start = Beam(*(x.view(len(x), *[1] * (len(shape) - 2), -1).expand(shape) for x in beam))
        candidates = (start.score.unsqueeze(-1) + added).flatten(-2)
        score, index = candidates.topk(self.beam_size, dim=-1)
        row, symbol = index // vocab_size, index % vocab_size
        emits = symbol != self.model.predictor.blank
        hashes = start.hash.gather(-1, row)
        log_probs = arcs.log_probs.flatten(1).view(len(index), *[1] * (index.dim() - 2), -1)
        return Beam(
            score=score,
            hash=torch.where(emits, hash_after(hashes, symbol), hashes),
            length=start.length.gather(-1, row) + emits,
            origin=arcs.step * self.beam_size + row,
            symbol=torch.where(emits, symbol, -1),
            duration=durations.expand_as(row),
            added=log_probs.expand(*index.shape[:-1], -1).gather(-1, index),
        )


class _Arcs(NamedTuple):
    """A beam (N, B) at the current frame; what `_scores` returns of its arcs; the number of frames
    left, (N,), and the number of the step."""

    beam: Beam
    log_probs: Tensor
    scores: Tensor
    log_durations: Tensor
    left: Tensor
    step: int
