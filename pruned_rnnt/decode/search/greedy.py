"""Greedy search for batches, without synchronising with the device before the end.

Axes: N batch, T encoder frames, E encoder width, D joiner width, M maximum symbols per frame,
V vocabulary, A utterances that have not ended, K frames of a span.

A compiled op searches the frames, for models that it takes (`compiled_search`). There are two loops
for others, such as those with an LSTM.

On CUDA the loop over frames has a fixed number of iterations and masks utterances that have ended,
so that nothing is read from the device until the end. Blocks of frames are replayed as a graph,
because launching the small kernels one by one would take most of the time.

On the CPU, reading a result costs nothing. `_greedy_spans` runs the predictor once per symbol and
the joiner once per span of frames: until the next symbol, the predictor's output does not change,
so one matrix product computes the next few frames, and those after the first symbol are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pruned_rnnt.decode.search.compiled_search import compiled_model
from pruned_rnnt.decode.search.frame_graph import FrameGraphs, FrameLoop
from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, SearchByFrames
from pruned_rnnt.decode.search.interface import Hypothesis, check_max_symbols, silent_mask
from pruned_rnnt.decode.search.states import Rows, advance_predictor, start_predictor, take_rows
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from pruned_rnnt.ops.search.search_frames import PredictorState, SearchModel, greedy_frames

# Speech has about eight frames per symbol. With many utterances, matrix products are large anyway.
_SPAN, _SPAN_OF_MANY, _MANY = 8, 4, 16


class GreedySearch(SearchByFrames):
    """Follows the most probable symbol at every node: one path.

    Use one object for many batches: it may keep captured CUDA graphs. These refer to the memory
    of the model's parameters, so create a new object after parameters are moved or replaced.

    Args:
        model: in evaluation mode.
        max_symbols_per_frame: M; after M symbols the search continues with the next frame.
            It must be 1 for models of all topologies except 'regular', which learn to emit one
            per frame and would repeat it. sherpa-onnx always uses 1.
        silent_symbols: ids that are treated as blank when they are the most probable (such as
            `<unk>`).

    Raises:
        ValueError: max_symbols_per_frame is below 1, or above 1 for a topology other than
            'regular'; or the model has durations: use TdtGreedySearch.
    """

    def __init__(
        self,
        model: TransducerModel,
        *,
        max_symbols_per_frame: int = 1,
        silent_symbols: Sequence[int] = (),
    ) -> None:
        check_max_symbols(max_symbols_per_frame)
        if model.loss_config.durations:
            raise ValueError("the model has durations: use TdtGreedySearch")
        rnnt_type = model.loss_config.rnnt_type
        if max_symbols_per_frame > 1 and rnnt_type != "regular":
            raise ValueError(
                f"max_symbols_per_frame is {max_symbols_per_frame}, needs 1: a model trained with "
                f"loss.rnnt_type={rnnt_type} emits at most one symbol per frame"
            )
        self.model = model
        self.max_symbols_per_frame = max_symbols_per_frame
        silent = [model.predictor.blank, *silent_symbols]
        self._silent_V = silent_mask(model.vocab_size, silent)
        self._graphs = FrameGraphs()

    def start(self, streams: int, device: torch.device) -> Rows:
        """The state before the first frame: that of the predictor."""
        return start_predictor(self.model, streams, device)

    @torch.inference_mode()
    def frames(self, encoded_NTE: Tensor, lengths_N: Tensor, predictor: Rows) -> GreedyFrames:
        """Decode the next frames of streams; only the first call may synchronise with the device.

        Args:
            lengths_N: integer, on the device of `encoded_NTE`.
            predictor: state before these frames, from `start` or from the last call.
        """
        am_NTD = self.model.joiner.encoder_proj(encoded_NTE)
        if self._silent_V.device != am_NTD.device:
            self._silent_V = self._silent_V.to(am_NTD.device)
            self._graphs.clear()
        model = compiled_model(self.model, self._silent_V, am_NTD)
        loop: FrameLoop = self._spans
        if model is not None:
            loop = partial(self._compiled, model)
        elif am_NTD.is_cuda:
            loop = self._graphs.loop(self._loop, am_NTD, predictor)
        (symbols_NTM, scores_NTM), state = loop(am_NTD, lengths_N, predictor)
        frames = am_NTD.size(1)
        return GreedyFrames(symbols_NTM[:, :frames], scores_NTM[:, :frames], state)

    def _spans(self, am_NTD: Tensor, lengths_N: Tensor, predictor: Rows) -> tuple[Rows, Rows]:
        return _greedy_spans(
            self.model,
            am_NTD,
            lengths_N,
            predictor,
            silent=self._silent_V.tolist(),
            most=self.max_symbols_per_frame,
        )

    def _compiled(
        self, model: SearchModel, am_NTD: Tensor, lengths_N: Tensor, predictor: Rows
    ) -> tuple[Rows, Rows]:
        am_NTD, lengths_N = am_NTD.contiguous(), lengths_N.long().contiguous()
        state = PredictorState(*(x.clone(memory_format=torch.contiguous_format) for x in predictor))
        shape = (*am_NTD.shape[:2], self.max_symbols_per_frame)
        outputs = lengths_N.new_empty(shape), am_NTD.new_empty(shape)
        greedy_frames(am_NTD, lengths_N, model, state, *outputs)
        return outputs, state

    def _loop(self, am_NTD: Tensor, lengths_N: Tensor, predictor: Rows) -> tuple[Rows, Rows]:
        model, most = self.model, self.max_symbols_per_frame
        batch_size, num_frames, _ = am_NTD.shape
        symbols, scores = [], []
        for t in range(num_frames):
            alive_N = lengths_N > t
            for _ in range(most):
                logits_NV = model.joiner(am_NTD[:, t], predictor[0])
                log_probs_NV = joint_log_probs(
                    logits_NV, model.predictor.blank, model.loss_config.hat
                )
                best_N, symbol_N = log_probs_NV.max(dim=-1)
                scores.append(torch.where(alive_N, best_N, 0.0))
                alive_N = alive_N & ~self._silent_V[symbol_N]
                symbols.append(torch.where(alive_N, symbol_N, -1))
                predictor = advance_predictor(model, predictor, symbol_N, alive_N)
        shape = (batch_size, num_frames, most)
        if not symbols:
            empty = lengths_N.new_empty(shape, dtype=torch.int64), am_NTD.new_empty(shape)
            return empty, predictor
        outputs = (torch.stack(symbols, dim=1).view(shape), torch.stack(scores, dim=1).view(shape))
        return outputs, predictor


def greedy_search(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    *,
    max_symbols_per_frame: int = 1,
    silent_symbols: Sequence[int] = (),
) -> list[Hypothesis]:
    """Decode one batch; arguments as for `GreedySearch` and its call."""
    search = GreedySearch(
        model, max_symbols_per_frame=max_symbols_per_frame, silent_symbols=silent_symbols
    )
    return search(encoded_NTE, lengths)


class _Place:
    """Where the search of an utterance is: its frame, and the symbols emitted in this frame."""

    __slots__ = ("count", "end", "frame")

    def __init__(self, end: int) -> None:
        self.frame = self.count = 0
        self.end = end


def _greedy_spans(
    model: TransducerModel,
    am_NTD: Tensor,
    lengths_N: Tensor,
    predictor: Rows,
    *,
    silent: Sequence[bool],
    most: int,
) -> tuple[tuple[Tensor, Tensor], Rows]:
    """Symbols (N, T, M), -1 for none, and their or blanks' log-probabilities; and the new state.

    Args:
        am_NTD: projected encoder output, on the CPU.
        predictor: state before the first frame.
        silent: for each id, whether it is treated as blank.
        most: M.
    """
    batch, frames, _ = am_NTD.shape
    blank, hat = model.predictor.blank, model.loss_config.hat
    symbols = [[-1] * (frames * most) for _ in range(batch)]
    scores = [[0.0] * (frames * most) for _ in range(batch)]
    places = [_Place(min(length, frames)) for length in lengths_N.tolist()]
    active = [n for n in range(batch) if places[n].end > 0]
    while active:
        am_AKD, lm_A1D = _span(am_NTD, predictor[0], active, places)
        log_probs_AKV = joint_log_probs(model.joiner(am_AKD, lm_A1D), blank, hat)
        best_AK, symbol_AK = log_probs_AKV.max(dim=-1)
        emitting, emitted = [], []
        for n, best_K, symbol_K in zip(active, best_AK.tolist(), symbol_AK.tolist(), strict=True):
            place = places[n]
            for best, symbol in zip(best_K, symbol_K, strict=True):
                if place.frame == place.end:
                    break
                index = place.frame * most + place.count
                scores[n][index] = best
                is_silent = silent[symbol]
                if not is_silent:
                    symbols[n][index] = symbol
                    place.count += 1
                if is_silent or place.count == most:
                    place.frame += 1
                    place.count = 0
                if not is_silent:
                    emitting.append(n)
                    emitted.append(symbol)
                    break
        if emitting:
            predictor = _advance(model, predictor, emitting, emitted)
        active = [n for n in active if places[n].frame < places[n].end]
    shape = (batch, frames, most)
    outputs = (
        torch.tensor(symbols, dtype=torch.int64).view(shape),
        torch.tensor(scores, dtype=torch.float32).view(shape),
    )
    return outputs, predictor


def _span(
    am_NTD: Tensor, lm_ND: Tensor, active: Sequence[int], places: Sequence[_Place]
) -> tuple[Tensor, Tensor]:
    """The next K frames of the active utterances, (A, K, D), and their predictor output."""
    if len(active) == 1:
        (n,) = active
        begin = places[n].frame
        return am_NTD[n : n + 1, begin : begin + _SPAN], lm_ND[n : n + 1, None]
    size = _SPAN_OF_MANY if len(active) >= _MANY else _SPAN
    active_A = torch.tensor(active)
    frame_A1 = torch.tensor([[places[n].frame] for n in active])
    frame_AK = (frame_A1 + torch.arange(size)).clamp_(max=am_NTD.size(1) - 1)
    return am_NTD[active_A[:, None], frame_AK], lm_ND[active_A, None]


def _advance(
    model: TransducerModel, predictor: Rows, emitting: Sequence[int], emitted: Sequence[int]
) -> Rows:
    """The predictor after one more symbol of some utterances."""
    symbols_A = torch.tensor(emitted)
    if len(emitting) == len(predictor[0]):
        output_AP, state = model.predictor.step(symbols_A, predictor[1:])
        return model.joiner.decoder_proj(output_AP), *state
    emitting_A = torch.tensor(emitting)
    output_AP, state = model.predictor.step(symbols_A, take_rows(predictor[1:], emitting_A))
    new = (model.joiner.decoder_proj(output_AP), *state)
    return tuple(
        before.index_copy(0, emitting_A, after)
        for before, after in zip(predictor, new, strict=True)
    )
