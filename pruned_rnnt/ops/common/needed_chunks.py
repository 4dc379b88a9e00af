"""Leaves out chunks without rows, if the host happens to know their number without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pruned_rnnt.host_copy import HostCopy


def needed_chunks(total: Tensor, chunk_rows: int, chunks: int) -> Iterator[int]:
    """The numbers of the chunks of `total` rows (a scalar), chunk_rows in each; at most `chunks`,
    at least one.

    Chunks without rows come too as long as the total has not arrived at the host, so they must do
    no harm: a host that is behind the device saves their launches, one that is ahead has the time.
    """
    if total.is_cuda and torch.cuda.is_current_stream_capturing():
        # A graph replays with other totals.
        yield from range(chunks)
        return
    copy = HostCopy([total])
    for chunk in range(chunks):
        if chunk > 0 and copy.arrived() and chunk * chunk_rows >= int(copy.tensors()[0]):
            return
        yield chunk
