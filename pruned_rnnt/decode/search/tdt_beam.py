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
from pruned_rnnt.ops.search.beam_rows import best_rows, hash_after

# Default number of rounds per frame; the time of the search is proportional to it.
DEFAULT_ROUNDS = 3


class _Searched(NamedTuple):
    """The beam (N, B) at the end of each utterance, the steps, and the start of the next frames."""

    end: Beam
    steps: TraceStep | None
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
        # Duration 0 first, as long as a frame has a round left.
        durations = model.loss_config.durations
        order = sorted(range(len(durations)), key=lambda n: durations[n])
        self._order_K = torch.tensor(order) if order != sorted(order) else None
        self._durations_K = torch.tensor([durations[n] for n in order])
        self._has_zero = 0 in durations
        forward = sorted(duration for duration in durations if duration > 0)
        # A slice copies nothing.
        self._forward: slice | Tensor = torch.tensor(forward)
        if forward == list(range(forward[0], forward[-1] + 1)):
            self._forward = slice(forward[0], forward[-1] + 1)
        self._rounds = max_symbols_per_frame if self._has_zero else 1
        self._earlier = torch.ones(2 * beam_size, 2 * beam_size, dtype=torch.bool).tril(-1)

    @torch.inference_mode()
    def __call__(self, encoded_NTE: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances.

        Args:
            encoded_NTE: (N, T, E) output of `model.encode`.
            lengths: (N,) integer encoder frames.
        """
        if len(encoded_NTE) == 0:
            return []
        start = self._start(len(encoded_NTE), encoded_NTE.device, 1)
        # Like the other searches, cut lengths that an encoder gives beyond its frames.
        lengths_N = lengths.to(encoded_NTE.device).clamp(max=encoded_NTE.size(1))
        found = self._frames(encoded_NTE, lengths_N, start)
        last = self._ranked(found.end, self.num_best, lengths_N[:, None])
        paths = trace_paths(last, found.steps, self._rounds)
        return [[path.part for path in own] for own in paths.result()]

    def start_streams(self, streams: int, device: torch.device) -> Rows:
        return self._start(streams, device, 2).pack(self.model.vocab_size)

    @torch.inference_mode()
    def search_chunk(self, encoded_NCE: Tensor, lengths_N: Tensor, state: Rows) -> ChunkSearch:
        """As `StreamSearch.search_chunk`.

        The paths of a stream that ends are those with a blank that lands on its end, as in whole
        utterances. If there is none, because the end was not known in the chunk before, they are
        all paths that have landed on a later frame.
        """
        chunk, vocab_size = encoded_NCE.size(1), self.model.vocab_size
        start = self._start(1, encoded_NCE.device, 2).unpack(state, vocab_size)
        ends_N = lengths_N < chunk
        left_N = torch.where(ends_N, lengths_N, chunk + self._ahead)
        found = self._frames(encoded_NCE, left_N, start)
        end_NB = found.end.score.masked_fill(~ends_N[:, None], -torch.inf)
        end = found.end._replace(score=end_NB)
        landed = found.start.landed.flat()
        rows = torch.arange(landed.score.size(1), device=landed.score.device)
        frame_N = chunk + rows // (2 * self.beam_size)
        ended, others = (
            trace_paths(self._ranked(beam, beam.score.size(1), at), found.steps, self._rounds)
            for beam, at in ((end, lengths_N[:, None]), (landed, frame_N.expand_as(landed.score)))
        )

        def paths(_: object) -> list[list[Continuation]]:
            both = zip(ended.result(), others.result(), strict=True)
            return [at_end or later for at_end, later in both]

        return ChunkSearch(found.start.pack(vocab_size), Pending((), paths))

    @property
    def _ahead(self) -> int:
        return int(max(self.model.loss_config.durations)) + 1

    def _start(self, utterances: int, device: torch.device, beams: int) -> Start:
        """One empty hypothesis of each utterance on its first frame; beams: W, 2 of streams."""
        landed = self._empty((utterances, self._ahead, beams, self.beam_size), device)
        landed.score[:, 0, 0, 0] = 0.0
        rows = landed.score.numel()
        parts = [start_predictor(self.model, rows, device)]
        parts += [scorer.start(rows, device) for scorer in self.scorers]
        return Start(landed, parts)

    def _empty(self, shape: tuple[int, ...], device: torch.device) -> Beam:
        no_arc = self.model.predictor.blank - self.model.vocab_size
        return empty_beams(shape, device, no_arc)

    def _traced(self, beam: Beam, frame: Tensor) -> TraceStep:
        """The last arcs of a beam on these frames."""
        origin = beam.arc // self.model.vocab_size
        symbol = beam.arc % self.model.vocab_size
        symbol = symbol.masked_fill(symbol == self.model.predictor.blank, -1)
        duration = frame - origin // (self.beam_size * self._rounds)
        return TraceStep(origin, symbol, duration, beam.added)

    def _ranked(self, beam: Beam, most: int, frame: Tensor) -> LastArcs:
        """The last arcs of the best hypotheses of a beam (N, B), best first.

        frame: (N, B) or (N, 1), on which each has landed.
        """
        context_size = self.model.predictor.context_size
        divisor_NB = beam.rest[1] + context_size if self.length_norm else None
        kept_NK, score_NK = best_rows(beam.score, most, divisor_NB)
        frame_NK = frame.expand_as(beam.score).gather(1, kept_NK)
        return LastArcs(kept_NK, score_NK, self._traced(beam.take(kept_NK), frame_NK))

    def _frames(self, encoded_NTE: Tensor, lengths_N: Tensor, start: Start) -> _Searched:
        """Search the next frames; synchronises with the device only if a scorer does."""
        device = encoded_NTE.device
        self._silent_V = self._silent_V.to(device)
        if self._order_K is not None:
            self._order_K = self._order_K.to(device)
        self._durations_K = self._durations_K.to(device)
        self._earlier = self._earlier.to(device)
        if isinstance(self._forward, Tensor):
            self._forward = self._forward.to(device)
        am_NTD = self.model.joiner.encoder_proj(encoded_NTE)
        landed = start.landed
        size, _, beams, width = landed.score.shape
        none = self._empty((size, 1, beams, width), device)
        states = StepStates(self._ahead * self._rounds, size, width, start.states)
        present, end = self._arrived(landed)
        final_NB = self._final(states, end)
        barred = self._barred(torch.arange(self._ahead + 1, device=device), beams)
        steps: list[Beam] = []
        for t in range(am_NTD.size(1)):
            left_N = lengths_N - t
            barred_NKWV = barred.index_select(0, left_N.clamp(0, self._ahead))
            for _ in range(self._rounds):
                now = self._advanced(states, present)
                states.store(len(steps), now)
                scores = self._scores(present, now, am_NTD[:, t])
                steps.append(present)
                found = self._best(present, scores, barred_NKWV, len(steps) - 1)
                if self._has_zero:
                    present = Beam(found.score[:, 0, 0], found.rest[:, :, 0, 0])
                    found = Beam(found.score[:, 1:], found.rest[:, :, 1:])
                self._land(landed, found)
            landed = shifted(landed, none)
            present, ended = self._arrived(landed)
            is_end_N1 = (left_N == 1)[:, None]
            end = ended.where(is_end_N1, end)
            if self.scorers:
                final_NB = torch.where(is_end_N1, self._final(states, ended), final_NB)
        end = end._replace(score=end.score + final_NB)
        origin = landed.flat().arc // self.model.vocab_size
        return _Searched(end, self._trace(steps), Start(landed, states.at(origin)))

    def _arrived(self, landed: Beam) -> tuple[Beam, Beam]:
        """The beam (N, B) to extend on the first frame, and what is left if that is the end."""
        score, rest = landed.score[:, 0], landed.rest[:, :, 0]
        return Beam(score[:, 0], rest[:, :, 0]), Beam(score[:, -1], rest[:, :, -1])

    def _trace(self, steps: Sequence[Beam]) -> TraceStep | None:
        """The last arcs of the beams of all steps, (N, G, B); None without steps."""
        if not steps:
            return None
        score, rest = zip(*steps, strict=True)
        beam = Beam(torch.stack(score, dim=1), torch.stack(rest, dim=2))
        frame_G = torch.arange(len(steps), device=beam.score.device) // self._rounds
        return self._traced(beam, frame_G[:, None])

    def _barred(self, left_N: Tensor, beams: int) -> Tensor:
        """(N, K, W, V): -inf where an arc of a duration would be beyond the last of the frames that
        are left, or is none: a blank of duration 0, a silent symbol; else 0."""
        beyond_NK1 = left_N[:, None, None] - self._durations_K[:, None]
        is_blank_V = torch.arange(len(self._silent_V), device=left_N.device)
        is_blank_V = is_blank_V == self.model.predictor.blank
        blank_NK1 = (beyond_NK1 >= 0) & (self._durations_K > 0)[:, None]
        is_arc_NKV = torch.where(is_blank_V, blank_NK1, (beyond_NK1 > 0) & ~self._silent_V)
        is_arc_NKWV = torch.stack((is_arc_NKV, is_arc_NKV & is_blank_V)[:beams], dim=2)
        return torch.where(is_arc_NKWV, 0.0, -torch.inf)

    def _final(self, states: StepStates, beam: Beam) -> Tensor:
        """Scores (N, B) from the scorers at the end. The last arc was a blank, so the states are
        those of the origins."""
        if not self.scorers:
            return torch.zeros_like(beam.score)
        _, *parts = states.at(beam.arc // self.model.vocab_size)
        return add_final_scores(torch.zeros_like(beam.score), self.scorers, parts)

    def _advanced(self, states: StepStates, beam: Beam) -> list[Rows]:
        """The states after the last arcs of a beam (N, B)."""
        predictor, *parts = states.at(beam.arc // self.model.vocab_size)
        symbol_R = (beam.arc % self.model.vocab_size).flatten()
        emits_R = symbol_R != self.model.predictor.blank
        return [
            advance_predictor(self.model, predictor, symbol_R, emits_R),
            *advance_scorers(self.scorers, parts, symbol_R, emits_R),
        ]

    def _scores(self, beam: Beam, states: list[Rows], am_ND: Tensor) -> _Scores:
        predictor, *parts = states
        lm_NBD = predictor[0].unflatten(0, beam.score.shape)
        am_NBD = am_ND[:, None].expand_as(lm_NBD)
        logits_NBV, duration_logits_NBK = self.model.joiner.with_durations(am_NBD, lm_NBD)
        scores_NBV = log_probs_NBV = logits_NBV.float().log_softmax(dim=-1)
        for scorer, part in zip(self.scorers, parts, strict=True):
            fusion_NBV = scorer.scores(part).view_as(scores_NBV).clone()
            fusion_NBV[..., self.model.predictor.blank] = 0.0
            scores_NBV = scores_NBV + fusion_NBV
        log_durations_NBK = duration_logits_NBK.float().log_softmax(dim=-1)
        if self._order_K is not None:
            log_durations_NBK = log_durations_NBK.index_select(2, self._order_K)
        return _Scores(log_probs_NBV, scores_NBV, log_durations_NBK)

    def _best(self, beam: Beam, scores: _Scores, barred_NKWV: Tensor, step: int) -> Beam:
        """The best B extensions (N, K, W, B) of a beam (N, B) by each duration."""
        vocab_size = scores.symbols.size(-1)
        log_durations_NKB = scores.durations.transpose(1, 2)
        added_NKBV = scores.symbols[:, None] + log_durations_NKB[..., None]
        candidates = beam.score[:, None, :, None] + added_NKBV
        candidates = candidates[:, :, None] + barred_NKWV[:, :, :, None]
        score, index = candidates.flatten(-2).topk(self.beam_size, dim=-1)
        flat = index.flatten(1)
        before = (flat // vocab_size).expand(2, *flat.shape)
        hashes, length = beam.rest[:2].gather(-1, before)
        symbol = flat % vocab_size
        emits = symbol != self.model.predictor.blank
        hashes = torch.where(emits, hash_after(hashes, symbol), hashes)
        arc = flat + step * self.beam_size * vocab_size
        added = scores.log_probs.flatten(1).gather(1, flat).view(torch.int32)
        rest = torch.stack((hashes, length + emits, arc, added.long()))
        return Beam(score, rest.view(-1, *index.shape))

    def _land(self, landed: Beam, new: Beam) -> None:
        """Merge extensions (N, L, W, B) into the beams of later frames, in place."""
        score, rest = landed.score[:, self._forward], landed.rest[:, :, self._forward]
        both = Beam(torch.cat((score, new.score), dim=-1), torch.cat((rest, new.rest), dim=-1))
        score, order = both.score.sort(dim=-1, descending=True, stable=True)
        hashes = both.rest[0].gather(-1, order)
        # As `merge_equal`, in fewer calls: the first of equal sequences has the highest score.
        equal = hashes.unsqueeze(-1) == hashes.unsqueeze(-2)
        base = score.clamp(min=torch.finfo(score.dtype).min)
        shares = torch.where(equal, score.unsqueeze(-2), -torch.inf).sub_(base.unsqueeze(-1))
        score = shares.exp_().sum(dim=-1).log_().add_(base)
        score.masked_fill_((equal & self._earlier).any(dim=-1), -torch.inf)
        score, kept = score.topk(self.beam_size, dim=-1)
        landed.score[:, self._forward] = score
        landed.rest[:, :, self._forward] = both.rest_at(order.gather(-1, kept))


class _Scores(NamedTuple):
    """Of the arcs of a beam (N, B): log-probabilities of each next symbol or blank (N, B, V), these
    with the scorers, and log-probabilities of the durations in ascending order (N, B, K)."""

    log_probs: Tensor
    symbols: Tensor
    durations: Tensor
