"""Parts are frozen by name, and the learning rate falls with the depth of a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.finetune.finetune_task import (
    check_no_frozen_adapters,
    check_trained,
    freeze,
    part_names,
)
from pruned_rnnt.model.lora import LoraConfig, add_adapters, is_adapter
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.train.optim.optimiser import OptimiserConfig, build_optimiser, grouped_by_rate
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer

OPTIMISERS = ("adamw", "scaled_adam")


def frozen_names(model: TransducerModel) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def losses(model: TransducerModel) -> Any:
    torch.manual_seed(2)
    features, lengths = torch.randn(2, 90, 80) * 3 - 5, torch.tensor([90, 61])
    targets, target_lengths = torch.tensor([[3, 5, 4], [4, 3, 0]]), torch.tensor([3, 2])
    return model.train()(features, lengths, targets, target_lengths, 0).objective / 100


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encoder.layers.1", "encoder.layers.1."),
        ("predictor", "predictor."),
        ("encoder.layers.*.attention", "encoder.layers."),
        ("*.bias", ""),
    ],
)
def test_freeze_by_name(pattern: str, expected: str) -> None:
    model = tiny_model(tiny_conformer(layers=2))
    count = freeze(model, [pattern])
    names = frozen_names(model)
    assert names
    assert all(name.startswith(expected) for name in names)
    if pattern == "*.bias":
        assert names == {n for n, _ in model.named_parameters() if n.endswith(".bias")}
    if "attention" in pattern:
        assert all(".attention." in name for name in names)
    assert count == sum(p.numel() for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", ["encoder", "joiner", "predictor", "pruned_loss", "ctc_head"])
def test_frozen_parts_do_not_change(name: str) -> None:
    model = tiny_model()
    freeze(model, [name])
    before = {key: p.clone() for key, p in model.named_parameters()}
    losses(model).backward()
    build_optimiser(model, OptimiserConfig()).step()
    for key, parameter in model.named_parameters():
        changed = not torch.equal(parameter, before[key])
        # The embeddings of symbols that do not occur stay the same, too; weight decay moves them.
        assert changed == (not key.startswith(f"{name}.")), key


def test_frozen_batch_norms_keep_their_statistics() -> None:
    model = tiny_model(tiny_fastconformer(convolution_norm="batch"))
    features, lengths = torch.randn(2, 90, 80) * 3 - 5, torch.tensor([90, 61])
    with torch.no_grad():
        expected, _ = model.encode(features, lengths)
    freeze(model, ["encoder"])
    losses(model).backward()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model.encode(features, lengths)[0], expected)


@pytest.mark.parametrize("pattern", ["encoder.layers.1", "*.in_proj"])
def test_frozen_layers_with_adapters_are_refused(pattern: str) -> None:
    model = tiny_model(tiny_conformer(layers=2))
    layers = add_adapters(model.encoder, LoraConfig(rank=1))
    check_no_frozen_adapters(model, layers, ["encoder", "encoder.subsampling", "*.bias", "joiner"])
    with pytest.raises(ConfigError, match=r"matches encoder\.layers\.\d\S+, which has an adapter"):
        check_no_frozen_adapters(model, layers, ["joiner", pattern])


def test_unknown_names_are_refused_with_a_list() -> None:
    model = tiny_model(tiny_conformer(layers=2))
    with pytest.raises(ConfigError, match=r"'encoder.layer' matches no parameter.*layers\.1, pred"):
        freeze(model, ["encoder.layer"])
    freeze(model, ["*"])
    with pytest.raises(ConfigError, match=r"finetune.freeze=\['\*'\] leaves nothing to train"):
        check_trained(model, ["*"])
    add_adapters(model.encoder, LoraConfig(rank=1))
    check_trained(model, ["*"])
    assert part_names(tiny_model()) == [
        *("encoder", "encoder.subsampling", "encoder.layers.0"),
        *("predictor", "predictor.embedding", "predictor.convolution"),
        *("joiner", "joiner.encoder_proj", "joiner.decoder_proj", "joiner.output_linear"),
        *("ctc_head", "pruned_loss", "pruned_loss.simple_am_proj", "pruned_loss.simple_lm_proj"),
    ]


def test_rates_fall_with_the_depth() -> None:
    model = tiny_model(tiny_conformer(layers=3))
    rates = {
        id(parameter): group.rate
        for group in grouped_by_rate(model, 0.5)
        for parameter in group.parameters
    }
    for name, parameter in model.named_parameters():
        expected = 1.0
        if name.startswith("encoder."):
            layer = int(name.split(".")[2]) + 1 if ".layers." in name else 0
            expected = 0.5 ** (3 - layer)
        assert rates[id(parameter)] == expected, name
    (one,) = grouped_by_rate(model, 1.0)
    assert [id(p) for p in one.parameters] == [id(p) for p in model.parameters()]


def test_layers_of_all_stacks_count() -> None:
    model = tiny_model(tiny_zipformer(causal=False))
    rates = {group.rate for group in grouped_by_rate(model, 0.5)}
    assert rates == {1.0, 0.5, 0.25}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_scale_the_rate(name: Any) -> None:
    """With a rate of zero below the top layer, only the top layer and the rest change."""
    model = tiny_model(tiny_conformer(layers=2))
    config = OptimiserConfig(name=name)
    optimiser = build_optimiser(model, config, grouped_by_rate(model, 1e-3))
    for group in optimiser.param_groups:
        group["lr"] = config.learning_rate if group["rate"] == 1.0 else 0.0
    before = {key: p.clone() for key, p in model.named_parameters()}
    losses(model).backward()
    optimiser.step()
    for key, parameter in model.named_parameters():
        below = key.startswith(("encoder.subsampling", "encoder.layers.0"))
        if below:
            assert torch.equal(parameter, before[key]), key
    top = "encoder.layers.1.attention.in_proj.weight"
    assert not torch.equal(dict(model.named_parameters())[top], before[top])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_adapters_that_start_at_zero_are_trained(name: Any) -> None:
    torch.manual_seed(0)
    model = tiny_model()
    add_adapters(model.encoder, LoraConfig(rank=2))
    config = OptimiserConfig(name=name, learning_rate=1e-3 if name == "adamw" else 0.02)
    optimiser = build_optimiser(model, config, grouped_by_rate(model, 1.0))
    for _ in range(20):
        optimiser.zero_grad()
        losses(model).backward()
        optimiser.step()
    ups = [p for key, p in model.named_parameters() if key.endswith("lora_up")]
    assert all(1e-3 < float(p.detach().square().mean().sqrt()) < 0.1 for p in ups)
    groups = [g for g in grouped_by_rate(model, 1.0) if g.start_at_zero]
    assert len(groups) == 1
    names = {id(p): key for key, p in model.named_parameters()}
    assert all(is_adapter(names[id(p)]) for p in groups[0].parameters)
