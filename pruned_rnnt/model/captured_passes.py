"""The CUDA graphs of a forward and a backward pass, their buffers, and how one is captured.

Axes: N batch, T feature frames, F mel bins, E encoder width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pruned_rnnt.system.allocator import leave_inherited_garbage, without_garbage_collection

# A shape is captured when it occurs for this time: capturing takes as long as two passes.
CAPTURE_AT = 3

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CapturedPasses:
    """The graphs of one shape.

    forward, backward: the graphs.
    program: the host decisions that the forward graph reads.
    features_NTF, lengths_N: inputs of the forward graph.
    encoded_NTE: its output; grad_NTE: gradient of the output, input of the backward graph.
    """

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    program: Sequence[Callable[[], Sequence[float]]]
    features_NTF: Tensor
    lengths_N: Tensor
    encoded_NTE: Tensor
    grad_NTE: Tensor

    def fill(self, features_NTF: Tensor, feature_lengths: Tensor) -> None:
        """Copy a batch into the inputs of the graph.

        The rows beyond the batch repeat its first utterances, so that statistics over the batch
        are those of speech; their gradient is zero.
        """
        batch, frames, _ = features_NTF.shape
        target_NTF = self.features_NTF
        more = target_NTF.size(0) - batch
        target_NTF[:, frames:].zero_()
        target_NTF[:batch, :frames].copy_(features_NTF)
        lengths_N = feature_lengths
        if more:
            target_NTF[batch:, :frames].copy_(features_NTF[:more])
            lengths_N = torch.cat((feature_lengths, feature_lengths[:more]))
        self.lengths_N.copy_(lengths_N, non_blocking=True)


class SharedBuffers:
    """Inputs and outputs that graphs of several shapes share, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first elements of a buffer that grows; graphs keep the smaller buffers they use."""
        count = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != dtype:
            # An eighth more, as batches of a run differ little in their number of frames.
            buffer = torch.zeros(count + count // 8, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:count].view(shape)


def pool_bytes(pool: Any) -> int:
    """Memory that torch holds for the graphs of a pool; their shared buffers are not in it."""
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if each.get("segment_pool_id") == pool)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Like torch.cuda.graph, without its garbage collection and its release of cached memory.

    Python collects no garbage meanwhile: a graph among it would be destroyed, which CUDA does not
    allow during a capture.

    After an error, all graphs captured before must be dropped: they draw from another generator
    state than the eager passes.
    """
    leave_inherited_garbage()  # a worker of the user's own loader may inherit this graph
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), without_garbage_collection():
        try:
            # Relaxed: other threads, such as those of loaders, may allocate and wait meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            yield
            graph.capture_end()
        except BaseException:
            # The capture must end; an error of capture_end would hide the cause.
            with suppress(RuntimeError):
                graph.capture_end()
            # A capture that failed to begin or end leaves the state of the generator marked as
            # captured, and eager passes can then draw no numbers. A copy is not marked.
            generator = torch.cuda.default_generators[stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
    torch.cuda.current_stream().wait_stream(stream)


def captured(
    run: Callable[[], _T],
    device: torch.device,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[torch.cuda.CUDAGraph, _T]:
    """A graph of the kernels of `run`, which is called twice, and the outputs of its replays.

    Args:
        pool: of memory that graphs share; None: this graph has its own.
        stream: the one on which all graphs of the pool are captured, because torch does not reuse
            on one stream what was freed on another. None: a new one.
    """
    graph = torch.cuda.CUDAGraph()
    stream = stream or torch.cuda.Stream(device)
    with torch.cuda.device(device):  # of the model, which need not be the current one
        # The first call compiles kernels and loads libraries, which cannot be captured.
        run()
        with capturing(graph, pool or torch.cuda.graph_pool_handle(), stream):
            outputs = run()
    return graph, outputs


def hooks_inside(encoder: nn.Module) -> list[dict[int, Any]]:
    """The hooks of all modules inside the encoder, which are empty as long as there are none.

    Those of the encoder itself (adapters) run while its passes are captured.
    """
    return [
        hooks
        for module in encoder.modules()
        if module is not encoder
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ]
