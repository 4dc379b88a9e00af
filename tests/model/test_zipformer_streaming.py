"""Streaming: a stream of chunks has the output of the whole utterance."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree

from pruned_rnnt.model.zipformer import StreamingZipformer, Zipformer, ZipformerState
from tests.model.zipformer_tiny import CAUSAL, TINY, ragged_batch, sine_encoder

# Of float64 sums in another order; outputs are up to 3. Float32 differs by processor, up to 1e-5.
ROUNDING = 1e-11
CHUNK_SIZES = [size for size in CAUSAL.chunk_sizes if size > 0]


def chunks_of(batch: Tensor, chunk_size: int, garbage: float = 1e3) -> list[tuple[int, Tensor]]:
    """(begin, chunk) pairs of a batch; the last chunks are filled up with garbage."""
    window = 2 * chunk_size + 13
    chunks = []
    for begin in range(0, batch.size(1), 2 * chunk_size):
        chunk = batch[:, begin : begin + window]
        missing = window - chunk.size(1)
        chunks.append((begin, functional.pad(chunk, (0, 0, 0, missing), value=garbage)))
    return chunks


def run_stream(
    encoder: Zipformer, batch: Tensor, lengths: Tensor, chunk_size: int, left_context: int
) -> Tensor:
    state = encoder.streaming_init_states(batch.size(0), left_context)
    outputs = []
    for begin, chunk in chunks_of(batch, chunk_size):
        real = (lengths - begin).clamp(0, chunk.size(1))
        encoded, state = encoder.streaming_forward(chunk, state, real)
        outputs.append(encoded)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize(
    "left_chunks", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))]
)
@pytest.mark.parametrize("feature_norm", ["none", "fixed"])
@torch.inference_mode()
def test_stream_equals_whole_utterance(
    chunk_size: int, left_chunks: int, feature_norm: Literal["none", "fixed"]
) -> None:
    encoder = sine_encoder(dataclasses.replace(CAUSAL, feature_norm=feature_norm)).double()
    batch, lengths, _ = ragged_batch([203, 131, 9, 64, 200])
    batch = batch.double()
    left_context = left_chunks * chunk_size
    whole, frames = encoder(batch, lengths, chunk_size=chunk_size, left_context=left_context)
    streamed = run_stream(encoder, batch, lengths, chunk_size, left_context)
    for n, count in enumerate(frames.tolist()):
        torch.testing.assert_close(streamed[n, :count], whole[n, :count], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("left_context", [0, 6, 14, 20])
@torch.inference_mode()
def test_left_contexts_that_are_no_whole_chunks(left_context: int) -> None:
    """A stream has the chunks of the past that validation has."""
    config = dataclasses.replace(CAUSAL, chunk_size=8, left_context=left_context)
    encoder = sine_encoder(config).double()
    batch, lengths, _ = ragged_batch([203])
    batch = batch.double()
    whole, _ = encoder(batch, lengths)
    chunk, left = config.stream_sizes
    streamed = run_stream(encoder, batch, lengths, 2 * chunk, 2 * left)
    count = whole.size(1)
    torch.testing.assert_close(streamed[:, :count], whole, rtol=0, atol=ROUNDING)


@torch.inference_mode()
def test_lengths_default_to_full_chunks() -> None:
    encoder = sine_encoder(CAUSAL).double()
    batch = ragged_batch([16 * 5 + 13])[0].double()
    whole, _ = encoder(batch, torch.tensor([batch.size(1)]), chunk_size=8, left_context=16)
    state = encoder.streaming_init_states(1, 16)
    outputs = []
    for begin in range(0, 16 * 5, 16):
        encoded, state = encoder.streaming_forward(batch[:, begin : begin + 29], state)
        outputs.append(encoded)
    assert state.processed.tolist() == [80]
    streamed = torch.cat(outputs, dim=1)
    assert streamed.size(1) == 20
    torch.testing.assert_close(streamed, whole[:, :20], rtol=0, atol=ROUNDING)


@torch.inference_mode()
def test_streams_can_be_joined_and_separated() -> None:
    """A stream that joins a batch late and leaves it early has the same output as alone."""
    encoder = sine_encoder(CAUSAL).double()
    _, lengths, singles = ragged_batch([160, 160])
    singles = [single.double() for single in singles]
    alone = run_stream(encoder, singles[1], lengths[1:], 16, 32)
    first = [chunk for _, chunk in chunks_of(singles[0], 16)]
    second = [chunk for _, chunk in chunks_of(singles[1], 16)]
    state = encoder.streaming_init_states(1, 32)
    _, state = encoder.streaming_forward(first[0], state)
    _, state = encoder.streaming_forward(first[1], state)
    together = _stack(state, encoder.streaming_init_states(1, 32))
    outputs = []
    for late, chunk in zip(first[2:4], second[:2], strict=True):
        encoded, together = encoder.streaming_forward(torch.cat((late, chunk)), together)
        outputs.append(encoded[1:])
    own = _pytree.tree_map(lambda tensor: tensor[1:], together)
    for begin, chunk in chunks_of(singles[1], 16)[2:]:
        real = (lengths[1:] - begin).clamp(0, chunk.size(1))
        encoded, own = encoder.streaming_forward(chunk, own, real)
        outputs.append(encoded)
    frames = (160 - 7) // 2 // 2
    streamed = torch.cat(outputs, dim=1)
    torch.testing.assert_close(streamed[:, :frames], alone[:, :frames], rtol=0, atol=ROUNDING)


def _stack(one: ZipformerState, other: ZipformerState) -> ZipformerState:
    return _pytree.tree_map(lambda a, b: torch.cat((a, b)), one, other)


@torch.inference_mode()
def test_streaming_encoder_equals_streaming_forward() -> None:
    encoder = sine_encoder(CAUSAL)
    stream = StreamingZipformer(encoder, chunk_size=4, left_frames=8)
    assert (stream.shift, stream.input_frames) == (16, 29)
    chunk = torch.randn(2, 29, TINY.num_mel_bins)
    encoded, state = stream(chunk, stream.start(2))
    expected, _ = encoder.streaming_forward(chunk, encoder.streaming_init_states(2, 16))
    assert encoded.shape == (2, 4, 32)
    assert torch.equal(encoded, expected)
    assert state.processed.tolist() == [16, 16]
    assert stream.output_length(torch.tensor([29, 9, 8])).tolist() == [4, 1, 0]


@pytest.mark.slow
@torch.inference_mode()
def test_streaming_encoder_can_be_exported() -> None:
    encoder = sine_encoder(CAUSAL)
    stream = StreamingZipformer(encoder, chunk_size=8, left_frames=16)
    chunk, state = torch.randn(2, stream.input_frames, TINY.num_mel_bins), stream.start(2)
    exported = torch.export.export(stream, (chunk, state)).module()
    expected, expected_state = stream(chunk, state)
    encoded, encoded_state = exported(chunk, state)
    torch.testing.assert_close(encoded, expected)
    torch.testing.assert_close(encoded_state.layers[3].values1, expected_state.layers[3].values1)


def test_invalid_calls_raise() -> None:
    with pytest.raises(ValueError, match="not causal"):
        Zipformer(TINY).streaming_init_states(1)
    encoder = Zipformer(CAUSAL)
    with pytest.raises(ValueError, match="left_context is 6, needs a multiple of 4"):
        encoder.streaming_init_states(1, 6)
    state = encoder.streaming_init_states(1)
    with pytest.raises(ValueError, match="chunk size is 6"):
        encoder.streaming_forward(torch.zeros(1, 25, 24), state)
    with pytest.raises(ValueError, match="chunk size is 0"):
        encoder.streaming_forward(torch.zeros(1, 12, 24), state)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        StreamingZipformer(encoder, 0, 8)
    with pytest.raises(ValueError, match="chunk size is 6"):
        StreamingZipformer(encoder, 3, 8)
