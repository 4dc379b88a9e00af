"""Ranges of the inputs of matrix products."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.model.conformer import Conformer, ConformerConfig
from pruned_rnnt.model.quantisation import (
    LayerRange,
    activation_ranges,
    quantised_layers,
    rounded_input,
)
from pruned_rnnt.model.zipformer import Zipformer, zipformer_config


class TwoLayers(nn.Module):
    """The second layer gets channel 5 of the first one twenty times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.small = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(64))
            self.first.weight[5] *= 20
            self.first.bias.zero_()

    def forward(self, features_NTF: Tensor, _: Tensor) -> Tensor:
        output: Tensor = self.small(self.second(self.first(features_NTF)))
        return output


def test_the_largest_channel_is_found_over_all_utterances() -> None:
    features_TF = torch.ones(7, 64)
    features_TF[3, 2] = -3.0
    encoder = TwoLayers().train()
    second, first = activation_ranges(encoder, [torch.ones(9, 64), features_TF])
    assert first == LayerRange("first", channel=2, largest=3.0, median=1.0, error=first.error)
    assert second == LayerRange("second", channel=5, largest=20.0, median=1.0, error=second.error)
    assert 0 < first.error < 0.01
    assert (first.ratio, second.ratio) == (3.0, 20.0)
    assert encoder.training
    assert not encoder.first._forward_pre_hooks


@pytest.mark.parametrize(("largest", "ratio"), [(0.0, 1.0), (2.0, math.inf)])
def test_channels_of_zeros(largest: float, ratio: float) -> None:
    assert LayerRange("a", 0, largest, 0.0, 0.0).ratio == ratio


@pytest.mark.parametrize("shift", [0.0, 3.0, -9.0])
def test_inputs_are_rounded_as_by_onnx(shift: float) -> None:
    reference = pytest.importorskip("onnx.reference.ops.op_dynamic_quantize_linear")
    x_RI = torch.randn(20, 32, generator=torch.Generator().manual_seed(0)) + shift
    integers, scale, zero = reference.DynamicQuantizeLinear.eval(x_RI.numpy())
    expected = (integers.astype(float) - float(zero)) * float(scale)
    assert abs(rounded_input(x_RI).numpy() - expected).max() < 1e-5
    assert torch.equal(rounded_input(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_a_large_channel_costs_the_others_their_precision() -> None:
    """Its own weights are zero, so that it alone changes nothing."""
    encoder = TwoLayers()
    with torch.no_grad():
        encoder.second.weight[:, 5] = 0
        plain = activation_ranges(encoder, [torch.rand(50, 64)])
        encoder.first.weight[5] *= 20
        worse = activation_ranges(encoder, [torch.rand(50, 64)])
    errors = [
        next(each.error for each in found if each.layer == "second") for found in (plain, worse)
    ]
    assert errors[1] > 10 * errors[0] > 0


@pytest.mark.parametrize("kind", ["conformer", "zipformer"])
def test_every_quantised_layer_has_ranges(kind: str) -> None:
    """Encoders that multiply with a weight without calling its module would be missed."""
    encoder: nn.Module
    if kind == "conformer":
        encoder = Conformer(ConformerConfig(layers=1, dim=64, feedforward_dim=64))
    else:
        sizes = (64, 64)
        encoder = Zipformer(
            zipformer_config(
                "small",
                downsampling=(1, 2),
                layers=(1, 1),
                dims=sizes,
                unmasked_dims=sizes,
                feedforward_dims=sizes,
                heads=(4, 4),
                kernel_sizes=(7, 7),
            )
        )
    found = activation_ranges(encoder, [torch.randn(60, 80)])
    assert {each.layer for each in found} == set(quantised_layers(encoder))
    assert len(found) >= 8
    assert [each.ratio for each in found] == sorted((each.ratio for each in found), reverse=True)
