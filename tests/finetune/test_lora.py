"""Adapters change nothing at first, are all that is trained in the encoder, and merge exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig, SpecAugmentConfig
from pruned_rnnt.model.lora import LoraConfig, add_adapters, is_adapter, merge_adapters
from pruned_rnnt.model.model_config import ModelConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.transformers_encoder import build_transformers_encoder
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.experiment import ExperimentConfig, FinetuneConfig
from tests.model.tiny_pretrained import tiny_pretrained
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer

FEATURES, LENGTHS = torch.randn(2, 90, 80) * 3 - 5, torch.tensor([90, 61])
TARGETS, TARGET_LENGTHS = torch.tensor([[3, 5, 4], [4, 3, 0]]), torch.tensor([3, 2])
ENCODERS = pytest.mark.parametrize(
    "encoder",
    [
        tiny_conformer(),
        tiny_zipformer(causal=False),
        tiny_fastconformer(convolution_norm="batch"),
    ],
    ids=["conformer", "zipformer", "fastconformer"],
)


def train(model: TransducerModel, steps: int = 3, precision: Any = None) -> None:
    model.train()
    model.steps_before = 1e5  # no schedule leaves out whole branches
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.1)
    for step in range(steps):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
            losses = model(FEATURES, LENGTHS, TARGETS, TARGET_LENGTHS, step)
        (losses.objective / 100).backward()
        optimiser.step()
    model.eval()


@ENCODERS
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_only_adapters_change_and_merge_exactly(encoder: Any, precision: Any) -> None:
    model = tiny_model(encoder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected, _ = model.encode(FEATURES, LENGTHS)
        layers = add_adapters(model.encoder, LoraConfig(rank=2))
        assert torch.equal(model.encode(FEATURES, LENGTHS)[0], expected)
    assert any("in_proj" in name for name in layers)
    assert any("feed" in name for name in layers)
    train(model, precision=precision)
    after = model.state_dict()
    for name, value in before.items():
        is_statistic = name.endswith(".over_limit")
        if name.startswith("encoder.") and not is_statistic:
            assert torch.equal(after[name], value), name
    ups = [name for name in after if name.endswith("lora_up")]
    assert len(ups) == len(layers)
    assert all(after[name].abs().max() > 0 for name in ups)
    with torch.no_grad():
        adapted, _ = model.encode(FEATURES, LENGTHS)
        assert not torch.equal(adapted, expected)
        merge_adapters(model.encoder)
        assert torch.equal(model.encode(FEATURES, LENGTHS)[0], adapted)
    assert model.state_dict().keys() == before.keys()
    assert not any(is_adapter(name) for name in model.state_dict())
    model.load_state_dict(before)


def test_gradients_are_those_of_the_sum() -> None:
    model = tiny_model()
    add_adapters(model.encoder, LoraConfig(rank=3, alpha=6.0, parts=("attention",)))
    attention = model.encoder.layers[0].attention  # type: ignore[union-attr, index]
    layer: Any = attention.in_proj  # type: ignore[union-attr]
    nn.init.normal_(layer.lora_up)
    weight = layer.weight.detach() + 2.0 * layer.lora_up.detach() @ layer.lora_down.detach()
    encoded, _ = model.encode(FEATURES, LENGTHS)
    encoded.square().sum().backward()
    plain = tiny_model()
    own: Any = plain.encoder.layers[0].attention.in_proj  # type: ignore[union-attr, index]
    own.weight.data.copy_(weight)
    encoded, _ = plain.encode(FEATURES, LENGTHS)
    encoded.square().sum().backward()
    torch.testing.assert_close(layer.lora_up.grad, 2.0 * own.weight.grad @ layer.lora_down.T)
    torch.testing.assert_close(layer.lora_down.grad, 2.0 * layer.lora_up.T @ own.weight.grad)
    assert layer.weight.grad is None


def test_weights_are_restored_after_an_error() -> None:
    model = tiny_model()
    add_adapters(model.encoder, LoraConfig(rank=1))
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="features has shape"):
        model.encode(torch.zeros(1, 20, 3), torch.tensor([20]))
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_bad_settings() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"finetune.lora.parts is \['atention'\], needs some of"):
        LoraConfig(parts=("atention",))
    with pytest.raises(ValueError, match=r"finetune.lora.alpha is 0"):
        LoraConfig(alpha=0.0)
    with pytest.raises(ValueError, match="frozen is all, so the adapters would get no gradients"):
        ExperimentConfig(
            model=ModelConfig(encoder=tiny_pretrained("whisper", frozen="all")),
            data=DataConfig(
                features="waveform",
                augmentation=AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False)),
            ),
            train=TrainConfig(init="run"),
            finetune=FinetuneConfig(lora=LoraConfig(rank=1)),
        )
    layer = nn.ModuleDict({"layer": nn.ModuleDict({"fc1": nn.Linear(3, 3)})})
    with pytest.raises(ValueError, match="no layer of the ModuleDict belongs to attention: leave"):
        add_adapters(layer, LoraConfig(rank=1))
    assert add_adapters(layer, LoraConfig(rank=1, parts=("feed_forward",))) == ["layer.fc1"]


@pytest.mark.parametrize("name", ["wav2vec2-layer", "hubert-group", "wavlm-layer", "whisper"])
def test_all_matrices_of_pretrained_layers_have_adapters(name: str) -> None:
    pytest.importorskip("transformers")
    # In evaluation mode: training leaves out random layers.
    encoder = build_transformers_encoder(tiny_pretrained(name)).eval()
    layers = add_adapters(encoder, LoraConfig(rank=2))
    assert len(layers) == 12  # two layers: query, key, value, output and two of the feed-forward
    encoded, _ = encoder(torch.randn(2, 60, 160), torch.tensor([60, 50]))
    encoded.square().sum().backward()
    ups = [p for key, p in encoder.named_parameters() if key.endswith("lora_up")]
    assert len(ups) == 12
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in ups)
