"""Inference passes of an encoder as CUDA graphs, for batches that the host takes longest to launch.

A pass of a large Zipformer is two thousand kernels. With little audio in a batch, a GPU computes
them faster than the host launches them. Batches are padded to few shapes; a shape that occurs
several times is captured, and then replayed by one launch. Larger batches keep the GPU busy
anyway and run without graphs.

All graphs take their memory from one pool, because only one runs at a time, and share the buffers
of input and output.

Axes: N batch, T feature frames, F mel bins, E encoder width.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.captured_passes import SharedBuffers, capturing, hooks_inside
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.shape_steps import BatchPadding
from pruned_rnnt.system.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

# Feature frames of a batch, with padding: a GPU needs longer for more than the host.
MOST_FRAMES = 150_000
# The least recently used graph is dropped first.
_MOST_GRAPHS = 24
# A shape is captured when it occurs for this time: capturing takes as long as two passes.
_CAPTURE_AT = 3
# Counted shapes; those of other batches are forgotten.
_MOST_COUNTS = 10_000
GRAPH_PADDING = BatchPadding(frame_step=32, steps=8)


class _Captured(NamedTuple):
    """A graph with its inputs and output."""

    graph: torch.cuda.CUDAGraph
    features_NTF: Tensor
    lengths_N: Tensor
    encoded_NTE: Tensor


class InferenceGraphs:
    """Runs an encoder in evaluation mode; results equal those of the encoder within rounding."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()
        self._failed = False
        self.clear()

    def clear(self) -> None:
        """Drop all graphs and buffers, so that their memory can be released."""
        self._graphs: OrderedDict[Any, _Captured] = OrderedDict()
        self._buffers: SharedBuffers | None = None
        # A pool that lost its last graph cannot be used again.
        self._pool: Any = None
        self._address = 0
        self._hooks: list[dict[int, Any]] = []

    def __deepcopy__(self, memo: Any) -> InferenceGraphs:
        """Graphs refer to the parameters of one model, so a copy has none."""
        return InferenceGraphs()

    @torch.inference_mode()
    def __call__(
        self, encoder: Encoder, features_NTF: Tensor, feature_lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Like the encoder's `forward`; the output can have more frames of padding."""
        batch, frames, _ = features_NTF.shape
        shape = GRAPH_PADDING.shape_of(features_NTF)
        if (
            self._failed
            or not features_NTF.is_cuda
            or frames < encoder.receptive_field
            or shape[0] * shape[1] > MOST_FRAMES
        ):
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        address = next(encoder.parameters()).data_ptr()
        if address != self._address:  # parameters were moved or replaced
            self.clear()
            self._address = address
            self._hooks = hooks_inside(encoder)
        if any(self._hooks):  # a graph would not call them
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = (shape, dtype, encoder.chunking)
        if key not in self._graphs and not self._capture(key, encoder):
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        self._graphs.move_to_end(key)
        captured = self._graphs[key]
        # The rows beyond the batch are zeros with all frames; no row depends on another one.
        captured.features_NTF[:, frames:].zero_()
        captured.features_NTF[batch:, :frames].zero_()
        captured.features_NTF[:batch, :frames].copy_(features_NTF)
        captured.lengths_N[batch:].fill_(frames)
        captured.lengths_N[:batch].copy_(feature_lengths)
        captured.graph.replay()
        return captured.encoded_NTE[:batch].clone(), encoder.output_lengths(feature_lengths)

    def _capture(self, key: Any, encoder: Encoder) -> bool:
        """Capture a shape that occurs often; False if there is no graph of it."""
        if len(self._counts) > _MOST_COUNTS:
            self._counts.clear()
        self._counts[key] += 1
        if self._counts[key] < _CAPTURE_AT:
            return False
        try:
            captured = self._captured(key[0], encoder)
        except RuntimeError as error:
            self.clear()
            torch.cuda.empty_cache()
            if is_out_of_memory(error):
                self._counts.clear()
            else:
                self._failed = True
                reason = str(error).splitlines()[0]
                logger.warning("the encoder runs without CUDA graphs from here on: %s", reason)
            return False
        self._graphs[key] = captured
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return True

    def _captured(self, shape: tuple[int, int, int], encoder: Encoder) -> _Captured:
        batch, frames, _ = shape
        device = next(encoder.parameters()).device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._buffers is None:
            self._buffers = SharedBuffers(device)
        features_NTF = self._buffers.part("features", shape, torch.float32).zero_()
        lengths_N = torch.full((batch,), frames, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False):
            # Compiles kernels and loads libraries, which cannot be captured.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                example_NTE, _ = encoder(features_NTF, lengths_N)
            torch.cuda.current_stream(device).wait_stream(stream)
            encoded_NTE = self._buffers.part("encoded", example_NTE.shape, example_NTE.dtype)
            del example_NTE
            with capturing(graph, self._pool, stream):
                result_NTE, _ = encoder(features_NTF, lengths_N)
                encoded_NTE.copy_(result_NTE)
        return _Captured(graph, features_NTF, lengths_N, encoded_NTE)
