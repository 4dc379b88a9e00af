"""Greedy search for token-and-duration transducers (TDT, arXiv 2304.06795), in batches.

Axes: N batch, R rows of the walk (R >= N), T encoder frames, E encoder width, D joiner width,
M maximum symbols per frame, V vocabulary, K durations.

Every stream has a frame of its own: a step takes the most probable symbol or blank and the most
probable duration there, and advances the stream by that duration, so that a batch takes as many
steps as its longest path has arcs, not as many as there are frames. On CUDA, blocks of steps are
replayed as a graph; after each block the host reads whether any stream has frames left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.frame_graph import graph_rows
from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, SearchByFrames
from pruned_rnnt.decode.search.interface import check_max_symbols, silent_mask
from pruned_rnnt.decode.search.states import Rows, advance_predictor, start_predictor
from pruned_rnnt.model.captured_passes import CAPTURE_AT, SharedBuffers, captured
from pruned_rnnt.model.speech_model import TransducerModel

# Default of max_symbols_per_frame, which sherpa-onnx uses.
SHERPA_MAX_SYMBOLS = 5
# Steps of a block.
_BLOCK_STEPS = 32
# Frames of a graph: a power of two, at least this, so that few graphs are needed.
_LEAST_FRAMES = 32


class _Arc(NamedTuple):
    """The arc that each row takes, (R,): the most probable symbol, whether it counts as blank, its
    log-probability, the duration in frames, and the duration's log-probability."""

    symbol: Tensor
    silent: Tensor
    score: Tensor
    duration: Tensor
    duration_score: Tensor


class TdtGreedySearch(SearchByFrames):
    """Follows the most probable symbol and the most probable duration at every node: one path.

    A blank of duration 0 and the last of `max_symbols_per_frame` symbols advance by the shortest
    other duration instead, as in sherpa-onnx. A path ends at the first frame beyond the utterance.
    Use one object for many batches: it keeps the captured CUDA graphs. These refer to the memory
    of the model's parameters, so create a new object after parameters are moved or replaced.

    Args:
        model: in evaluation mode, trained with loss.durations.
        max_symbols_per_frame: M, at least 1.
        silent_symbols: ids that are treated as blank when they are the most probable (such as
            `<unk>`).

    Raises:
        ValueError: max_symbols_per_frame is below 1.
    """

    def __init__(
        self,
        model: TransducerModel,
        *,
        max_symbols_per_frame: int = SHERPA_MAX_SYMBOLS,
        silent_symbols: Sequence[int] = (),
    ) -> None:
        check_max_symbols(max_symbols_per_frame)
        self.model = model
        self.max_symbols_per_frame = max_symbols_per_frame
        silent = [model.predictor.blank, *silent_symbols]
        self._silent_V = silent_mask(model.vocab_size, silent)
        durations = model.loss_config.durations
        self._durations_K = torch.tensor(durations)
        self._shortest_index = durations.index(min(x for x in durations if x > 0))
        self._walks: dict[tuple[int, int], _GraphWalk] = {}
        self._counts: Counter[tuple[int, int]] = Counter()
        self._buffers: SharedBuffers | None = None

    def start(self, streams: int, device: torch.device) -> Rows:
        """The state before the first frame: that of the predictor, and the number of frames that
        the last duration skips of those that follow."""
        skipped_N = torch.zeros(streams, dtype=torch.int64, device=device)
        return *start_predictor(self.model, streams, device), skipped_N

    @torch.inference_mode()
    def frames(self, encoded_NTE: Tensor, lengths_N: Tensor, state: Rows) -> GreedyFrames:
        """Decode the next frames of streams.

        Args:
            lengths_N: integer, on the device of `encoded_NTE`.
            state: before these frames, from `start` or from the last call.
        """
        am_NTD = self.model.joiner.encoder_proj(encoded_NTE)
        # Like the other searches, cut lengths that an encoder gives beyond its frames.
        lengths_N = lengths_N.clamp(max=am_NTD.size(1))
        if self._silent_V.device != am_NTD.device:
            self._silent_V = self._silent_V.to(am_NTD.device)
            self._durations_K = self._durations_K.to(am_NTD.device)
            self._walks.clear()
            self._buffers = None
        walk = self._walk(am_NTD, state)
        walk.begin(am_NTD, lengths_N, state)
        walk.run()
        return walk.results(*am_NTD.shape[:2])

    def _walk(self, am_NTD: Tensor, state: Rows) -> _Walk:
        """A graph for these inputs; single steps on the CPU, and for few frames that are rare."""
        rows, frames, _ = am_NTD.shape
        if not am_NTD.is_cuda:
            return _Walk(self, (rows, frames), am_NTD, state)
        size = graph_rows(rows), graph_rows(max(frames, _LEAST_FRAMES))
        if size not in self._walks:
            self._counts[size] += 1
            if frames <= _LEAST_FRAMES and self._counts[size] < CAPTURE_AT:
                return _Walk(self, (rows, frames), am_NTD, state)
            # The graphs would take gigabytes if each had inputs and results of its own.
            self._buffers = self._buffers or SharedBuffers(am_NTD.device)
            self._walks[size] = _GraphWalk(self, size, am_NTD, state, self._buffers)
        return self._walks[size]

    def arc(self, am_RD: Tensor, lm_RD: Tensor, taken_R: Tensor) -> _Arc:
        """The arc of each row; taken_R: number of symbols that it has emitted in this frame."""
        logits_RV, duration_logits_RK = self.model.joiner.with_durations(am_RD, lm_RD)
        best_R, symbol_R = logits_RV.float().log_softmax(dim=-1).max(dim=-1)
        silent_R = self._silent_V[symbol_R]
        log_durations_RK = duration_logits_RK.float().log_softmax(dim=-1)
        index_R = log_durations_RK.argmax(dim=-1)
        stays_R = self._durations_K[index_R] == 0
        must_leave_R = silent_R | (taken_R + 1 >= self.max_symbols_per_frame)
        index_R = index_R.masked_fill(stays_R & must_leave_R, self._shortest_index)
        added_R = log_durations_RK.gather(1, index_R[:, None])[:, 0]
        return _Arc(symbol_R, silent_R, best_R, self._durations_K[index_R], added_R)


