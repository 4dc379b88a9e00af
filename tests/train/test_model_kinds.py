"""Choice of encoder and predictor by their kind in the configuration of an experiment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pruned_rnnt.config.load import ConfigError, load_config
from pruned_rnnt.config.written import to_yaml
from pruned_rnnt.export.differences import check_predictor
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.model_config import ModelConfig
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.zipformer import LARGE, SMALL
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.train.experiment import ExperimentConfig


def test_configuration_files(tmp_path: Path) -> None:
    path = tmp_path / "z.yaml"
    path.write_text("model: {encoder: {kind: zipformer, size: small, causal: true}}\n")
    config = load_config(ExperimentConfig, path, ["model.encoder.chunk_size=16"])
    expected = dataclasses.replace(SMALL, causal=True, chunk_size=16)
    assert config.model.encoder == expected
    path.write_text(to_yaml(config))
    assert load_config(ExperimentConfig, path) == config
    large = load_config(
        ExperimentConfig, None, ["model.encoder.kind=zipformer", "model.encoder.size=large"]
    )
    assert large.model.encoder == LARGE
    old = tmp_path / "old.yaml"
    old.write_text("model: {encoder: {dim: 96, layers: 3}}\n")
    assert load_config(ExperimentConfig, old).model.encoder == ConformerConfig(dim=96, layers=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.encoder.kind=zipfomer"], "did you mean 'zipformer'"),
        (["model.encoder.kind=zipformer", "model.encoder.dim=3"], r"mean 'model\.encoder\.dims'"),
        (["model.encoder.size=small"], r"unknown key 'model\.encoder\.size'"),
        (["model.encoder.kind=zipformer", "model.encoder.size=tiny"], r"model\.encoder\.size"),
    ],
)
def test_configuration_errors(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(ExperimentConfig, None, overrides)


def test_predictors() -> None:
    settings = ["model.predictor.kind=lstm", "model.predictor.layers=2"]
    config = load_config(ExperimentConfig, None, settings)
    assert config.model.predictor == LstmPredictorConfig(layers=2)
    with pytest.raises(ConfigError, match=r"unknown key 'model\.predictor\.context_size'"):
        load_config(ExperimentConfig, None, [*settings, "model.predictor.context_size=1"])


def test_predictor_with_a_state_cannot_be_exported() -> None:
    model = TransducerModel(ModelConfig(predictor=LstmPredictorConfig()), 7)
    with pytest.raises(ExportError, match="sherpa-onnx runs only stateless predictors"):
        check_predictor(model)
