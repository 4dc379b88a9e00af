"""The encoder: known values, parameter counts, and the frames that an output depends on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pruned_rnnt.config.load import from_dict, to_dict
from pruned_rnnt.model.zipformer import (
    SIZES,
    Zipformer,
    ZipformerConfig,
    subsampled_length,
    zipformer_config,
)
from tests.model.zipformer_tiny import CAUSAL, TINY, ragged_batch, sine_encoder, sine_features

# Computed by an independent float32 implementation of the published model from the sine weights
# and 131 sine features: every fifth channel of all frames, flattened, and every 19th value of it.
KNOWN = [
    (
        TINY,
        {},
        "2.04061 0.16564 1.71406 1.52415 0.83871 1.40279 1.83049 1.97258 0.13011 1.72584 1.48979",
        2842.634479,
    ),
    (
        CAUSAL,
        {"chunk_size": 8, "left_context": 16},
        "2.51401 0.09083 0.83026 1.41928 1.42007 0.7809 0.92702 2.72329 0.12922 0.95321 1.62668",
        1866.514108,
    ),
    (
        CAUSAL,
        {"chunk_size": -1},
        "2.50769 0.03727 0.80783 1.56471 1.38502 0.2215 1.11124 2.47706 0.0526 1.0478 1.49887",
        1864.553457,
    ),
]


@pytest.mark.parametrize(("config", "chunking", "values", "sum_of_squares"), KNOWN)
@torch.inference_mode()
def test_known_values(
    config: ZipformerConfig, chunking: dict[str, int], values: str, sum_of_squares: float
) -> None:
    encoded, lengths = sine_encoder(config)(sine_features(131), torch.tensor([131]), **chunking)
    assert encoded.shape == (1, 31, 32)
    assert lengths.tolist() == [31]
    some = encoded[0, :, ::5].flatten()[::19]
    expected = torch.tensor([float(value) for value in values.split()])
    torch.testing.assert_close(some[:11], expected, rtol=0, atol=1e-4)
    assert encoded.square().sum().item() == pytest.approx(sum_of_squares, rel=1e-5)


# Published parameter counts of the whole transducer with 500 symbols.
COUNTS = [
    ("small", False, 23_285_615),
    ("medium", False, 65_549_011),
    ("medium", True, 66_110_931),
    ("large", False, 148_439_574),
]


@pytest.mark.parametrize(("size", "causal", "published"), COUNTS)
def test_parameter_counts(size: str, causal: bool, published: int) -> None:
    config = zipformer_config(size, causal=causal)
    with torch.device("meta"):
        encoder = Zipformer(config)
    ours = sum(parameter.numel() for parameter in encoder.parameters())
    dim, width, symbols = config.output_dim, 512, 500
    predictor = symbols * width + width * 4 * 2
    joiner = (dim + 1) * width + (width + 1) * width + (width + 1) * symbols
    simple = (dim + 1) * symbols + (width + 1) * symbols
    # The published models have an unused vector in every layer.
    unused = sum(layers * dim for layers, dim in zip(config.layers, config.dims, strict=True))
    assert ours + predictor + joiner + simple + unused == published


CHUNKINGS = [
    (TINY, {}),
    (CAUSAL, {"chunk_size": 8, "left_context": 16}),
    (CAUSAL, {"chunk_size": 32, "left_context": -1}),
    (CAUSAL, {"chunk_size": -1}),
]


@pytest.mark.parametrize(("config", "chunking"), CHUNKINGS)
@torch.inference_mode()
def test_batch_equals_single_utterances(config: ZipformerConfig, chunking: dict[str, int]) -> None:
    encoder = sine_encoder(config)
    batch, lengths, singles = ragged_batch([150, 9, 91, 38, 147])
    encoded, frames = encoder(batch, lengths, **chunking)
    assert torch.equal(frames, subsampled_length(lengths))
    for n, single in enumerate(singles):
        alone, count = encoder(single, lengths[n : n + 1], **chunking)
        assert alone.size(1) == int(count) == int(frames[n])
        torch.testing.assert_close(encoded[n, : int(count)], alone[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
@torch.inference_mode()
def test_causal_encoder_ignores_later_chunks(chunk_size: int) -> None:
    encoder = sine_encoder(CAUSAL)
    features, length = sine_features(263), torch.tensor([263])
    before, _ = encoder(features, length, chunk_size=chunk_size, left_context=32)
    # Feature frames of the first 64 embedding frames and of three more as context.
    seen = 2 * 64 + 13
    features[:, seen:] = 7.0
    after, _ = encoder(features, length, chunk_size=chunk_size, left_context=32)
    torch.testing.assert_close(after[:, :32], before[:, :32], rtol=0, atol=1e-5)
    assert (after[:, 32:] - before[:, 32:]).abs().max() > 0.01
    features[:, seen - 1] = 7.0
    earlier, _ = encoder(features, length, chunk_size=chunk_size, left_context=32)
    assert (earlier[:, :32] - before[:, :32]).abs().max() > 1e-4


@torch.inference_mode()
def test_left_context_limits_the_past() -> None:
    """Older frames have an effect only through convolutions, and it fades."""
    encoder = sine_encoder(dataclasses.replace(CAUSAL, layers=(1, 1, 1, 1), kernel_sizes=(3,) * 4))
    features, length = sine_features(1031), torch.tensor([1031])
    near, _ = encoder(features, length, chunk_size=8, left_context=16)
    far, _ = encoder(features, length, chunk_size=8, left_context=-1)
    assert (near - far).abs().max() > 1e-3
    features[:, :300] = 7.0
    changed, _ = encoder(features, length, chunk_size=8, left_context=16)
    torch.testing.assert_close(changed[:, -40:], near[:, -40:], rtol=0, atol=1e-5)
    changed, _ = encoder(features, length, chunk_size=8, left_context=-1)
    assert (changed[:, -40:] - far[:, -40:]).abs().max() > 1e-4


@torch.inference_mode()
def test_evaluation_is_deterministic() -> None:
    encoder = sine_encoder(CAUSAL)
    batch, lengths, _ = ragged_batch([60, 44])
    once, _ = encoder(batch, lengths)
    torch.rand(7)
    again, _ = encoder(batch, lengths)
    assert torch.equal(once, again)
    chosen, _ = encoder(batch, lengths, chunk_size=8, left_context=16)
    assert torch.equal(once, chosen)


@pytest.mark.parametrize("config", [TINY, CAUSAL])
@torch.inference_mode()
def test_bfloat16_autocast(config: ZipformerConfig) -> None:
    encoder = sine_encoder(config)
    batch, lengths, _ = ragged_batch([90, 61])
    exact, frames = encoder(batch, lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = encoder(batch, lengths)
    assert rounded.dtype == torch.float32
    for n, count in enumerate(frames.tolist()):
        difference = (rounded[n, :count] - exact[n, :count]).square().mean().sqrt()
        assert difference < 0.05 * exact[n, :count].std()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TINY, CAUSAL])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_device_equals_cpu(config: ZipformerConfig, dtype: torch.dtype | None) -> None:
    encoder = sine_encoder(config)
    batch, lengths, _ = ragged_batch([90, 61])
    exact, frames = encoder(batch, lengths)
    encoder.cuda()
    with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
        there, _ = encoder(batch.cuda(), lengths)
    for n, count in enumerate(frames.tolist()):
        difference = (there[n, :count].float().cpu() - exact[n, :count]).square().mean().sqrt()
        assert difference < (1e-3 if dtype is None else 0.05) * exact[n, :count].std()


def test_configuration_round_trip() -> None:
    config = dataclasses.replace(SIZES["small"], causal=True, chunk_sizes=(16, -1))
    assert from_dict(ZipformerConfig, to_dict(config)) == config


WRONG = [
    ({"heads": (4, 4)}, "model.encoder.heads has 2 entries"),
    ({"kernel_sizes": (31, 31, 15, 15, 15, 30)}, "odd"),
    ({"causal": True, "chunk_sizes": (12,)}, "chunk size is 12, needs a multiple of 8"),
    ({"dims": (190, 256, 384, 512, 384, 256)}, "multiples of 4"),
    ({"num_mel_bins": 8}, "at least 11"),
    ({"position_dim": 47}, "even"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_invalid_configurations_raise(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zipformer_config("medium", **changes)


def test_invalid_calls_raise() -> None:
    for make in (zipformer_config, lambda size: ZipformerConfig(size=size)):
        with pytest.raises(ValueError, match="'huge', needs one of small, medium, large"):
            make("huge")
    encoder = Zipformer(TINY)
    with pytest.raises(ValueError, match=r"features has shape \(1, 20, 80\), needs \(N, T, 24\)"):
        encoder(torch.zeros(1, 20, 80), torch.tensor([20]))
    with pytest.raises(ValueError, match="at least 9"):
        encoder(torch.zeros(1, 8, 24), torch.tensor([8]))
    with pytest.raises(ValueError, match="not causal"):
        encoder(torch.zeros(1, 20, 24), torch.tensor([20]), chunk_size=8)
    with pytest.raises(ValueError, match="chunk size is 6, needs a multiple of 4"):
        Zipformer(CAUSAL)(torch.zeros(1, 20, 24), torch.tensor([20]), chunk_size=6)


@torch.inference_mode()
def test_feature_norm() -> None:
    """`fixed` subtracts a constant, `utterance` the mean without padding."""
    batch, lengths, _ = ragged_batch([60, 41])
    plain = sine_encoder(TINY)(batch, lengths)[0]
    fixed = sine_encoder(dataclasses.replace(TINY, feature_norm="fixed"))
    torch.testing.assert_close(fixed(batch - 7.0, lengths)[0], plain)
    own = sine_encoder(dataclasses.replace(TINY, feature_norm="utterance"))
    centred = batch.clone()
    for n, length in enumerate(lengths.tolist()):
        centred[n] -= batch[n, :length].mean(dim=0)
    expected, counts = sine_encoder(TINY)(centred, lengths)
    garbage = batch + torch.linspace(-3.0, 3.0, batch.size(2))
    garbage[1, 41:] = 1e3
    got = own(garbage, lengths)[0]
    for n, count in enumerate(counts.tolist()):
        torch.testing.assert_close(got[n, :count], expected[n, :count], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"add model\.encoder\.feature_norm=fixed"):
        dataclasses.replace(CAUSAL, feature_norm="utterance")
