"""The memory order of matrices: output, values and gradients stay."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.model import linear
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.encoder_kinds import build_encoder
from pruned_rnnt.model.linear import transpose_in_memory
from tests.tiny_models import tiny_conformer, tiny_zipformer


@pytest.mark.parametrize(
    "config", [tiny_conformer(), tiny_zipformer(causal=False)], ids=lambda c: c.kind
)
@pytest.mark.parametrize("in_inference", [False, True])
def test_transposed_matrices_change_nothing_else(config: EncoderConfig, in_inference: bool) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(config).eval()
    features = torch.randn(1, 61, config.num_mel_bins) * 4 - 7
    lengths = torch.tensor([61])
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    wanted, _ = encoder(features, lengths)
    with torch.inference_mode(in_inference):
        transpose_in_memory(encoder)
        transpose_in_memory(encoder)
    output, _ = encoder(features, lengths)
    torch.testing.assert_close(output, wanted)
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name])
    output.sum().backward()
    matrices = [parameter for parameter in encoder.parameters() if parameter.dim() == 2]
    assert matrices
    for parameter in matrices:
        assert parameter.t().is_contiguous()
        assert not parameter.is_inference()


def test_frozen_weights_keep_no_input_and_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "train_with_kernels", lambda *tensors: True)
    layer = linear.Linear(4, 3)
    layer.weight.requires_grad_(False)
    x = torch.randn(5, 4, requires_grad=True)
    output = layer(x)
    assert all(each is None or each.shape == (3, 4) for each in output.grad_fn.saved_tensors)
    output.sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), 5.0))
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 4))


def test_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        encoder = build_encoder(tiny_conformer()).eval()
    features = torch.randn(1, 61, encoder.config.num_mel_bins) * 4 - 7
    with torch.inference_mode():
        wanted, _ = encoder(features, torch.tensor([61]))
    transpose_in_memory(encoder)
    with torch.inference_mode():
        output, _ = encoder(features, torch.tensor([61]))
    torch.testing.assert_close(output, wanted)
