"""Modified beam search: at most one symbol per frame, equal sequences merged, on the device.

Axes: N batch, T encoder frames, E encoder width, D joiner width, B beam, K best,
V vocabulary; R = N * B rows.

A hypothesis is a row of the beam: its score, the states of predictor and scorers, and a 64-bit hash
of its symbols, by which equal sequences are found. The sequences themselves are read from back
pointers at the end. A compiled op searches the frames, for models that it takes
(`compiled_search`); on a GPU without scores of other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.back_pointers import (
    pending_continuations,
    pending_trace,
    stack_steps,
)
from pruned_rnnt.decode.search.compiled_search import CompiledBeam, compiled_model
from pruned_rnnt.decode.search.frame_graph import FrameGraphs, FrameLoop
from pruned_rnnt.decode.search.interface import (
    ChunkSearch,
    DeviceSearch,
    Hypothesis,
    Pending,
    StreamSearch,
    check_beam,
    silent_mask,
)
from pruned_rnnt.decode.search.states import (
    Rows,
    TokenScorer,
    add_final_scores,
    advance_predictor,
    advance_scorers,
    start_predictor,
    take_rows,
)
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import best_rows, extend_beam, joint_log_probs, merge_equal
from pruned_rnnt.ops.search.search_frames import BeamState, BeamSteps, SearchModel


class _Beam(NamedTuple):
    """The hypotheses after some frames.

    score_NB, hash_NB: see the module's docstring; length_NB: number of symbols.
    predictor: state of the predictor, R rows; scorers: state of each scorer, R rows.
    """

    score_NB: Tensor
    hash_NB: Tensor
    length_NB: Tensor
    predictor: Rows
    scorers: tuple[Rows, ...]

    def pack(self) -> Rows:
        """All tensors in one tuple, with the axes N, B first."""
        shape = self.score_NB.shape
        rows = (row for rows in (self.predictor, *self.scorers) for row in rows)
        beam = (self.score_NB, self.hash_NB, self.length_NB)
        return beam + tuple(row.unflatten(0, shape) for row in rows)

    def unpack(self, packed: Rows) -> _Beam:
        """The inverse of `pack`, for states with as many tensors as those of this beam."""
        score_NB, hash_NB, length_NB, *others = packed
        rest = iter(x.flatten(0, 1) for x in others)
        predictor, *scorers = (
            tuple(next(rest) for _ in rows) for rows in (self.predictor, *self.scorers)
        )
        return _Beam(score_NB, hash_NB, length_NB, predictor, tuple(scorers))


class ModifiedBeamSearch(DeviceSearch[list[list[Hypothesis]]], StreamSearch):
    """Finds the best sequences of each utterance, best first.

    The score of a hypothesis is the log-probability of all of its paths that stayed in the beam,
    plus the scores of its symbols from the scorers.

    Use one object for many batches: if the compiled op does not take the model, or other scores are
    added, it captures on CUDA a graph of a block of frames for each power of two of utterances,
    unless a scorer reads from the device. The graphs refer to the memory of parameters, so create a
    new object after parameters are moved or replaced.

    Args:
        model: in evaluation mode.
        beam_size: hypotheses kept after each frame.
        num_best: maximum number of hypotheses returned; fewer if fewer have a path.
        length_norm: order by score / (symbols + C) instead of by score, where C is the context size
            of the predictor; returned scores are not divided.
        silent_symbols: ids that are never emitted (such as `<unk>`).
        scorers: other scores of symbols (language models, hotwords).
        ilm_scale: for HAT models (arXiv 2003.07705): factor of the internal language model, whose
            log-probability of each symbol (the joiner's, for an encoder output of zeros) is
            subtracted.

    Raises:
        ValueError: beam_size or num_best is below 1, num_best is above beam_size, ilm_scale is
            used for a model that is not HAT, or the model has durations: use TdtBeamSearch.
    """

    def __init__(
        self,
        model: TransducerModel,
        *,
        beam_size: int = 4,
        num_best: int = 1,
        length_norm: bool = True,
        silent_symbols: Sequence[int] = (),
        scorers: Sequence[TokenScorer] = (),
        ilm_scale: float = 0.0,
    ) -> None:
        check_beam(beam_size, num_best)
        if model.loss_config.durations:
            raise ValueError("the model has durations: use TdtBeamSearch")
        if ilm_scale and not model.loss_config.hat:
            raise ValueError(
                f"ilm_scale is {ilm_scale}, which needs a model trained with loss.hat=true: others "
                "have no separate internal language model"
            )
        self.model = model
        self.beam_size = beam_size
        self.num_best = num_best
        self.length_norm = length_norm
        self.scorers = tuple(scorers)
        self.ilm_scale = ilm_scale
        self._silent_V = silent_mask(model.vocab_size, silent_symbols)
        self._graphs = FrameGraphs()

    @torch.inference_mode()
    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[list[list[Hypothesis]]]:
        start = self._start(encoded_NTE.size(0), encoded_NTE.device)
        beam, steps = self._frames(encoded_NTE, lengths.to(encoded_NTE.device), start)
        return pending_trace(*self._ranked(beam, self.num_best), steps)

    def start_streams(self, streams: int, device: torch.device) -> Rows:
        return self._start(streams, device).pack()

    @torch.inference_mode()
    def search_chunk(self, encoded_NCE: Tensor, lengths_N: Tensor, state: Rows) -> ChunkSearch:
        start = self._start(1, encoded_NCE.device).unpack(state)
        beam, steps = self._frames(encoded_NCE, lengths_N, start)
        return ChunkSearch(
            beam.pack(), pending_continuations(*self._ranked(beam, self.beam_size), steps)
        )

    def _ranked(self, beam: _Beam, most: int) -> tuple[Tensor, Tensor]:
        """The rows (N, K) and scores (N, K) of the best hypotheses if the utterances end here."""
        score_NB = add_final_scores(beam.score_NB, self.scorers, beam.scorers)
        context_size = self.model.predictor.context_size
        divisor_NB = beam.length_NB + context_size if self.length_norm else None
        return best_rows(score_NB, most, divisor_NB)

    def _frames(
        self, encoded_NTE: Tensor, lengths_N: Tensor, start: _Beam
    ) -> tuple[_Beam, BeamSteps]:
        """Search the next frames; on a GPU it synchronises only if a scorer does.

        There may be more steps than frames: after the end of an utterance, a step only reorders
        the rows of its hypotheses.
        """
        if self._silent_V.device != encoded_NTE.device:
            self._silent_V = self._silent_V.to(encoded_NTE.device)
            self._graphs.clear()
        am_NTD = self.model.joiner.encoder_proj(encoded_NTE)
        if am_NTD.device.type == "cpu" or not (self.scorers or self.ilm_scale):
            model = compiled_model(self.model, self._silent_V, am_NTD, self.beam_size)
            if model is not None:
                return self._compiled_frames(start, am_NTD, lengths_N, model)
        loop: FrameLoop = partial(self._loop, start)
        packed = start.pack()
        if am_NTD.is_cuda and all(scorer.capturable for scorer in self.scorers):
            loop = self._graphs.loop(loop, am_NTD, packed)
        steps, packed = loop(am_NTD, lengths_N, packed)
        return start.unpack(packed), BeamSteps(*steps)

    def _loop(
        self, like: _Beam, am_NTD: Tensor, lengths_N: Tensor, packed: Rows
    ) -> tuple[Rows, Rows]:
        """Search all frames without a graph: the fields of `BeamSteps`, and the beam."""
        beam = like.unpack(packed)
        steps = []
        for t in range(am_NTD.size(1)):
            fusion_NBV = self._fusion(beam.scorers, self._predicted(beam))
            alive_N11 = (lengths_N > t)[:, None, None]
            scores_NBV = self._scores(beam, am_NTD[:, t], alive_N11, fusion_NBV)
            beam, step = self._grow(beam, scores_NBV)
            if fusion_NBV is not None:
                step = step._replace(added=self._own_scores(step, fusion_NBV))
            steps.append(step)
        return stack_steps(steps, beam.hash_NB), beam.pack()

    def _compiled_frames(
        self, beam: _Beam, am_NTD: Tensor, lengths_N: Tensor, model: SearchModel
    ) -> tuple[_Beam, BeamSteps]:
        """Search all frames by the op; scorers are asked again when a hypothesis changes."""
        compiled = CompiledBeam(
            model, am_NTD, lengths_N, BeamState(*beam._replace(scorers=()).pack())
        )
        scorers = beam.scorers
        while compiled.has_frames_left:
            fusion_NBV = self._fusion(scorers, compiled.state.lm)
            compiled.search(fusion_NBV)
            if fusion_NBV is not None:
                # Of the frames that were searched, only the last one may have symbols.
                last = BeamSteps(*(field[:, compiled.frame - 1] for field in compiled.steps))
                last.added.copy_(self._own_scores(last, fusion_NBV))
            if self.scorers:
                parent_R, symbol_R, emits_R = compiled.last_step()
                taken = [take_rows(rows, parent_R) for rows in scorers]
                scorers = advance_scorers(self.scorers, taken, symbol_R, emits_R)
        score_NB, hash_NB, length_NB, *predictor = compiled.state
        flat = tuple(x.flatten(0, 1) for x in predictor)
        return _Beam(score_NB, hash_NB, length_NB, flat, scorers), compiled.steps

    def _start(self, utterances: int, device: torch.device) -> _Beam:
        """One empty hypothesis per utterance; the other rows have probability 0."""
        shape = (utterances, self.beam_size)
        score_NB = torch.full(shape, -torch.inf, device=device)
        score_NB[:, 0] = 0.0
        zeros_NB = torch.zeros(shape, dtype=torch.int64, device=device)
        rows = shape[0] * shape[1]
        return _Beam(
            score_NB,
            zeros_NB,
            zeros_NB,
            start_predictor(self.model, rows, device),
            tuple(scorer.start(rows, device) for scorer in self.scorers),
        )

    def _scores(
        self, beam: _Beam, am_ND: Tensor, alive_N11: Tensor, fusion_NBV: Tensor | None
    ) -> Tensor:
        """(N, B, V): increase of the score of each hypothesis by each next symbol.

        Utterances that have ended can only add blanks, with a score of 0.
        """
        blank = self.model.predictor.blank
        lm_NBD = self._predicted(beam)
        logits_NBV = self.model.joiner(am_ND[:, None].expand_as(lm_NBD), lm_NBD)
        scores_NBV = joint_log_probs(logits_NBV, blank, self.model.loss_config.hat)
        scores_NBV = scores_NBV.masked_fill(self._silent_V, -torch.inf)
        if fusion_NBV is not None:
            scores_NBV = scores_NBV + fusion_NBV
        only_blank_V = scores_NBV.new_full(scores_NBV.shape[-1:], -torch.inf)
        only_blank_V[blank : blank + 1].fill_(0.0)
        return torch.where(alive_N11, scores_NBV, only_blank_V)

    @staticmethod
    def _predicted(beam: _Beam) -> Tensor:
        """(N, B, D): the projected output of the predictor."""
        lm_RD = beam.predictor[0]
        return lm_RD.view(*beam.score_NB.shape, lm_RD.size(1))

    @staticmethod
    def _own_scores(step: BeamSteps, fusion_NBV: Tensor) -> Tensor:
        """(N, B): what the symbols of a step (N, B) added, without the fusion."""
        symbol_NB = step.symbol.clamp(min=0)
        index_NB = step.parent * fusion_NBV.size(2) + symbol_NB
        fused_NB = fusion_NBV.flatten(1).gather(1, index_NB)
        return step.added - fused_NB.masked_fill(step.symbol < 0, 0.0)

    def _fusion(self, scorers: Sequence[Rows], lm_NBD: Tensor) -> Tensor | None:
        """(N, B, V): what scorers in these states, and the internal language model, add to the
        score of each hypothesis by each next symbol; None without any."""
        if not (self.scorers or self.ilm_scale):
            return None
        fusion_NBV = lm_NBD.new_zeros(*lm_NBD.shape[:2], self.model.vocab_size, dtype=torch.float32)
        for scorer, rows in zip(self.scorers, scorers, strict=True):
            fusion_NBV += scorer.scores(rows).view_as(fusion_NBV)
        if self.ilm_scale:
            fusion_NBV -= self.ilm_scale * self._internal_lm(lm_NBD)
        fusion_NBV[..., self.model.predictor.blank] = 0.0
        return fusion_NBV

    def _internal_lm(self, lm_NBD: Tensor) -> Tensor:
        """Log-probabilities of the symbols for zero encoder output; 0 for blank."""
        logits_NBV = self.model.joiner(torch.zeros_like(lm_NBD), lm_NBD).float()
        logits_NBV[..., self.model.predictor.blank] = -torch.inf
        log_probs_NBV: Tensor = logits_NBV.log_softmax(dim=-1)
        log_probs_NBV[..., self.model.predictor.blank] = 0.0
        return log_probs_NBV

    def _grow(self, beam: _Beam, scores_NBV: Tensor) -> tuple[_Beam, BeamSteps]:
        """Extend all hypotheses by blank or a symbol and keep the best B."""
        blank = self.model.predictor.blank
        best = extend_beam(beam.score_NB, beam.hash_NB, scores_NBV, blank)
        batch_size = best.score.size(0)
        first_N1 = torch.arange(batch_size, device=best.score.device)[:, None] * self.beam_size
        parent_R, symbol_R = (first_N1 + best.parent).flatten(), best.symbol.flatten()
        emits_R = best.emits.flatten()
        predictor = take_rows(beam.predictor, parent_R)
        scorers = [take_rows(rows, parent_R) for rows in beam.scorers]
        grown = _Beam(
            merge_equal(best.score, best.hash),
            best.hash,
            beam.length_NB.gather(1, best.parent) + best.emits,
            advance_predictor(self.model, predictor, symbol_R, emits_R),
            advance_scorers(self.scorers, scorers, symbol_R, emits_R),
        )
        symbol_NB = torch.where(best.emits, best.symbol, -1)
        return grown, BeamSteps(best.parent, symbol_NB, best.added)
