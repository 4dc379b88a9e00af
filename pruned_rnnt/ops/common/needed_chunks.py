"""Leaves out chunks without rows, if the host happens to know their number without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class _Arriving:
    """A number on the device on its way to the host. None while it has not arrived, and always in
    the capture of a CUDA graph, which replays with other numbers."""

    def __init__(self, number: Tensor):
        self._event: torch.cuda.Event | None = None
        self._copy = number
        if number.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._copy = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._event = torch.cuda.current_stream(number.device).record_event()

    def value(self) -> int | None:
        if self._copy.is_cuda or not (self._event is None or self._event.query()):
            return None
        return int(self._copy)


def needed_chunks(total: Tensor, chunk_rows: int, chunks: int) -> Iterator[int]:
    """The numbers of the chunks of `total` rows (a scalar), chunk_rows in each; at most `chunks`,
    at least one.

    Chunks without rows come too as long as the total has not arrived at the host, so they must do
    no harm: a host that is behind the device saves their launches, one that is ahead has the time.
    """
    arriving = _Arriving(total)
    for chunk in range(chunks):
        if chunk > 0:
            known = arriving.value()
            if known is not None and chunk * chunk_rows >= known:
                return
        yield chunk
