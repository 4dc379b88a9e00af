"""Modified beam search: at most one symbol per frame, equal sequences merged, on the device.

Axes: N batch, T encoder frames, E encoder width, D joiner width, B beam, K best,
V vocabulary; R = N * B rows.

A hypothesis is a row of the beam: its score, the states of predictor and scorers, and a 64-bit hash
of its symbols, by which equal sequences are found. The sequences themselves are read from back
pointers at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.back_pointers import BeamStep, pending_trace
from pruned_rnnt.decode.search.beam_rows import best_rows, hash_after, merge_equal
from pruned_rnnt.decode.search.frame_graph import BLOCK_FRAMES, FrameGraph, graph_rows
from pruned_rnnt.decode.search.host_beam import HostBeam
from pruned_rnnt.decode.search.hypothesis import Hypothesis, joint_log_probs
from pruned_rnnt.decode.search.pending import DeviceSearch, Pending
from pruned_rnnt.decode.search.rows import Rows, advance_predictor, start_predictor, take_rows
from pruned_rnnt.decode.search.scorer import TokenScorer, add_final_scores, advance_scorers
from pruned_rnnt.decode.search.search_arguments import check_beam, silent_mask
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.transducer_model import TransducerModel


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


class ModifiedBeamSearch(DeviceSearch[list[list[Hypothesis]]]):
    """Finds the best sequences of each utterance, best first.

    The score of a hypothesis is the log-probability of all of its paths that stayed in the beam,
    plus the scores of its symbols from the scorers.

    Use one object for many batches: on CUDA it captures a graph of a block of frames for each power
    of two of utterances, unless a scorer reads from the device. The graphs refer to the memory of
    parameters, so create a new object after parameters are moved or replaced.

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
        self._graphs: dict[int, FrameGraph] = {}

    @torch.inference_mode()
    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[list[list[Hypothesis]]]:
        if self._silent_V.device != encoded_NTE.device:
            self._silent_V = self._silent_V.to(encoded_NTE.device)
            self._graphs.clear()
        am_NTD = self.model.joiner.encoder_proj(encoded_NTE)
        beam, steps = self._frames(am_NTD, lengths.to(am_NTD.device))
        score_NB = add_final_scores(beam.score_NB, self.scorers, beam.scorers)
        context_size = self.model.predictor.context_size
        divisor_NB = beam.length_NB + context_size if self.length_norm else None
        kept_NK, score_NK = best_rows(score_NB, self.num_best, divisor_NB)
        return pending_trace(kept_NK, score_NK, steps)

    def _frames(self, am_NTD: Tensor, lengths_N: Tensor) -> tuple[_Beam, list[BeamStep]]:
        """Search all frames; synchronises with the device only if a scorer does.

        There may be more steps than frames: after the end of an utterance, a step only reorders
        the rows of its hypotheses.
        """
        start = self._start(am_NTD)
        loop = partial(self._loop, start)
        capturable = am_NTD.is_cuda and all(scorer.capturable for scorer in self.scorers)
        if capturable and am_NTD.size(1) > BLOCK_FRAMES:
            rows = graph_rows(am_NTD.size(0))
            if rows not in self._graphs:
                self._graphs[rows] = FrameGraph(loop, rows, am_NTD, start.pack())
            steps, packed = self._graphs[rows](am_NTD, lengths_N, start.pack())
        elif am_NTD.device.type == "cpu" and isinstance(self.model.predictor, StatelessPredictor):
            steps, beam = self._loop_on_host(start, am_NTD, lengths_N.tolist())
            packed = beam.pack()
        else:
            steps, packed = loop(am_NTD, lengths_N, start.pack())
        by_frame = zip(*(step_NTB.unbind(1) for step_NTB in steps), strict=True)
        return start.unpack(packed), [BeamStep(*step) for step in by_frame]

    def _loop(
        self, like: _Beam, am_NTD: Tensor, lengths_N: Tensor, packed: Rows
    ) -> tuple[Rows, Rows]:
        """Search all frames without a graph: the fields of `BeamStep`, stacked, and the beam."""
        beam = like.unpack(packed)
        steps = []
        for t in range(am_NTD.size(1)):
            scores_NBV = self._scores(beam, am_NTD[:, t], (lengths_N > t)[:, None, None])
            beam, step = self._grow(beam, scores_NBV)
            steps.append(step)
        if not steps:
            empty = beam.hash_NB[:, None, :][:, :0]
            return (empty, empty, empty.float()), packed
        fields = (
            [step.parent_NB for step in steps],
            [step.symbol_NB for step in steps],
            [step.added_NB for step in steps],
        )
        return tuple(torch.stack(field, dim=1) for field in fields), beam.pack()

    def _loop_on_host(
        self, beam: _Beam, am_NTD: Tensor, lengths: Sequence[int]
    ) -> tuple[Rows, _Beam]:
        """The same on the CPU, where sequences are numbers in Python; without the last hashes."""
        batch_size, _, _ = am_NTD.shape
        rows, vocab_size = batch_size * self.beam_size, self.model.vocab_size
        blank = self.model.predictor.blank
        host = HostBeam(self.model, batch_size, self.beam_size)
        first_R = [row - row % self.beam_size for row in range(rows)]
        parents, emitted, added = [], [], []
        for t in range(am_NTD.size(1)):
            alive = [t < length for length in lengths]
            alive_N11 = None if all(alive) else torch.tensor(alive)[:, None, None]
            scores_NBV = self._scores(beam, am_NTD[:, t], alive_N11)
            candidates = (beam.score_NB.unsqueeze(-1) + scores_NBV).flatten(1)
            score_NB, index_NB = candidates.topk(self.beam_size, dim=1)
            added.append(scores_NBV.flatten(1).gather(1, index_NB))
            index_R = index_NB.flatten().tolist()
            symbol_R = [index % vocab_size for index in index_R]
            parents.append([index // vocab_size for index in index_R])
            emitted.append([-1 if symbol == blank else symbol for symbol in symbol_R])
            parent_R = [first + own for first, own in zip(first_R, parents[-1], strict=True)]
            if host.grow(parent_R, symbol_R):
                merged = host.merged(score_NB.flatten().tolist())
                if merged is not None:
                    score_NB = torch.tensor(merged, dtype=score_NB.dtype).view_as(score_NB)
                scorers = self._grown_scorers(beam.scorers, parent_R, symbol_R)
                beam = beam._replace(predictor=(host.predicted_RD,), scorers=scorers)
            beam = beam._replace(score_NB=score_NB)
        shape = (-1, batch_size, self.beam_size)
        steps = tuple(torch.tensor(each).view(shape).transpose(0, 1) for each in (parents, emitted))
        added_NTB = torch.stack(added, dim=1) if added else beam.score_NB[:, None][:, :0]
        length_NB = torch.tensor(host.lengths).view(shape[1:])
        context = beam.hash_NB.flatten()[:, None]  # the state of the predictor is not used again
        return (*steps, added_NTB), beam._replace(
            length_NB=length_NB, predictor=(beam.predictor[0], context)
        )

    def _grown_scorers(
        self, scorers: Sequence[Rows], parents: Sequence[int], symbols: Sequence[int]
    ) -> tuple[Rows, ...]:
        """The states of the scorers after rows were chosen and symbols appended."""
        if not scorers:
            return ()
        parent_R, symbol_R = torch.tensor(parents), torch.tensor(symbols)
        emits_R = symbol_R != self.model.predictor.blank
        taken = [take_rows(rows, parent_R) for rows in scorers]
        return advance_scorers(self.scorers, taken, symbol_R, emits_R)

    def _start(self, am_NTD: Tensor) -> _Beam:
        """One empty hypothesis per utterance; the other rows have probability 0."""
        shape, device = (am_NTD.size(0), self.beam_size), am_NTD.device
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

    def _scores(self, beam: _Beam, am_ND: Tensor, alive_N11: Tensor | None) -> Tensor:
        """(N, B, V): increase of the score of each hypothesis by each next symbol.

        Utterances that have ended can only add blanks, with a score of 0; None: none has.
        """
        blank = self.model.predictor.blank
        lm_NBD = beam.predictor[0].unflatten(0, beam.score_NB.shape)
        logits_NBV = self.model.joiner(am_ND[:, None].expand_as(lm_NBD), lm_NBD)
        scores_NBV = joint_log_probs(logits_NBV, blank, self.model.loss_config.hat)
        scores_NBV = scores_NBV.masked_fill(self._silent_V, -torch.inf)
        if self.scorers or self.ilm_scale:
            fusion_NBV = torch.zeros_like(scores_NBV)
            for scorer, rows in zip(self.scorers, beam.scorers, strict=True):
                fusion_NBV += scorer.scores(rows).view_as(scores_NBV)
            if self.ilm_scale:
                fusion_NBV -= self.ilm_scale * self._internal_lm(lm_NBD)
            fusion_NBV[..., blank] = 0.0
            scores_NBV = scores_NBV + fusion_NBV
        if alive_N11 is None:
            return scores_NBV
        only_blank_V = torch.full_like(scores_NBV[0, 0], -torch.inf)
        only_blank_V[blank : blank + 1].fill_(0.0)
        return torch.where(alive_N11, scores_NBV, only_blank_V)

    def _internal_lm(self, lm_NBD: Tensor) -> Tensor:
        """Log-probabilities of the symbols for zero encoder output; 0 for blank."""
        logits_NBV = self.model.joiner(torch.zeros_like(lm_NBD), lm_NBD).float()
        logits_NBV[..., self.model.predictor.blank] = -torch.inf
        log_probs_NBV: Tensor = logits_NBV.log_softmax(dim=-1)
        log_probs_NBV[..., self.model.predictor.blank] = 0.0
        return log_probs_NBV

    def _grow(self, beam: _Beam, scores_NBV: Tensor) -> tuple[_Beam, BeamStep]:
        """Extend all hypotheses by blank or a symbol and keep the best B."""
        batch_size, _, vocab_size = scores_NBV.shape
        candidates = (beam.score_NB.unsqueeze(-1) + scores_NBV).flatten(1)
        score_NB, index_NB = candidates.topk(self.beam_size, dim=1)
        parent_NB, symbol_NB = index_NB // vocab_size, index_NB % vocab_size
        emits_NB = symbol_NB != self.model.predictor.blank
        hash_NB = beam.hash_NB.gather(1, parent_NB)
        hash_NB = torch.where(emits_NB, hash_after(hash_NB, symbol_NB), hash_NB)
        first_N1 = torch.arange(batch_size, device=score_NB.device)[:, None] * self.beam_size
        parent_R, symbol_R = (first_N1 + parent_NB).flatten(), symbol_NB.flatten()
        emits_R = emits_NB.flatten()
        predictor = take_rows(beam.predictor, parent_R)
        scorers = [take_rows(rows, parent_R) for rows in beam.scorers]
        grown = _Beam(
            merge_equal(score_NB, hash_NB),
            hash_NB,
            beam.length_NB.gather(1, parent_NB) + emits_NB,
            advance_predictor(self.model, predictor, symbol_R, emits_R),
            advance_scorers(self.scorers, scorers, symbol_R, emits_R),
        )
        added_NB = scores_NBV.flatten(1).gather(1, index_NB)
        return grown, BeamStep(parent_NB, torch.where(emits_NB, symbol_NB, -1), added_NB)
