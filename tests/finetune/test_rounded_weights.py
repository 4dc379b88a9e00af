"""Fine-tuning with rounded weights: the values of exported files, gradients, and what is saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pruned_rnnt.config.load import from_dict
from pruned_rnnt.export.precision import QUANTISED, Layer, QuantisedPrecision, rounded_weight
from pruned_rnnt.model.quantisation import round_weights, rounded
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_models import tiny_conformer, tiny_model


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("inputs", [32, 96, 70])
def test_values_are_those_of_exported_files(precision: QuantisedPrecision, inputs: int) -> None:
    weight_OI = torch.randn(48, inputs, generator=torch.Generator().manual_seed(0))
    weight_OI[3] = 0
    values = np.ascontiguousarray(weight_OI.T.numpy())
    expected_IO = rounded_weight(precision, Layer("name", "weight", values, 1, "computed"))
    found_OI = rounded(weight_OI, precision)
    np.testing.assert_allclose(found_OI.numpy(), expected_IO.T, atol=1e-6)
    assert not torch.equal(found_OI, weight_OI)


def test_gradients_pass_the_rounding_unchanged() -> None:
    weight_OI = torch.randn(64, 32, requires_grad=True)
    upstream_OI = torch.randn(64, 32)
    rounded(weight_OI, "int8").backward(upstream_OI)
    torch.testing.assert_close(weight_OI.grad, upstream_OI)


def test_the_encoder_computes_with_rounded_weights_and_keeps_its_own() -> None:
    first, last = nn.Linear(64, 64), nn.Linear(64, 4)
    encoder = nn.Sequential(first, nn.ReLU(), last)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    x_NI = torch.randn(5, 64)
    expected = nn.functional.linear(x_NI, rounded(first.weight, "int4"), first.bias)
    expected = nn.functional.linear(expected.relu(), last.weight, last.bias)
    assert round_weights(encoder, "int4") == ["0"]  # the second has few weights
    output = encoder(x_NI)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    assert first.weight.grad is not None
    assert encoder.state_dict().keys() == before.keys()
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_layer_alone_can_be_rounded() -> None:
    layer = nn.Linear(64, 64)
    x_NI = torch.randn(5, 64)
    expected = nn.functional.linear(x_NI, rounded(layer.weight, "int4"), layer.bias)
    assert round_weights(layer, "int4") == [""]
    torch.testing.assert_close(layer(x_NI), expected)


def test_weights_are_restored_after_an_error() -> None:
    encoder = nn.Sequential(nn.Linear(64, 64))
    weight = encoder[0].weight
    round_weights(encoder, "int8")
    with pytest.raises(RuntimeError):
        encoder(torch.randn(5, 3))
    assert encoder[0].weight is weight


def test_refusals() -> None:
    with pytest.raises(ValueError, match="has no matrix of 2,048 weights or more"):
        round_weights(tiny_model(tiny_conformer()).encoder, "int8")
    values = {"train": {"init": "exp/run"}, "finetune": {"quantise": "int8", "lora": {"rank": 2}}}
    with pytest.raises(ValueError, match=r"need finetune\.lora\.rank=0"):
        from_dict(ExperimentConfig, values, "test")
