"""Chunks of many streams through an encoder as CUDA graphs.

A chunk is a second of audio, and its pass as many kernels as that of an hour: without graphs the
host needs longer to launch them than the GPU to compute them. The streams of a step are padded to
few numbers of rows, and a number that occurs often is captured with its state: inputs are copied
into buffers that all graphs share, and outputs out of them.

Axes: N streams, R rows of a graph, T feature frames of a chunk, F mel bins, C encoder frames of a
chunk, E encoder width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.captured_passes import captured
from pruned_rnnt.model.encoder import StreamingEncoder
from pruned_rnnt.model.inference_graphs import FrequentGraphs, GraphMemory
from pruned_rnnt.model.shape_steps import round_up

# More streams keep a GPU busy without a graph, and their states would need more memory twice.
_MOST_ROWS = 256


class _Chunk(NamedTuple):
    """A graph with its inputs and outputs.

    state: input and output, the tensors of `StreamingEncoder.pack`.
    """

    graph: torch.cuda.CUDAGraph
    features_RTF: Tensor
    lengths_R: Tensor
    state: tuple[Tensor, ...]
    encoded_RCE: Tensor


class StreamGraphs(FrequentGraphs[_Chunk]):
    """Runs a streaming encoder in evaluation mode; results equal its own within rounding."""

    def __call__(
        self,
        encoder: StreamingEncoder,
        features_NTF: Tensor,
        state: tuple[Tensor, ...],
        lengths: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Like the encoder's `forward`, with packed states."""
        streams = features_NTF.size(0)
        rows = round_up(streams, 1, steps=2)
        found = None
        if streams > 0 and rows <= _MOST_ROWS:
            found = self.find(
                encoder,
                rows,
                lambda memory: _captured_chunk(memory, rows, encoder, features_NTF, state),
            )
        if found is None:
            encoded_NCE, after = encoder(features_NTF, encoder.unpack(state), lengths)
            return encoded_NCE, encoder.pack(after)
        # What earlier streams left in the rows beyond N affects no other row.
        found.features_RTF[:streams].copy_(features_NTF)
        found.lengths_R.fill_(features_NTF.size(1))
        if lengths is not None:
            found.lengths_R[:streams].copy_(lengths)
        inputs = [own[:streams] for own in found.state]
        torch._foreach_copy_(inputs, list(state))
        found.graph.replay()
        return found.encoded_RCE[:streams].clone(), tuple(own.clone() for own in inputs)


def _captured_chunk(
    memory: GraphMemory,
    rows: int,
    encoder: StreamingEncoder,
    features_NTF: Tensor,
    state: tuple[Tensor, ...],
) -> _Chunk:
    def rows_like(name: str, given: Tensor) -> Tensor:
        return memory.buffers.part(name, (rows, *given.shape[1:]), given.dtype).zero_()

    features_RTF = rows_like("features", features_NTF)
    lengths_R = features_RTF.new_full((rows,), features_RTF.size(1), dtype=torch.int64)
    inputs = tuple(rows_like(f"state {place}", own) for place, own in enumerate(state))

    def encode() -> Tensor:
        result_RCE, after = encoder(features_RTF, encoder.unpack(inputs), lengths_R)
        for own, new in zip(inputs, encoder.pack(after), strict=True):
            own.copy_(new)
        encoded_RCE = memory.buffers.part("encoded", result_RCE.shape, result_RCE.dtype)
        return encoded_RCE.copy_(result_RCE)

    graph, encoded_RCE = captured(encode, features_RTF.device, memory.pool)
    return _Chunk(graph, features_RTF, lengths_R, inputs, encoded_RCE)
