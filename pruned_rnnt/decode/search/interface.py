"""What all searches share: results that are read later, so that the host can launch the next batch
meanwhile; streams, in which a search continues from chunk to chunk; and checks of arguments.

Axes: N batch or streams, T encoder frames, C encoder frames of a chunk, E encoder width.

Between the chunks of a stream, the device keeps the state of the search, tensors with the streams
on axis 0. The sequences themselves are on the host: a chunk continues paths of the chunk before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from pruned_rnnt.decode.search.states import Rows
from pruned_rnnt.system.device import HostCopy

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One decoded symbol sequence.

    symbols: ids, without blanks.
    frames: the encoder frame at which each symbol was emitted.
    score: natural log-probability: of the path for greedy search, of all paths kept in the beam for
        beam search.
    symbol_scores: log-probability that the model gives each symbol at its frame, without its
        duration and without the scores of other models or hotwords.
    durations: frames by which each symbol advanced; empty for models without durations.
    """

    symbols: tuple[int, ...]
    frames: tuple[int, ...]
    score: float
    symbol_scores: tuple[float, ...]
    durations: tuple[int, ...] = ()


class Pending(Generic[_Result]):
    """A result of work that was launched on a device; only `result` waits for it.

    Args:
        tensors: what the result is made of; their copies to the host start at once.
        finish: makes the result of these tensors on the CPU.
    """

    def __init__(
        self, tensors: Sequence[Tensor], finish: Callable[[Sequence[Tensor]], _Result]
    ) -> None:
        self._copy = HostCopy(tensors)
        self._finish = finish

    def result(self) -> _Result:
        return self._finish(self._copy.tensors())

    def map(self, function: Callable[[_Result], _Other]) -> Pending[_Other]:
        """The result of `function` for this result; the copies are shared."""
        mapped: Pending[_Other] = Pending((), lambda _: function(self.result()))
        return mapped


class DeviceSearch(ABC, Generic[_Result]):
    """A search of whole utterances that does not wait for the device before its end."""

    @abstractmethod
    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[_Result]:
        """Launch the search of a batch; arguments as for a call."""

    @torch.inference_mode()
    def __call__(self, encoded_NTE: Tensor, lengths: Tensor) -> _Result:
        """Decode whole utterances.

        Args:
            encoded_NTE: (N, T, E) output of `model.encode`.
            lengths: (N,) integer encoder frames.
        """
        return self.launch(encoded_NTE, lengths).result()


class Continuation(NamedTuple):
    """A path of a stream after a chunk.

    row: its place among the paths that the next chunk continues.
    origin: the row of the path before the chunk that it continues.
    part: what the chunk added, with frames from the start of the chunk; its score is that of the
        whole path.
    """

    row: int
    origin: int
    part: Hypothesis


class ChunkSearch(NamedTuple):
    """The state after a chunk, and the paths of each stream, best first.

    head_NC: (N, C) the symbol that the CTC head prefers in each frame; from a `StreamDecoder` with
        `with_head` alone, of a model that has one.
    """

    state: Rows
    found: Pending[list[list[Continuation]]]
    head_NC: Tensor | None = None


class StreamSearch(ABC):
    """A search that can stop after any chunk and continue from its state."""

    @abstractmethod
    def start_streams(self, streams: int, device: torch.device) -> Rows:
        """The state at the start of streams, which have one path, without symbols, in row 0."""

    @abstractmethod
    def search_chunk(self, encoded_NCE: Tensor, lengths_N: Tensor, state: Rows) -> ChunkSearch:
        """Search the next frames of streams.

        Args:
            lengths_N: integer, on the device of `encoded_NCE`; a stream with fewer than C ends.
            state: before these frames, from `start_streams` or from the last call.
        """


def check_beam(beam_size: int, num_best: int) -> None:
    """Raise ValueError unless 1 <= num_best <= beam_size."""
    if beam_size < 1 or not 1 <= num_best <= beam_size:
        raise ValueError(
            f"decode.beam_size is {beam_size} and decode.num_best is {num_best}, need 1 <= "
            "decode.num_best <= decode.beam_size"
        )


def check_max_symbols(max_symbols_per_frame: int) -> None:
    """Raise ValueError for a maximum below 1."""
    if max_symbols_per_frame < 1:
        raise ValueError(f"max_symbols_per_frame is {max_symbols_per_frame}, needs at least 1")


def silent_mask(vocab_size: int, silent_symbols: Iterable[int]) -> Tensor:
    """(vocab_size,) bool on the CPU: True for symbols that a search does not emit."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool)
    mask_V[list(silent_symbols)] = True
    return mask_V
