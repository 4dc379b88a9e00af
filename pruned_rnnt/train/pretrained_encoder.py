"""What a training takes from the pretrained encoder that its configuration names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from pruned_rnnt.config.load import ConfigError, load_config
from pruned_rnnt.licences.chain import Origin
from pruned_rnnt.model.transformers_encoder import TransformersEncoder
from pruned_rnnt.model.transformers_model import TransformersConfig, with_settings
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.experiment import ExperimentConfig


def whole_config(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration with the encoder's settings from its pretrained model.

    A run that exists has them in its own configuration: the model may be gone.

    Raises:
        ConfigError: there is no such model, or it is not supported.
        MissingPackageError: transformers is not installed.
    """
    encoder = config.model.encoder
    if not isinstance(encoder, TransformersConfig):
        return config
    encoder = _as_in_run(encoder, config.folder)
    try:
        whole = with_settings(encoder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return replace(config, model=replace(config.model, encoder=whole))


def _as_in_run(encoder: TransformersConfig, folder: Path) -> TransformersConfig:
    """The settings with those of the run that started from the same model, if there is one."""
    path = RunFolder(folder).config
    if not (encoder.name_or_folder and path.is_file()):
        return encoder
    before = load_config(ExperimentConfig, path, is_run=True).model.encoder
    if not isinstance(before, TransformersConfig):
        return encoder
    if before.name_or_folder != encoder.name_or_folder:
        return encoder
    normalise = before.normalise if encoder.normalise is None else encoder.normalise
    return replace(encoder, settings=encoder.settings or before.settings, normalise=normalise)


def start_from_pretrained(encoder: nn.Module, config: ExperimentConfig) -> None:
    """Load the parameters of `name_or_folder` into the encoder of a new run.

    Raises:
        ConfigError: the model has no such parameters.
    """
    chosen = config.model.encoder
    if not (isinstance(chosen, TransformersConfig) and chosen.name_or_folder):
        return
    if config.train.init or CheckpointFolder(RunFolder(config.folder).checkpoints).paths():
        return  # these have the parameters
    assert isinstance(encoder, TransformersEncoder)
    try:
        encoder.load_pretrained()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def pretrained_origins(config: ExperimentConfig) -> tuple[Origin, ...]:
    """The pretrained model, as a part of the chain; its licence is not known here."""
    encoder = config.model.encoder
    if not (isinstance(encoder, TransformersConfig) and encoder.name_or_folder):
        return ()
    return (Origin(kind="weights", name=Path(encoder.name_or_folder).name),)