class _Walk:
    """The frames, states and results of R rows, which `advance` changes in place.

    The results of an arc are stored by its frame and the number of symbols before it in that frame.
    Rows that have ended write to one more place at the end.

    Args:
        size: R and the most frames T.
        am_NTD, state: example inputs; only their dtypes, device and widths are used.
        buffers: of the frames and results; walks that share them run one after the other. None for
            its own.
    """

    def __init__(
        self,
        search: TdtGreedySearch,
        size: tuple[int, int],
        am_NTD: Tensor,
        state: Rows,
        buffers: SharedBuffers | None = None,
    ) -> None:
        buffers = buffers or SharedBuffers(am_NTD.device)
        self._search = search
        rows, frames = size
        most = search.max_symbols_per_frame
        width = am_NTD.size(2)
        self._am_RTD = buffers.part("am", (rows, max(frames, 1), width), am_NTD.dtype)
        self._length_R, self._frame_R, self._taken_R = state[-1].new_zeros(3, rows).unbind(0)
        self._predictor = tuple(x.new_zeros(rows, *x.shape[1:]) for x in state[:-1])
        shape = (rows, frames * most + 1)
        self._symbols, self._durations = buffers.part("symbols", (2, *shape), torch.int64).unbind(0)
        self._scores, self._duration_scores = buffers.part(
            "scores", (2, *shape), torch.float32
        ).unbind(0)

    def begin(self, am_NTD: Tensor, lengths_N: Tensor, state: Rows) -> None:
        """Set the inputs of N <= R rows."""
        batch_size, frames, _ = am_NTD.shape
        self._am_RTD[:batch_size, :frames].copy_(am_NTD)
        self._length_R.zero_()[:batch_size].copy_(lengths_N)
        for own, given in zip((*self._predictor, self._frame_R), state, strict=True):
            own.zero_()[:batch_size].copy_(given)
        self._taken_R.zero_()
        self._symbols.fill_(-1)
        self._durations.zero_()
        self._scores.zero_()
        self._duration_scores.zero_()

    def run(self) -> None:
        """Advance until all rows have ended."""
        while bool(self._has_frames_left().any()):
            self._advance_block()

    def _has_frames_left(self) -> Tensor:
        return self._frame_R < self._length_R

    def _advance_block(self) -> None:
        """The steps between two reads from the device."""
        self.advance()

    def advance(self) -> None:
        """One arc in every row that has not ended."""
        search = self._search
        alive_R = self._has_frames_left()
        most, last = search.max_symbols_per_frame, self._symbols.size(1) - 1
        at_R = self._frame_R.clamp(max=self._am_RTD.size(1) - 1)
        am_RD = self._am_RTD[torch.arange(len(at_R), device=at_R.device), at_R]
        arc = search.arc(am_RD, self._predictor[0], self._taken_R)
        emits_R = alive_R & ~arc.silent
        place_R1 = torch.where(alive_R, self._frame_R * most + self._taken_R, last)[:, None]
        symbol_R = torch.where(emits_R, arc.symbol, -1)
        self._symbols.scatter_(1, place_R1, symbol_R[:, None])
        self._durations.scatter_(1, place_R1, arc.duration[:, None])
        self._scores.scatter_(1, place_R1, arc.score[:, None])
        self._duration_scores.scatter_(1, place_R1, arc.duration_score[:, None])
        advanced = advance_predictor(search.model, self._predictor, arc.symbol, emits_R)
        for own, new in zip(self._predictor, advanced, strict=True):
            own.copy_(new)
        stays_R = arc.duration == 0
        self._taken_R.copy_(torch.where(stays_R, self._taken_R + emits_R, 0))
        self._frame_R.add_(arc.duration * alive_R)

    def results(self, batch_size: int, frames: int) -> GreedyFrames:
        """Results of the first N rows and T frames, and the state after them."""
        most = self._search.max_symbols_per_frame
        symbols, scores, durations, duration_scores = (
            x[:batch_size, : frames * most].reshape(batch_size, frames, most).clone()
            for x in (self._symbols, self._scores, self._durations, self._duration_scores)
        )
        skipped_R = (self._frame_R - self._length_R).clamp(min=0)
        state = tuple(x[:batch_size].clone() for x in (*self._predictor, skipped_R))
        return GreedyFrames(symbols, scores, state, durations, duration_scores)


class _GraphWalk(_Walk):
    """Advances by blocks of steps that are captured as a CUDA graph."""

    def __init__(
        self,
        search: TdtGreedySearch,
        size: tuple[int, int],
        am_NTD: Tensor,
        state: Rows,
        buffers: SharedBuffers,
    ) -> None:
        super().__init__(search, size, am_NTD, state, buffers)
        self._graph, _ = captured(self._block, am_NTD.device)

    def _block(self) -> None:
        for _ in range(_BLOCK_STEPS):
            self.advance()

    def _advance_block(self) -> None:
        self._graph.replay()
