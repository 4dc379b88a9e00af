"""Inference passes of an encoder as CUDA graphs, which the host launches at once.

A pass of a large Zipformer is a thousand kernels. Unless the batch is very large, a GPU computes
them faster than the host launches them. Batches are padded to few shapes, and streams to few
numbers of rows; a shape that occurs several times is captured, and then replayed by one launch.

All graphs take their memory from one pool, because only one runs at a time, and share the buffers
of input, output and the state of streams, from and to which these are copied.

Axes: N batch or streams, R rows of a graph, T feature frames, F mel bins, C encoder frames of a
chunk, E encoder width.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pruned_rnnt.model.captured_passes import CAPTURE_AT, SharedBuffers, captured, hooks_inside
from pruned_rnnt.model.encoder import Encoder, StreamingEncoder
from pruned_rnnt.model.shape_steps import BatchPadding, round_up
from pruned_rnnt.system.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

# Feature frames of a batch, with padding. For more, a GPU takes longer to compute the pass than any
# host to launch it.
MOST_FRAMES = 500_000
# The graph of a larger batch is captured only if there is room for its memory.
_SMALL_FRAMES = 150_000
# More streams keep a GPU busy without a graph, and their states would need more memory twice.
_MOST_ROWS = 256
# The least recently used graph is dropped first. Utterances of up to 30 s have 60 to 90 shapes, but
# with 96 graphs the transcription of 500 files was no faster (medium Zipformer, H200). Of 24, the
# memory was 1.6 to 3.8 GiB: least if the largest shape was captured first.
_MOST_GRAPHS = 24
# Counted shapes; those of other batches are forgotten.
_MOST_COUNTS = 10_000
_FRAME_STEP, _STEPS = 32, 8

_Captured = TypeVar("_Captured")


def graph_padding(receptive_field: int) -> BatchPadding:
    """How batches of an encoder are padded to few shapes."""
    return BatchPadding(_FRAME_STEP, _STEPS, more=receptive_field - 1)


class GraphMemory(NamedTuple):
    """What all graphs of an encoder share."""

    pool: Any
    stream: torch.cuda.Stream | None
    buffers: SharedBuffers


class FrequentGraphs(Generic[_Captured]):
    """Graphs of the passes of one encoder, of shapes that occur often."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()
        self._failed = False
        self.clear()

    def clear(self) -> None:
        """Drop all graphs and buffers, so that their memory can be released."""
        self._graphs: OrderedDict[Any, _Captured] = OrderedDict()
        self._parameters: list[weakref.ref[Tensor]] = []
        self._addresses: list[int] = []
        self._hooks: list[dict[int, Any]] = []
        # A pool that lost its last graph cannot be used again.
        self._memory: GraphMemory | None = None

    def release(self) -> None:
        """Drop all graphs and release their memory, until shapes occur often again."""
        self.clear()
        self._counts.clear()
        torch.cuda.empty_cache()

    def __deepcopy__(self, memo: Any) -> FrequentGraphs[_Captured]:
        """Graphs refer to the parameters of one model, so a copy has none."""
        return type(self)()

    def find(
        self, encoder: nn.Module, shape: Any, capture: Callable[[GraphMemory], _Captured]
    ) -> _Captured | None:
        """The graph of a shape, for the current autocast; None if the encoder must run without.

        Args:
            shape: anything that can be a key and, with the dtype, decides which kernels run.
            capture: is called for a shape that occurs often, within the current autocast.
        """
        parameter = next(encoder.parameters())
        if self._failed or not parameter.is_cuda:
            return None
        # Listing the encoder's parameters is slow, so those of the last capture are looked at: one
        # that was replaced is gone or has moved. A layer that wraps another is not noticed.
        known = [ref() for ref in self._parameters]
        addresses = [0 if p is None else p.data_ptr() for p in known]
        if not known or known[0] is not parameter or addresses != self._addresses:
            self.clear()
            self._parameters = [weakref.ref(p) for p in encoder.parameters()]
            self._addresses = [p.data_ptr() for p in encoder.parameters()]
            self._hooks = hooks_inside(encoder)
        if any(self._hooks):  # a graph would not call them
            return None
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = shape, dtype
        if key not in self._graphs and not self._occurs_often(key):
            return None
        if key not in self._graphs:
            if self._memory is None:
                self._memory = GraphMemory(
                    pool=torch.cuda.graph_pool_handle(),
                    stream=torch.cuda.Stream(parameter.device),
                    buffers=SharedBuffers(parameter.device),
                )
            try:
                with torch.autocast(
                    "cuda",
                    torch.get_autocast_dtype("cuda"),
                    enabled=dtype is not None,
                    cache_enabled=False,
                ):
                    self._graphs[key] = capture(self._memory)
            except RuntimeError as error:
                self._give_up(error)
                return None
            if len(self._graphs) > _MOST_GRAPHS:
                dropped, _ = self._graphs.popitem(last=False)
                # It must occur often again, or shapes that are never kept would be captured.
                del self._counts[dropped]
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _occurs_often(self, key: Any) -> bool:
        if len(self._counts) > _MOST_COUNTS:
            self._counts.clear()
        self._counts[key] += 1
        return self._counts[key] >= CAPTURE_AT

    def _give_up(self, error: RuntimeError) -> None:
        """Run without graphs: until shapes occur often again if memory was short, else for good."""
        self.release()
        if is_out_of_memory(error):
            return
        self._failed = True
        reason = str(error).splitlines()[0]
        logger.warning("the encoder runs without CUDA graphs from here on: %s", reason)


