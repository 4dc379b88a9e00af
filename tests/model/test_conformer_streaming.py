"""A stream of chunks gives the output of the whole utterance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pruned_rnnt.model.conformer import Conformer
from pruned_rnnt.model.conformer_streaming import ConformerState, StreamingConformer
from tests.model.chunks import encode_chunks
from tests.tiny_models import tiny_conformer

CONFIG = tiny_conformer(num_mel_bins=20, layers=3, kernel_size=5, causal=True)


def encoder_with(chunk_size: int, left_chunks: int | None) -> Conformer:
    torch.manual_seed(0)
    return Conformer(replace(CONFIG, chunk_size=chunk_size, left_chunks=left_chunks)).eval()


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("left_chunks", [0, 1, 4])
@torch.inference_mode()
def test_stream_equals_whole_utterance(chunk_size: int, left_chunks: int) -> None:
    encoder = encoder_with(chunk_size, left_chunks)
    stream = StreamingConformer(encoder, chunk_size, left_chunks * chunk_size)
    lengths = torch.tensor([203, 131, 7, 64])
    features = torch.full((4, 203, 20), 1e3)
    for n, length in enumerate(lengths.tolist()):
        features[n, :length] = torch.randn(length, 20) * 4 - 7
    whole, frames = encoder(features, lengths)
    streamed = encode_chunks(stream, features, lengths)
    for n, count in enumerate(frames.tolist()):
        torch.testing.assert_close(streamed[n, :count], whole[n, :count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
@torch.inference_mode()
def test_bfloat16_stream_is_close_to_the_whole_utterance(autocast: bool) -> None:
    encoder = encoder_with(4, 2)
    features = torch.randn(1, 87, 20) * 4 - 7
    lengths = torch.tensor([87])
    exact, _ = encoder(features, lengths)
    if not autocast:
        encoder.bfloat16()
        features = features.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        whole, _ = encoder(features, lengths)
        streamed = encode_chunks(StreamingConformer(encoder, 4, 8), features, lengths)
    for output in (whole, streamed[:, : whole.size(1)]):
        assert (output.float() - exact).norm() < 0.03 * exact.norm()


@torch.inference_mode()
def test_unlimited_left_context_equals_enough_left_frames() -> None:
    encoder = encoder_with(4, None)
    stream = StreamingConformer(encoder, 4, 48)
    features = torch.randn(1, 203, 20)
    lengths = torch.tensor([203])
    whole, frames = encoder(features, lengths)
    streamed = encode_chunks(stream, features, lengths)
    torch.testing.assert_close(streamed[:, : int(frames)], whole, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_streams_of_different_age_share_a_batch() -> None:
    """A stream's output does not depend on which streams it is batched with."""
    stream = StreamingConformer(encoder_with(4, 2), 4, 8)
    features = torch.randn(2, stream.shift * 3 + 3, 20)
    chunks = [
        features[:, i * stream.shift : i * stream.shift + stream.input_frames] for i in range(3)
    ]
    state = stream.start(2)
    expected = []
    for chunk in chunks:
        encoded, state = stream(chunk, state)
        expected.append(encoded)

    _, old = stream(chunks[0][:1], stream.start(1))
    young = stream.start(1)
    both = ConformerState(
        torch.cat((old.attention_LPNE, young.attention_LPNE), dim=2),
        torch.cat((old.convolution_LKNE, young.convolution_LKNE), dim=2),
        torch.cat((old.processed_N, young.processed_N)),
    )
    for step in range(2):
        mixed = torch.cat((chunks[step + 1][:1], chunks[step][1:]))
        encoded, both = stream(mixed, both)
        torch.testing.assert_close(encoded[0], expected[step + 1][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(encoded[1], expected[step][1], rtol=0, atol=1e-5)
    assert both.processed_N.tolist() == [3 * stream.shift, 2 * stream.shift]


def test_chunk_arithmetic() -> None:
    encoder = encoder_with(16, 4)
    stream = StreamingConformer(encoder, 16, 64)
    assert (stream.input_frames, stream.shift) == (67, 64)
    assert int(encoder.output_lengths(torch.tensor(stream.input_frames))) == 16


@pytest.mark.parametrize(
    ("causal", "chunk_size", "left_frames", "message"),
    [
        (False, 4, 8, "not causal"),
        (True, 0, 8, "chunk_size is 0"),
        (True, 4, -1, "left_frames is -1"),
    ],
)
def test_wrong_settings_are_errors(
    causal: bool, chunk_size: int, left_frames: int, message: str
) -> None:
    encoder = Conformer(replace(CONFIG, causal=causal))
    with pytest.raises(ValueError, match=message):
        StreamingConformer(encoder, chunk_size, left_frames)
