"""Masks and relative positions of the frames of a stack.

Axes: N batch, T frames at the rate of the stack, P cached frames of the past, S = P + T frames
attended to, R relative positions, D width of a position encoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# As the chunk size: the whole utterance; as the number of left chunks: the whole past. Exact in
# float32, and still above LARGEST_CHUNK at the rate of a stack that downsamples by up to 255.
UNLIMITED = 2**24
LARGEST_CHUNK = 2**16


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Frames of a batch at one rate.

    lengths_N: real frames.
    real_NT1: bool, False beyond the length.
    blocked: bool (N, 1, 1, S) or (N, 1, T, S), True if frame T must not attend to frame S.
    chunk_size: frames of a chunk, or None if an utterance is one chunk; in a captured pass (1,)
        int64, above `LARGEST_CHUNK` if an utterance is one chunk.
    positions_RD: encodings of the distances -S .. T - 1 from a frame to a frame it attends to.
    """

    lengths_N: Tensor
    real_NT1: Tensor
    blocked: Tensor
    chunk_size: int | Tensor | None
    positions_RD: Tensor


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How a causal encoder divides utterances into chunks.

    chunk_size: frames of a chunk before any stack's downsampling; None: the whole utterance.
    left_chunks: chunks of the past that a chunk attends to; None: all.

    In a captured pass both are (1,) int64 on the device, and `UNLIMITED` instead of None.
    """

    chunk_size: int | Tensor | None = None
    left_chunks: int | Tensor | None = None


def frames_at_rate(
    lengths_N: Tensor, num_frames: int, rate: int, chunking: Chunking, positions_RD: Tensor
) -> Frames:
    """Frames of whole utterances in a stack that downsamples by `rate`.

    Args:
        lengths_N: at rate 1.
        num_frames: at rate 1, a multiple of `rate`.
        positions_RD: of distances -num_frames .. num_frames - 1.
    """
    lengths_N = _divide_up(lengths_N, rate)
    count = num_frames // rate
    frames_T = torch.arange(count, device=lengths_N.device)
    padding_NT = frames_T >= lengths_N[:, None]
    blocked = padding_NT[:, None, None]
    chunk_size = None if chunking.chunk_size is None else chunking.chunk_size // rate
    if chunk_size is not None:
        chunk_T = frames_T // chunk_size
        distance_TT = chunk_T[:, None] - chunk_T
        out_of_reach = distance_TT < 0
        if chunking.left_chunks is not None:
            out_of_reach = out_of_reach | (distance_TT > chunking.left_chunks)
        blocked = blocked | out_of_reach
    return Frames(
        lengths_N=lengths_N,
        real_NT1=~padding_NT.unsqueeze(-1),
        blocked=blocked,
        chunk_size=chunk_size,
        positions_RD=positions_RD[num_frames - count : num_frames + count],
    )


def stream_frames_at_rate(
    lengths_N: Tensor,
    processed_N: Tensor,
    chunk_size: int,
    left_frames: int,
    rate: int,
    positions_RD: Tensor,
) -> Frames:
    """Frames of one chunk of every stream, with the cached past.

    Args:
        lengths_N: real frames of the chunk, at rate 1.
        processed_N: frames before the chunk, at rate 1.
        chunk_size, left_frames: at rate 1, multiples of `rate`.
        positions_RD: of distances -(left_frames + chunk_size) .. chunk_size - 1.
    """
    lengths_N = _divide_up(lengths_N, rate)
    count, past = chunk_size // rate, left_frames // rate
    frames_T = torch.arange(count, device=lengths_N.device)
    frames_P = torch.arange(past, device=lengths_N.device)
    padding_NT = frames_T >= lengths_N[:, None]
    empty_NP = frames_P < past - processed_N[:, None] // rate
    zero = left_frames + chunk_size
    return Frames(
        lengths_N=lengths_N,
        real_NT1=~padding_NT.unsqueeze(-1),
        blocked=torch.cat((empty_NP, padding_NT), dim=1)[:, None, None],
        chunk_size=count,
        positions_RD=positions_RD[zero - past - count : zero + count],
    )


def relative_positions(past: int, count: int, dim: int, like: Tensor) -> Tensor:
    """Encodings of the distances -(past + count) .. count - 1: (R, dim), in the dtype of `like`.

    A distance is compressed to an angle in (-pi/2, pi/2), linearly near zero and logarithmically
    beyond, so encodings of large distances differ little from their neighbours. The encoding holds
    cosines and sines of the first dim / 2 multiples of the angle, interleaved, with a constant one
    in place of the last sine.
    """
    distance = torch.arange(-(past + count), count, device=like.device, dtype=torch.float32)
    knee = math.sqrt(dim)
    compressed = knee * distance.sign() * ((distance.abs() + knee).log() - math.log(knee))
    angle = (compressed * (2.0 * math.pi / dim)).atan()
    multiples = angle[:, None] * torch.arange(1, dim // 2 + 1, device=like.device)
    encodings_RD = torch.stack((multiples.cos(), multiples.sin()), dim=-1).flatten(1)
    ones_R1 = torch.ones_like(encodings_RD[:, :1])
    return torch.cat((encodings_RD[:, :-1], ones_R1), dim=1).to(like.dtype)


def extend(past: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor | None]:
    """`past` (N, P, ...) and `new` (N, T, ...) concatenated, and the last P frames of the result.

    Without a past: `new` itself, and None.
    """
    if past is None:
        return new, None
    joined = torch.cat((past, new), dim=1)
    return joined, joined[:, new.size(1) :]


def _divide_up(lengths_N: Tensor, rate: int) -> Tensor:
    return (lengths_N + rate - 1) // rate
