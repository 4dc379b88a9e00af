"""The result of a search, and searches whose results are read later, so that the host can launch
the next batch meanwhile.

Axes: N batch, T encoder frames, E encoder width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pruned_rnnt.system.host_copy import HostCopy

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One decoded symbol sequence.

    symbols: ids, without blanks.
    frames: the encoder frame at which each symbol was emitted.
    score: natural log-probability: of the path for greedy search, of all paths kept in the beam for
        beam search.
    symbol_scores: increase of the score by each symbol at its frame, without its duration.
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
