"""Training passes of an encoder as CUDA graphs: the host launches one graph instead of its kernels.

A forward and backward pass of a large Zipformer is five thousand kernels, which take the host
longer to launch than a GPU to run. A graph repeats the kernels of one captured pass, so it holds
for one shape. Batches are padded to few shapes (see `TrainingShapes`), and each shape is captured
when it first occurs, which takes the host about as long as launching its kernels one by one:

    batch (N, T, F)   padded to (N', T', F)     real lengths are on the device
                       |
    host decisions ->  forward graph  ->  encoder output, a buffer that all graphs share
    (see `Recorder`)   backward graph ->  gradients, added to buffers that all graphs share

All graphs take their memory from one pool, because only one runs at a time; the largest shape
decides its size. Nothing in a replay waits for the device.

Axes: N batch, T feature frames, F mel bins, E encoder width.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.captured_gradients import CapturedGradients
from pruned_rnnt.model.captured_passes import (
    CapturedPasses,
    SharedBuffers,
    capturing,
    hooks_inside,
    pool_bytes,
)
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.side_branch import SideBranch, join_side_branch
from pruned_rnnt.model.training_shapes import MOST_SHAPES, TrainingShapes
from pruned_rnnt.model.zipformer.schedule import Recorder
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.system.switched_kernels import GRAPHS, why_switched

logger = logging.getLogger(__name__)

_WARM_UP_FRAMES = 64


class Captures(NamedTuple):
    """How many graphs were captured, and how many seconds that took."""

    number: int
    seconds: float


class EncoderGraphs:
    """Runs the training passes of an encoder as CUDA graphs; results equal those of the encoder.

    A backward pass adds the gradients of the encoder's parameters to those that earlier backward
    passes of this object wrote to `grad`; it replaces others. Hooks on parameters are not called.

    Args:
        encoder: on a CUDA device.

    Attributes:
        shapes: those to which batches are padded.
        gradients: the memory of the parameters' gradients.
        captures: all of this object.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.shapes = TrainingShapes(encoder.receptive_field - 1)
        self._parameters = [p for p in encoder.parameters() if p.requires_grad]
        device = self._parameters[0].device
        self._clock = encoder.clock
        self._recorder = Recorder(device)
        self._stream = torch.cuda.Stream(device)
        self._side_branch = SideBranch(self._stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Any, CapturedPasses] = OrderedDict()
        self._buffers = SharedBuffers(device)
        self._device = device
        self.gradients = CapturedGradients(self._parameters)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._output_dtype: torch.dtype | None = None
        self._failed = False
        self._hooks = hooks_inside(encoder)
        self.captures = Captures(0, 0.0)
        self._dropped = 0
        self._passes = 0

    def __call__(self, features_NTF: Tensor, feature_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Like the encoder's `forward`; the output can have more frames of padding.

        The output, and what its backward pass needs, are overwritten by the next call. In
        evaluation mode, the encoder itself runs.

        Raises:
            RuntimeError: in the backward pass, if there was another call before it.
        """
        encoder = self._encoder
        if not self._failed and any(self._hooks):
            self._stop("a module inside of it has hooks, which a graph would not call")
        too_short = features_NTF.size(1) < encoder.receptive_field
        if self._failed or too_short or not encoder.training:
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        if self._clock is not None:
            self._clock.start_batch()
        batch, frames, bins = features_NTF.shape
        shape = (*self.shapes.shape_of(batch, frames), bins)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = (shape, dtype)
        captured = self._graphs.get((key, self._conditions()))
        if captured is None:
            captured = self._capture(key)
        if captured is None:
            return encoder(features_NTF, feature_lengths)  # type: ignore[no-any-return]
        self._graphs.move_to_end((key, self._conditions()))
        captured.fill(features_NTF, feature_lengths)
        self._recorder.refresh(captured.program)
        # A loss needs memory for all frames: so many, however large the shape is.
        most = min(self.shapes.most_frames(frames), shape[1])
        count = int(encoder.output_lengths(torch.tensor(most)))
        encoded_NTE: Tensor = _Replay.apply(  # type: ignore[no-untyped-call]
            self._anchor, self, captured, batch, count
        )
        return encoded_NTE, encoder.output_lengths(feature_lengths)

    def _conditions(self) -> tuple[bool, ...]:
        """The conditions, besides the shape, on which the captured kernels depend."""
        if self._clock is None:
            return ()
        return tuple(self._clock.value(each) == 0.0 for each in self._recorder.conditions)

    def graph_of(self, shapes: TrainingShapes, utterances: int, frames: int) -> Hashable:
        """Names the graph for a batch of this size at the step that the encoder is set to.

        A training captures one for each name.

        Args:
            shapes: those of a training that had the batches before this one.
        """
        return shapes.shape_of(utterances, frames), self._conditions()

    def start_pass(self) -> int:
        """The number of a forward pass, which is about to overwrite what others have kept."""
        self._passes += 1
        return self._passes

    def check_newest(self, number: int) -> None:
        """Raises RuntimeError if there was another forward pass after that of this number."""
        if number != self._passes:
            raise RuntimeError(
                "another batch went through the encoder before the backward pass of this one, and "
                "CUDA graphs keep one batch: call backward() after each batch, or set "
                "train.cuda_graphs=off"
            )

    def clear(self) -> None:
        """Drop all graphs, so that their memory can be released; shapes are captured again."""
        self._graphs.clear()
        # A pool that lost its last graph cannot be used again.
        self._pool = torch.cuda.graph_pool_handle()

    def _stop(self, reason: str) -> None:
        self._failed = True
        self.clear()
        logger.warning("the encoder runs without CUDA graphs from here on: %s", reason)

    def _capture(self, key: Any) -> CapturedPasses | None:
        """The graphs of a shape; None if they cannot be captured, which is logged once."""
        started = time.monotonic()
        for attempt in range(2):
            try:
                captured = self._try_to_capture(key[0])
            except RuntimeError as error:
                if is_out_of_memory(error):
                    # The graphs of other shapes leave gaps in the pool.
                    self.clear()
                    torch.cuda.empty_cache()
                    if attempt == 0:
                        continue
                    raise
                self._stop(str(error).splitlines()[0])
                return None
            break
        self._graphs[(key, self._conditions())] = captured
        if len(self._graphs) > MOST_SHAPES:
            self._graphs.popitem(last=False)
            self._count_dropped()
        self._report(time.monotonic() - started)
        return captured

    def _report(self, seconds: float) -> None:
        """Log what graphs cost, when their number has doubled."""
        earlier = self.captures
        self.captures = Captures(earlier.number + 1, earlier.seconds + seconds)
        if self.captures.number.bit_count() == 1:
            logger.info(
                "CUDA graphs of the encoder: %d captured in %.1f s, memory of all %.2f GiB",
                *self.captures,
                pool_bytes(self._pool) / 2**30,
            )

    def _count_dropped(self) -> None:
        """Log once that shapes are captured again and again."""
        self._dropped += 1
        # Some drop graphs whose conditions no longer hold.
        if self._dropped == 4 * MOST_SHAPES:
            logger.warning(
                "batches have more shapes than the %d whose CUDA graphs are kept, and capturing "
                "one takes longer than running without: try train.cuda_graphs=off, or let "
                "batches vary less (data.max_duration instead of limits on symbols or lattices)",
                MOST_SHAPES,
            )

    def _try_to_capture(self, shape: tuple[int, int, int]) -> CapturedPasses:
        batch, frames, bins = shape
        if self._output_dtype is None:
            self._warm_up(frames, bins)
        assert self._output_dtype is not None
        device = self._device
        features_NTF = self._buffers.part("features", shape, torch.float32)
        # Small and different for each graph, because a copy to it may still be under way.
        lengths_N = torch.full((batch,), frames, dtype=torch.int64, device=device)
        count = int(self._encoder.output_lengths(torch.tensor(frames)))
        output = (batch, count, self._encoder.output_dim)
        encoded_NTE = self._buffers.part("encoded", output, self._output_dtype)
        grad_NTE = self._buffers.part("grad", output, self._output_dtype)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with self._recording():
            with capturing(forward, self._pool, self._stream):
                result_NTE, _ = self._encoder(features_NTF, lengths_N)
                join_side_branch()
                encoded_NTE.copy_(result_NTE.detach())
            program = self._recorder.program
            with capturing(backward, self._pool, self._stream):
                self.gradients.add(result_NTE, grad_NTE)
        return CapturedPasses(
            forward=forward,
            backward=backward,
            program=program,
            features_NTF=features_NTF,
            lengths_N=lengths_N,
            encoded_NTE=encoded_NTE,
            grad_NTE=grad_NTE,
        )

    def _warm_up(self, frames: int, bins: int) -> None:
        """Passes over zeros for what cannot be captured: libraries load, kernels compile."""
        from pruned_rnnt.model.kernels.available import use_kernels

        if not use_kernels(self._parameters[0]):
            self._pass_over_zeros(_WARM_UP_FRAMES, bins)
            return
        from pruned_rnnt.model.kernels.variants import compiled_together, counts

        with compiled_together(self._device):
            self._pass_over_zeros(frames, bins)
            if counts.compiled:
                # A first start; the kernels over rows of longer batches have other block sizes.
                self._pass_over_zeros(2 * frames, bins)

    def _pass_over_zeros(self, frames: int, bins: int) -> None:
        device = self._device
        # A batch norm in training changes its running statistics in every pass.
        kept = [(buffer, buffer.clone()) for buffer in self._encoder.buffers()]
        self._stream.wait_stream(torch.cuda.current_stream())
        with (
            torch.random.fork_rng(devices=[device]),
            torch.cuda.stream(self._stream),
            self._recording(),
        ):
            features_NTF = torch.zeros((2, frames, bins), device=device)
            lengths_N = torch.full((2,), frames, dtype=torch.int64, device=device)
            encoded_NTE, _ = self._encoder(features_NTF, lengths_N)
            join_side_branch()
            self.gradients.add(encoded_NTE, torch.zeros_like(encoded_NTE))
            self._output_dtype = encoded_NTE.dtype
        torch.cuda.current_stream().wait_stream(self._stream)
        for buffer, before in kept:
            buffer.copy_(before)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Let the device read the host's decisions; without autocast's cache of casts."""
        device_dtype = torch.get_autocast_dtype("cuda")
        enabled = torch.is_autocast_enabled("cuda")
        self._recorder.start()
        if self._clock is not None:
            self._clock.recorder = self._recorder
        try:
            with (
                torch.enable_grad(),
                self._side_branch.active(),
                torch.autocast("cuda", device_dtype, enabled=enabled, cache_enabled=False),
            ):
                yield
        finally:
            if self._clock is not None:
                self._clock.recorder = None


class _Replay(torch.autograd.Function):
    """Replays the graphs of a shape; `anchor` makes autograd call the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        graphs: EncoderGraphs,
        captured: CapturedPasses,
        batch: int,
        frames: int,
    ) -> Tensor:
        ctx.graphs, ctx.captured, ctx.number = graphs, captured, graphs.start_pass()
        captured.forward.replay()
        return captured.encoded_NTE[:batch, :frames]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NTE: Tensor) -> tuple[None, None, None, None, None]:
        ctx.graphs.check_newest(ctx.number)
        captured: CapturedPasses = ctx.captured
        batch, frames, _ = grad_NTE.shape
        captured.grad_NTE[:batch, :frames].copy_(grad_NTE)
        captured.grad_NTE[:batch, frames:].zero_()
        captured.grad_NTE[batch:].zero_()
        ctx.graphs.gradients.start_backward()
        captured.backward.replay()
        ctx.graphs.gradients.tell_replay()
        return None, None, None, None, None


def graph_obstacle(encoder: Encoder) -> str:
    """The reason why the encoder's passes cannot be captured; empty if they can."""
    if not encoder.can_be_captured:
        return f"{type(encoder).__name__}.can_be_captured is False"
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    if not parameters:
        return "no parameter of the encoder is trained"
    if parameters[0].device.type != "cuda":
        return f"not on {parameters[0].device.type}"
    if reason := why_switched(GRAPHS, "cuda"):
        return reason
    from pruned_rnnt.model.kernels.available import use_kernels

    if encoder.clock is not None and not use_kernels(parameters[0]):
        return "they need the fused kernels"
    return ""