class _Pass(NamedTuple):
    """A graph with its inputs and output."""

    graph: torch.cuda.CUDAGraph
    features_NTF: Tensor
    lengths_N: Tensor
    encoded_NTE: Tensor


class InferenceGraphs(FrequentGraphs[_Pass]):
    """Runs an encoder in evaluation mode; results equal those of the encoder within rounding."""

    def __init__(self) -> None:
        super().__init__()
        # Feature frames of a batch whose pass does not fit into the memory even without graphs.
        self._too_many: float = math.inf

    @torch.inference_mode()
    def __call__(
        self, encoder: Encoder, features_NTF: Tensor, feature_lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Like the encoder's `forward`; the output can have more frames of padding."""
        batch, frames, _ = features_NTF.shape
        shape = graph_padding(encoder.receptive_field).shape_of(features_NTF)
        found = None
        is_usable = encoder.receptive_field <= frames and shape[0] * shape[1] <= MOST_FRAMES
        if is_usable and self._has_room(shape[0] * shape[1], features_NTF.device):
            key = shape, encoder.chunking
            found = self.find(encoder, key, lambda memory: _captured_pass(memory, shape, encoder))
        if found is None:
            return self._without_graph(encoder, features_NTF, feature_lengths)
        # The rows beyond the batch are zeros with all frames; no row depends on another one.
        found.features_NTF[:, frames:].zero_()
        found.features_NTF[batch:, :frames].zero_()
        found.features_NTF[:batch, :frames].copy_(features_NTF)
        found.lengths_N[batch:].fill_(frames)
        found.lengths_N[:batch].copy_(feature_lengths)
        found.graph.replay()
        return found.encoded_NTE[:batch].clone(), encoder.output_lengths(feature_lengths)

    def _has_room(self, frames: int, device: torch.device) -> bool:
        """True if a graph of so many feature frames may be captured or replayed. The largest one
        has as much memory as a pass without a graph, besides the memory of such passes."""
        largest = max((p.features_NTF.shape[:2].numel() for p in self._graphs.values()), default=0)
        if device.type != "cuda" or frames <= max(largest, _SMALL_FRAMES):
            return True
        return torch.cuda.mem_get_info(device)[0] >= torch.cuda.memory_reserved(device)

    def _without_graph(
        self, encoder: Encoder, features_NTF: Tensor, feature_lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The encoder's pass; once again without the memory of graphs if it runs out of memory."""
        frames = features_NTF.shape[:2].numel()
        try:
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if not (is_out_of_memory(error) and self._graphs and frames < self._too_many):
                raise
        # Outside the except block, since the exception's frames hold tensors of the pass.
        self.release()
        try:
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._too_many = frames
            raise


def _captured_pass(memory: GraphMemory, shape: tuple[int, int, int], encoder: Encoder) -> _Pass:
    batch, frames, _ = shape
    device = next(encoder.parameters()).device
    features_NTF = memory.buffers.part("features", shape, torch.float32).zero_()
    lengths_N = torch.full((batch,), frames, dtype=torch.int64, device=device)

    def encode() -> Tensor:
        result_NTE, _ = encoder(features_NTF, lengths_N)
        encoded_NTE = memory.buffers.part("encoded", result_NTE.shape, result_NTE.dtype)
        return encoded_NTE.copy_(result_NTE)

    graph, encoded_NTE = captured(encode, device, memory.pool, memory.stream)
    return _Pass(graph, features_NTF, lengths_N, encoded_NTE)


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

    graph, encoded_RCE = captured(encode, features_RTF.device, memory.pool, memory.stream)
    return _Chunk(graph, features_RTF, lengths_R, inputs, encoded_RCE)
