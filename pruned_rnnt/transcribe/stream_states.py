"""The states of many streams on the device, each in a slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows, take_rows


class StateSlots:
    """Tensors with one row for each stream; they grow to the most streams at a time.

    Args:
        start: the state of one stream at its start, with the stream on axis 0.
        restarted: the last tensors of these, which `restart` sets.
    """

    def __init__(self, start: Rows, restarted: int) -> None:
        self._start = start
        self._restarted = restarted
        self._tensors = tuple(x[:0] for x in start)
        self._free: list[int] = []

    def take(self) -> int:
        """A slot for a new stream, with the state at its start."""
        if not self._free:
            used = len(self._tensors[0])
            added = max(used, 1)
            self._tensors = tuple(
                torch.cat((own, one.expand(added, *one.shape[1:])))
                for own, one in zip(self._tensors, self._start, strict=True)
            )
            self._free = list(range(used + added - 1, used - 1, -1))
            return self._free.pop()
        slot = self._free.pop()
        self._set([slot], 0)
        return slot

    def release(self, slot: int) -> None:
        """Return the slot of a stream that has left."""
        self._free.append(slot)

    def restart(self, slots: Sequence[int]) -> None:
        """Set the last tensors to those at the start of a stream."""
        self._set(slots, len(self._start) - self._restarted)

    def read(self, slots_N: Tensor) -> Rows:
        """The states of streams, with N on axis 0."""
        return take_rows(self._tensors, slots_N)

    def write(self, slots_N: Tensor, state: Rows) -> None:
        """Set the states of streams."""
        for own, new in zip(self._tensors, state, strict=True):
            own.index_copy_(0, slots_N, new.to(own.dtype))

    def _set(self, slots: Sequence[int], first: int) -> None:
        slots_N = torch.tensor(slots, device=self._start[0].device)
        for own, one in zip(self._tensors[first:], self._start[first:], strict=True):
            own.index_copy_(0, slots_N, one.expand(len(slots), *one.shape[1:]))
