"""The convolution module, and a depthwise convolution that is causal across chunks.

Axes: N batch, T frames, E encoder width, K kernel size, P = K // 2 frames of the past, C frames of
a chunk, G = C + P frames of a padded chunk, B chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.depthwise import depthwise
from pruned_rnnt.model.gated_depthwise import gate, gated_depthwise
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.zipformer.activation import SwooshLinear
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.frames import LARGEST_CHUNK, Frames, extend
from pruned_rnnt.model.zipformer.schedule import Clock, ramp
from pruned_rnnt.model.zipformer.whiten import Whiten


class ConvolutionModule(nn.Module):
    """Gated projection, depthwise convolution over time, SwooshR, projection.

    Args:
        dim: E.
        kernel_size: K, odd.
        causal: use no frame beyond the chunk, instead of K // 2 frames on both sides.
    """

    def __init__(self, clock: Clock, dim: int, kernel_size: int, causal: bool) -> None:
        super().__init__()
        self.in_proj = Linear(dim, 2 * dim)
        # Large gate inputs saturate the sigmoid, and its sparse gradients cannot undo that.
        self.balancer1 = Balancer(
            clock,
            upper_half=True,
            min_positive=ramp(0.05, 0.025, 8000),
            max_positive=1.0,
            min_abs=1.5,
            max_abs=ramp(5.0, 10.0, 8000),
        )
        self.depthwise_conv = (
            ChunkCausalConvolution(dim, kernel_size)
            if causal
            else nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        )
        self.balancer2 = Balancer(
            clock,
            min_positive=ramp(0.1, 0.05, 8000),
            max_positive=1.0,
            min_abs=ramp(0.2, 0.5, 20000),
            max_abs=10.0,
        )
        self.whiten = Whiten(clock, ramp(7.5, 15.0, 20000))
        self.out_proj = SwooshLinear(dim, dim, "R", initial_scale=0.05)

    def forward(
        self, x_NTE: Tensor, frames: Frames, past_NPE: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(N, T, E), and, if causal, the gated frames for the next chunk of a stream."""
        # The upper half of the projection is the gate.
        projected_NTC = self.balancer1(self.in_proj(x_NTE))
        if isinstance(self.depthwise_conv, ChunkCausalConvolution):
            gated_NTE = gate(projected_NTC, frames.real_NT1)
            mixed_NTE, past_NPE = self.depthwise_conv(gated_NTE, frames, past_NPE)
        else:
            mixed_NTE = gated_depthwise(self.depthwise_conv, projected_NTC, frames.real_NT1)
        return self.out_proj(self.whiten(self.balancer2(mixed_NTE))), past_NPE


class ChunkCausalConvolution(nn.Module):
    """Sum of two depthwise convolutions: a causal one, and a centred one within each chunk.

    The centred one lacks neighbours near the edges of a chunk. Learned factors for the K positions
    next to each edge compensate. If the whole utterance is one chunk, the chunk ends with the
    utterance.
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        past = kernel_size // 2
        self.kernel_size = kernel_size
        self.causal_conv = nn.Conv1d(dim, dim, past + 1, groups=dim)
        nn.init.uniform_(_bias(self.causal_conv), -0.1, 0.1)
        self.chunkwise_conv = nn.Conv1d(dim, dim, kernel_size, padding=past, groups=dim)
        # For the first K and the last K frames of a chunk; the factor is one plus these.
        self.chunkwise_conv_scale = nn.Parameter(torch.zeros(2, dim, kernel_size))

    def forward(
        self, x_NTE: Tensor, frames: Frames, past_NPE: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(N, T, E), and the last P frames if there was a past."""
        count = x_NTE.size(1)
        left = self.kernel_size // 2
        joined_NTE, past_NPE = extend(past_NPE, x_NTE)
        if past_NPE is None:
            joined_NTE = functional.pad(joined_NTE, (0, 0, left, 0))
        causal_NTE = depthwise(self.causal_conv, joined_NTE)
        chunk = frames.chunk_size
        frame_T = torch.arange(count, device=x_NTE.device)
        if isinstance(chunk, Tensor):
            within_NTE = depthwise(self.chunkwise_conv, x_NTE, chunk=chunk)
            sizes_N = torch.where(chunk > LARGEST_CHUNK, frames.lengths_N, chunk)
            return causal_NTE + within_NTE * self._factors(sizes_N, frame_T % chunk), past_NPE
        if chunk is None:
            within_NTE = depthwise(self.chunkwise_conv, x_NTE)
            return causal_NTE + within_NTE * self._factors(frames.lengths_N, frame_T), past_NPE
        chunks = (count + chunk - 1) // chunk
        filled_NTE = functional.pad(x_NTE, (0, 0, 0, chunks * chunk - count))
        chunks_NBCE = filled_NTE.unflatten(1, (chunks, chunk))
        # One convolution over all chunks, with zeros between them: many short ones are slow on a
        # GPU.
        padded_NBGE = functional.pad(chunks_NBCE, (0, 0, 0, left))
        within = depthwise(self.chunkwise_conv, padded_NBGE.flatten(1, 2))
        within_NBCE = within.unflatten(1, (chunks, chunk + left))[:, :, :chunk]
        size = torch.full((1,), chunk, device=x_NTE.device)
        within_NBCE = within_NBCE * self._factors(size, torch.arange(chunk, device=x_NTE.device))
        within_NTE = within_NBCE.flatten(1, 2)[:, :count]
        return causal_NTE + within_NTE, past_NPE

    def _factors(self, sizes_N: Tensor, frame_T: Tensor) -> Tensor:
        """(N, T, E) factors for the frames `frame_T` of chunks of `sizes_N` frames."""
        first_KE, last_KE = functional.pad(self.chunkwise_conv_scale, (0, 1)).transpose(1, 2)
        from_end_NT = sizes_N[:, None] - frame_T
        # Row K is zero: it is for frames further than K from the edge.
        of_first_T = frame_T.clamp(max=self.kernel_size)
        within = (from_end_NT >= 1) & (from_end_NT <= self.kernel_size)
        of_last_NT = torch.where(within, self.kernel_size - from_end_NT, self.kernel_size)
        return (
            1.0
            + functional.embedding(of_first_T, first_KE)
            + functional.embedding(of_last_NT, last_KE)
        )


def _bias(convolution: nn.Conv1d) -> Tensor:
    assert convolution.bias is not None
    return convolution.bias
