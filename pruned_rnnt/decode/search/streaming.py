"""Decode streams chunk by chunk: a chunk of features and a state in, paths and a state out.

Axes: N streams, T feature frames, F mel bins, C encoder frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.search.interface import ChunkSearch, Continuation, Hypothesis, StreamSearch
from pruned_rnnt.decode.search.states import Rows
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.inference_graphs import StreamGraphs
from pruned_rnnt.model.speech_model import SpeechModel


class Arc(NamedTuple):
    """A symbol, the frame of the stream at which it was emitted, its log-probability, and the
    frames by which it advanced, None for models without durations."""

    symbol: int
    frame: int
    score: float
    duration: int | None


class StreamPath:
    """The best path of a stream, and how much of it can still change.

    Attributes:
        best: the best path.
        settled: number of its arcs that all paths of the search begin with.
        stable: number of its symbols that all paths begin with, maybe at other frames.
        frame: number of encoder frames that were searched.
        score: log-probability of the path since the start of the search.
    """

    def __init__(self) -> None:
        self.frame = 0
        self.restart()

    def restart(self) -> None:
        """Forget all paths, as a search that starts again does."""
        self.best: list[Arc] = []
        self.settled = self.stable = 0
        self.score = 0.0
        # What follows the settled arcs, by the row of each path.
        self._rests: dict[int, list[Arc]] = {0: []}

    def extend(self, found: Sequence[Continuation], frames: int) -> None:
        """Add the paths after the next `frames` frames, best first."""
        if found:
            rests = {
                path.row: [*self._rests[path.origin], *_arcs(path.part, self.frame)]
                for path in found
            }
            best = rests[found[0].row]
            common = _in_common(rests.values(), lambda arc: arc)
            self.best[self.settled :] = best
            self.stable = self.settled + _in_common(rests.values(), lambda arc: arc.symbol)
            self.settled += common
            self._rests = {row: rest[common:] for row, rest in rests.items()}
            self.score = found[0].part.score
        self.frame += frames

    def drop(self, count: int) -> list[Arc]:
        """Remove the first arcs, which must be settled, and return them."""
        assert count <= self.settled
        dropped, self.best = self.best[:count], self.best[count:]
        self.settled -= count
        self.stable -= count
        return dropped

    def hypothesis(self) -> Hypothesis:
        """The best path."""
        return Hypothesis(
            symbols=tuple(arc.symbol for arc in self.best),
            frames=tuple(arc.frame for arc in self.best),
            score=self.score,
            symbol_scores=tuple(arc.score for arc in self.best),
            durations=tuple(arc.duration for arc in self.best if arc.duration is not None),
        )


def _arcs(part: Hypothesis, begin: int) -> list[Arc]:
    durations = part.durations or (None,) * len(part.symbols)
    columns = (part.symbols, part.frames, part.symbol_scores, durations)
    return [
        Arc(symbol, begin + frame, score, duration)
        for symbol, frame, score, duration in zip(*columns, strict=True)
    ]


def _in_common(paths: Collection[Sequence[Arc]], key: Callable[[Arc], object]) -> int:
    """The number of arcs at the beginning whose keys are the same in all paths."""
    columns = zip(*paths, strict=False)
    return sum(1 for _ in takewhile(lambda arcs: len({key(arc) for arc in arcs}) == 1, columns))


class StreamDecoder:
    """A causal model and a search that decode audio chunk by chunk.

    The state of streams is a tuple of tensors with the streams on axis 0: those of the encoder,
    then those of the search.

    Args:
        model: in evaluation mode, with a causal encoder; its modules are used, not copied.
        search: of this model.
        chunk_size: C, encoder frames (40 ms) of a chunk.
        left_frames: encoder frames of left context for attention.
        precision: dtype of the encoder's matrix products.
        with_head: also give the symbols that the CTC head prefers, if the model has one.

    Raises:
        ValueError: as `stream_encoder`.
    """

    def __init__(
        self,
        model: SpeechModel,
        search: StreamSearch,
        chunk_size: int,
        left_frames: int,
        precision: torch.dtype = torch.float32,
        *,
        with_head: bool = False,
    ) -> None:
        self.model = model
        self._head = model.ctc_head if with_head else None
        self.search = search
        self.encoder = stream_encoder(model.encoder, chunk_size, left_frames)
        self._precision = precision
        self._graphs = StreamGraphs()
        self._encoder_tensors = len(self.encoder.pack(self.encoder.start(0)))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def start(self, streams: int) -> Rows:
        """The state at the start of streams."""
        return *self.encoder.pack(self.encoder.start(streams)), *self.start_search(streams)

    def start_search(self, streams: int) -> Rows:
        """The part of the state that belongs to the search, at the end of the tuple."""
        return self.search.start_streams(streams, self.device)

    @torch.inference_mode()
    def chunk(
        self, features_NTF: Tensor, state: Rows, lengths: Tensor | None = None
    ) -> ChunkSearch:
        """Decode the next chunk of every stream.

        Args:
            features_NTF: (N, T, F) with T = `encoder.input_frames`; chunks start `encoder.shift`
                frames apart.
            lengths: (N,) valid feature frames, if streams end in this chunk; None: all are valid.
        """
        encoder_state, search_state = self.parts(state)
        encoded_NCE, encoder_state = self.encode(features_NTF, encoder_state, lengths)
        found = self.search_chunk(encoded_NCE, lengths, search_state)
        return found._replace(state=(*encoder_state, *found.state))

    def parts(self, state: Rows) -> tuple[Rows, Rows]:
        """The state of the encoder, and that of the search."""
        return state[: self._encoder_tensors], state[self._encoder_tensors :]

    def encode(
        self, features_NTF: Tensor, state: Rows, lengths: Tensor | None
    ) -> tuple[Tensor, Rows]:
        """The encoder's part of `chunk`: (N, C, E) float32, and its state."""
        # Fused kernels and CUDA graphs need the model's device to be the current one.
        with (
            torch.cuda.device_of(features_NTF),
            torch.autocast(
                self.device.type, self._precision, enabled=self._precision != torch.float32
            ),
        ):
            if self.model.inference_graphs is not None:
                encoded_NCE, after = self._graphs(self.encoder, features_NTF, state, lengths)
            else:
                encoded_NCE, new = self.encoder(features_NTF, self.encoder.unpack(state), lengths)
                after = self.encoder.pack(new)
        return encoded_NCE.float(), after

    def search_chunk(self, encoded_NCE: Tensor, lengths: Tensor | None, state: Rows) -> ChunkSearch:
        """The search's part of `chunk`, and its state."""
        frames_N = self.output_lengths(lengths, len(encoded_NCE)).to(encoded_NCE.device)
        found = self.search.search_chunk(encoded_NCE, frames_N, state)
        head_NC = None if self._head is None else self._head(encoded_NCE).argmax(dim=2)
        return found._replace(head_NC=head_NC)

    def output_lengths(self, lengths: Tensor | None, streams: int) -> Tensor:
        """(N,) encoder frames of a chunk with `lengths` valid feature frames."""
        if lengths is None:
            return torch.full((streams,), self.encoder.chunk_size)
        return self.encoder.output_length(lengths)

    @torch.inference_mode()
    def recognise(self, features_NTF: Tensor, feature_lengths: Tensor) -> list[Hypothesis]:
        """Decode whole utterances (N, T, F) chunk by chunk; frames count from their start."""
        streams, num_frames, _ = features_NTF.shape
        encoder, state = self.encoder, self.start(streams)
        paths = [StreamPath() for _ in range(streams)]
        remaining = dict(enumerate(paths))
        for begin in range(0, max(num_frames, 1), encoder.shift):
            chunk_NTF = features_NTF[:, begin : begin + encoder.input_frames]
            missing = encoder.input_frames - chunk_NTF.size(1)
            chunk_NTF = nn.functional.pad(chunk_NTF, (0, 0, 0, missing))
            left_N = (feature_lengths - begin).clamp(0, encoder.input_frames)
            state, found, _ = self.chunk(chunk_NTF, state, left_N.to(features_NTF.device))
            continued, frames = found.result(), self.output_lengths(left_N, streams).tolist()
            for n, path in list(remaining.items()):
                path.extend(continued[n], frames[n])
                if frames[n] < encoder.chunk_size:
                    del remaining[n]
        return [path.hypothesis() for path in paths]
