"""Multi-head self-attention with rotary or with relative positions.

Axes: N batch, T frames, P past frames, S = P + T frames attended to, R distances, E encoder width,
G queries, keys or values, H heads, K width of one head.

Rotary positions (Su et al., arXiv 2104.09864) rotate pairs of channels of queries and keys by an
angle proportional to the frame index, so that the product of a query and a key depends only on
their distance. A chunk of a stream therefore needs no absolute position.

With relative positions (Dai et al. 2019, arXiv 1901.02860), the score of a query and a key is that
of their contents plus that of the query's content and a vector for their distance; each part adds a
bias of its own to the query.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pruned_rnnt.model.chunks import Chunks
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.kernels.available import train_with_kernels
from pruned_rnnt.model.linear import Linear

# What `positions` of an encoder returns for its attention: rotary angles, or relative positions.
Positions = tuple[Tensor, Tensor] | Tensor

_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rotary_angles(
    num_frames: int, head_dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Factors of `rotate`, each (T, 1, 1, head_dim), for frames 0 .. T-1.

    The cosine, for the channel itself, and the sine, negative in the first half, for its partner.
    """
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    frequencies = 10000.0 ** (-pairs / (head_dim // 2))
    angles_TK = torch.arange(num_frames, device=device).unsqueeze(1) * frequencies
    sine_TK, cosine_TK = angles_TK.sin(), angles_TK.cos()
    own_TK, partner_TK = torch.cat((cosine_TK, cosine_TK), 1), torch.cat((-sine_TK, sine_TK), 1)
    return own_TK[:, None, None].to(dtype), partner_TK[:, None, None].to(dtype)


def rotate(x_NTGHK: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channels i and i + K/2 by the frame's angle; x is (N, T, G, H, K)."""
    own, partner = angles
    return torch.addcmul(x_NTGHK * own, x_NTGHK.roll(x_NTGHK.size(-1) // 2, -1), partner)


def rotated_heads(
    qkv_NSGHK: Tensor, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, both rotated, and values, (N, S, H, K) each, of (N, S, 3, H, K)."""
    if train_with_kernels(qkv_NSGHK, *angles):
        query, key, value = _RotatedHeads.apply(  # type: ignore[no-untyped-call]
            qkv_NSGHK, *angles
        )
        return query, key, value
    query_key_NS2HK, value_NS1HK = qkv_NSGHK.split((2, 1), dim=2)
    query_NSHK, key_NSHK = rotate(query_key_NS2HK, angles).unbind(2)
    return query_NSHK, key_NSHK, value_NS1HK.squeeze(2)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, own: Tensor, partner: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from pruned_rnnt.model.kernels.rotary import rotate_heads

        ctx.save_for_backward(own, partner)
        return rotate_heads(qkv.contiguous(), (own, partner))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from pruned_rnnt.model.kernels.rotary import Heads, rotate_heads_backward

        own, partner = ctx.saved_tensors
        gradients = Heads(*(grad.contiguous() for grad in grads))
        return rotate_heads_backward(gradients, (own, partner)), None, None


def may_be_padded(x_NTE: Tensor, lengths: Tensor) -> bool:
    """False in inference on a CPU if all utterances have T frames, so that no mask is needed.

    Elsewhere True: the host would wait for another device, and exported graphs take any lengths.
    """
    on_host = x_NTE.device.type == lengths.device.type == "cpu"
    if not on_host or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    return bool((lengths < x_NTE.size(1)).any())


def attention_mask(
    lengths: Tensor,
    num_frames: int,
    chunks: Chunks | None = None,
    *,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """The key frames (last axis) that each query frame attends to: bool (N, 1, T, T), or, without
    chunks and window, (N, 1, 1, T) for all query frames.

    Real frames never attend to padding. No row of the softmax is empty: without chunks and window,
    all frames attend to the first one; else each frame attends to itself.

    Args:
        window: without chunks, numbers of frames before and after a frame that it attends to.
    """
    frames = torch.arange(num_frames, device=lengths.device)
    if chunks is not None:
        chunk = chunks.of_frames(frames)
        distance = chunk.unsqueeze(-1) - chunk.unsqueeze(-2)
        in_reach = distance >= 0
        if chunks.left is not None:
            in_reach &= distance <= chunks.left
    elif window is not None:
        distance = frames[:, None] - frames[None, :]
        in_reach = (distance <= window[0]) & (distance >= -window[1])
    else:
        return (frames < lengths.clamp(min=1)[:, None])[:, None, None]
    seen_NTT = (frames < lengths[:, None]).unsqueeze(1) & in_reach
    return (seen_NTT | (frames[:, None] == frames[None, :])).unsqueeze(1)


def attention_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to a bias of the same shape that is added to scores: 0 or minus infinity.

    CUDA kernels need a bias whose rows are a multiple of eight apart. It is computed once, because
    otherwise each layer converts and copies the mask.
    """
    seen = mask.size(-1)
    padded = functional.pad(mask, (0, -seen % 8))
    bias = torch.zeros_like(padded, dtype=dtype).masked_fill_(~padded, -math.inf)
    return bias[..., :seen]


def attention_kernels(x: Tensor) -> AbstractContextManager[None]:
    """A context in which attention does not use cuDNN, if it would re-plan for x's shape.

    cuDNN plans forward and backward again for every new shape, which takes 0.1 seconds each, and
    two batches of speech rarely have the same shape.
    """
    return sdpa_kernel(_NOT_CUDNN) if should_avoid_cudnn_replanning(x) else nullcontext()


class RotaryAttention(nn.Module):
    """Self-attention over (N, T, E).

    Args:
        dim: E, a multiple of 2 * heads.
        heads: H.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = Linear(dim, 3 * dim)
        self.out_proj = Linear(dim, dim)

    def forward(
        self,
        x_NTE: Tensor,
        mask_N1TS: Tensor | None,
        angles: tuple[Tensor, Tensor],
        past_NPE: Tensor | None = None,
    ) -> Tensor:
        """Output for the frames of x, which attend to S = P + T frames: the past and x itself.

        Args:
            mask_N1TS: True where a frame of x may attend to another, or an `attention_bias`; None:
                each attends to all.
            angles: of all S frames, in the dtype of the products.
            past_NPE: x of the P frames before; None: no past.
        """
        seen_NSE = x_NTE if past_NPE is None else torch.cat((past_NPE, x_NTE), dim=1)
        qkv_NSGHK = self.in_proj(seen_NSE).unflatten(-1, (3, self.heads, -1))
        query_NSHK, key_NSHK, value_NSHK = rotated_heads(qkv_NSGHK, angles)
        if past_NPE is not None:
            query_NSHK = query_NSHK[:, past_NPE.size(1) :]
        context_NHTK = functional.scaled_dot_product_attention(
            query_NSHK.transpose(1, 2),
            key_NSHK.transpose(1, 2),
            value_NSHK.transpose(1, 2),
            attn_mask=mask_N1TS,
        )
        projected: Tensor = self.out_proj(context_NHTK.transpose(1, 2).flatten(2))
        return projected


def relative_positions(
    frames: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(2 S - 1, E) sinusoids of the distances S-1 .. -(S-1) between S frames, query minus key."""
    distance_R = torch.arange(frames - 1, -frames, -1, device=device, dtype=torch.float32)
    channels = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    angles_RC = distance_R[:, None] * torch.exp(channels * (-math.log(10000.0) / dim))
    return torch.stack((angles_RC.sin(), angles_RC.cos()), dim=2).flatten(1).to(dtype)


class RelativeAttention(nn.Module):
    """Self-attention over (N, T, E).

    Args:
        dim: E, a multiple of heads.
        heads: H.
        bias: whether the linear layers have biases; that of the positions never has one.
    """

    def __init__(self, dim: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = Linear(dim, 3 * dim, bias)
        self.position_proj = Linear(dim, dim, bias=False)
        self.out_proj = Linear(dim, dim, bias)
        self.content_bias = nn.Parameter(torch.zeros(heads, dim // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, dim // heads))

    def forward(
        self,
        x_NTE: Tensor,
        mask_N1TS: Tensor | None,
        positions_RE: Tensor,
        past_NPE: Tensor | None = None,
    ) -> Tensor:
        """Output for the frames of x, which attend to S = P + T frames: the past and x itself.

        Args:
            mask_N1TS: True where a frame of x may attend to another, or an `attention_bias`; None:
                each attends to all.
            positions_RE: `relative_positions` of all S frames, in the dtype of the products.
            past_NPE: x of the P frames before; None: no past.
        """
        frames = x_NTE.size(1)
        seen_NSE = x_NTE if past_NPE is None else torch.cat((past_NPE, x_NTE), dim=1)
        seen = seen_NSE.size(1)
        qkv_NSGHK = self.in_proj(seen_NSE).unflatten(-1, (3, self.heads, -1))
        query_NSHK, key_NSHK, value_NSHK = qkv_NSGHK.unbind(2)
        query_NTHK = query_NSHK[:, seen - frames :]
        dtype = query_NTHK.dtype
        # The last query never looks as far ahead as the first: T + S - 1 of the 2 S - 1 distances.
        positions_RHK = self.position_proj(positions_RE[: seen + frames - 1]).unflatten(
            -1, (self.heads, -1)
        )
        located_NHTK = (query_NTHK + self.position_bias.to(dtype)).transpose(1, 2)
        scores_NHTR = located_NHTK @ positions_RHK.permute(1, 2, 0)
        bias_NHTS = shift_rows(scores_NHTR)[..., :seen] / math.sqrt(query_NTHK.size(-1))
        if mask_N1TS is not None:
            if mask_N1TS.dtype == torch.bool:
                bias_NHTS = bias_NHTS.masked_fill(~mask_N1TS, -math.inf)
            else:
                bias_NHTS = bias_NHTS + mask_N1TS
        context_NHTK = functional.scaled_dot_product_attention(
            (query_NTHK + self.content_bias.to(dtype)).transpose(1, 2),
            key_NSHK.transpose(1, 2),
            value_NSHK.transpose(1, 2),
            attn_mask=bias_NHTS,
        )
        projected: Tensor = self.out_proj(context_NHTK.transpose(1, 2).flatten(2))
        return projected


def shift_rows(scores_NHTR: Tensor) -> Tensor:
    """Move row t by T-1-t columns to the left, so that columns of distances become those of keys.

    What enters a row on the right is undefined.
    """
    batch, heads, frames, columns = scores_NHTR.shape
    # In rows of R + 1 columns, reading R at a time moves each row one column further.
    padded = functional.pad(scores_NHTR, (1, 0)).view(batch, heads, columns + 1, frames)
    return padded[:, :, 1:].reshape(batch, heads, frames, columns)
