"""The FastConformer: padding has no effect, limited context, and batch normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pruned_rnnt.model.attention import RelativeAttention, relative_positions
from pruned_rnnt.model.conformer_layer import FrameBatchNorm
from pruned_rnnt.model.fastconformer import FastConformer, FastConformerConfig
from tests.tiny_models import tiny_fastconformer


def small(**changes: object) -> FastConformer:
    torch.manual_seed(0)
    encoder = FastConformer(tiny_fastconformer(num_mel_bins=16, layers=2, **changes)).eval()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return encoder


@pytest.mark.parametrize(
    ("changes", "frames"),
    [
        ({}, [8, 1, 5, 8]),
        ({"bias": False, "convolution_norm": "layer", "scale_input": False}, [8, 1, 5, 8]),
        ({"window": (2, 1)}, [8, 1, 5, 8]),
        ({"causal": True, "feature_norm": "none"}, [9, 1, 6, 9]),
    ],
)
@pytest.mark.parametrize("padding", [0.0, 1e4, float("nan")])
def test_batch_equals_single_for_any_padding(
    changes: dict[str, object], frames: list[int], padding: float
) -> None:
    encoder = small(**changes)
    lengths = torch.tensor([61, 1, 39, 64])
    features = torch.full((4, 64, 16), padding)
    for n, length in enumerate(lengths.tolist()):
        features[n, :length] = torch.randn(length, 16)
    output, output_lengths = encoder(features, lengths)
    assert output_lengths.tolist() == frames
    for n, length in enumerate(lengths.tolist()):
        alone, alone_lengths = encoder(features[n : n + 1, :length], lengths[n : n + 1])
        assert alone_lengths.tolist() == [frames[n]]
        assert alone.shape[1] == frames[n]
        torch.testing.assert_close(output[n, : frames[n]], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frame", [0, 3, 7])
def test_frames_outside_the_window_have_no_effect(frame: int) -> None:
    encoder = small(window=(1, 0), kernel_size=1, feature_norm="none")
    x = torch.randn(1, 64, 16)
    features = x.clone().requires_grad_()
    output, _ = encoder(features, torch.tensor([64]))
    output[0, frame].sum().backward()
    assert features.grad is not None
    seen = features.grad[0].abs().amax(dim=1).nonzero().flatten()
    # Two layers of one frame before; the convolutions see 7 frames on both sides.
    assert int(seen.min()) == max(0, 8 * (frame - 2) - 7)
    assert int(seen.max()) == min(63, 8 * frame + 7)


def test_relative_attention_equals_its_definition() -> None:
    torch.manual_seed(0)
    attention = RelativeAttention(8, 2).double()
    nn.init.normal_(attention.content_bias)
    nn.init.normal_(attention.position_bias)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    positions = relative_positions(5, 8, x.device, torch.float64)
    query, key, value = attention.in_proj(x[0]).view(5, 3, 2, 4).unbind(1)
    located = attention.position_proj(positions).view(9, 2, 4)
    expected = torch.zeros(5, 2, 4, dtype=torch.float64)
    for i in range(5):
        scores = [
            (query[i] + attention.content_bias) * key[j]
            + (query[i] + attention.position_bias) * located[4 - (i - j)]
            for j in range(5)
        ]
        weights = (torch.stack(scores).sum(-1) / 2).softmax(0)
        expected[i] = (weights[:, :, None] * value).sum(0)
    output = attention(x, None, positions)
    torch.testing.assert_close(output[0], attention.out_proj(expected.flatten(1)))
    # With a past, as the last frames of the whole.
    torch.testing.assert_close(attention(x[:, 3:], None, positions, x[:, :3]), output[:, 3:])


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_equals_torch_on_the_real_frames(training: bool) -> None:
    torch.manual_seed(0)
    norm, reference = FrameBatchNorm(4), nn.BatchNorm1d(4)
    for module in (norm, reference):
        module.train(training)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5]))
            module.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    x = torch.randn(2, 6, 4) * 3 + 1
    padding = (torch.arange(6) >= torch.tensor([6, 4])[:, None]).unsqueeze(-1)
    real = ~padding.squeeze(-1)
    for _ in range(2):
        output = norm(x.masked_fill(padding, 1e3), padding)
        torch.testing.assert_close(output[real], reference(x[real]))
    torch.testing.assert_close(norm.running_mean, reference.running_mean)
    torch.testing.assert_close(norm.running_var, reference.running_var)


def test_batch_norm_in_half_precision_has_no_constant_error() -> None:
    torch.manual_seed(0)
    norm, reference = FrameBatchNorm(64).eval(), nn.BatchNorm1d(64).eval()
    mean = 10 + 10 * torch.rand(64)
    for module in (norm, reference):
        module.running_mean.copy_(mean)  # type: ignore[union-attr]
    x = (torch.randn(400, 64) + mean).bfloat16()
    exact = reference(x.float())
    output = norm(x.unsqueeze(0)).squeeze(0)
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).mean(0).abs().max() < 0.002


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": (1,)}, r"window is \[1\], needs two numbers"),
        ({"window": (1, 1), "causal": True, "feature_norm": "none"}, "causal=false"),
        ({"window": (-1, 1)}, "window"),
        ({"causal": True}, "feature_norm is 'bins', which needs the whole utterance"),
    ],
)
def test_impossible_settings_are_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_fastconformer(**changes)


def test_training_gives_finite_gradients_to_all_parameters() -> None:
    encoder = small().train()
    output, lengths = encoder(torch.randn(2, 40, 16), torch.tensor([40, 17]))
    mask = torch.arange(output.size(1)) < lengths[:, None]
    output[mask].square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_defaults_are_those_of_the_large_model() -> None:
    config = FastConformerConfig()
    assert (config.layers, config.dim, config.heads, config.feedforward_dim) == (17, 512, 8, 2048)
