"""The configuration of a fine-tuning run: the source's settings, adapted to a short training.

defaults <- source <- the changes below <- YAML <- `section.key=value`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import (
    ConfigError,
    from_dict,
    given_values,
    load_config,
    to_dict,
    value_of,
)
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.finetune.source import Source, load_source
from pruned_rnnt.licences.chain import Origin, read_chain
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.experiment import ExperimentConfig, FinetuneConfig

# Fractions of the source's learning rate and of its steps.
_RATE = 0.2
_STEPS = 0.1
_FEWEST_STEPS = 200
# Steps of the fine-tuning run if those of the source are unknown.
_USUAL_STEPS = 2000
_WARM_UP = 0.05
_VALIDATIONS = 5
# Characters of a digest that errors show.
_DIGEST = 23
# Settings that depend on the steps.
_OF_THE_STEPS = (
    ("schedule", "warm_up_steps"),
    ("loss", "warm_up_steps"),
    ("train", "validate_every"),
)
# Not inherited, because they belong to a data folder or to one run.
_OWN_DATA_KEYS = ("path", "train", "valid", "old_path", "old_share", "lazy", "allow_commands")
_OWN_DECODE_KEYS = ("checkpoint", "split", "fusion", "num_best")
_INHERITED_TRAIN_KEYS = (
    "accumulate",
    "device",
    "precision",
    "fused_kernels",
    "cuda_graphs",
    "average_decay",
    "mean_every",
    "threads",
)


def continued_finetuning(
    yaml_path: Path | None, overrides: Sequence[str]
) -> tuple[ExperimentConfig, Source | None]:
    """The configuration of a run, and its source if it has no checkpoint yet.

    Raises:
        ConfigError: overrides name another source than the run was made from.
    """
    config = load_config(ExperimentConfig, yaml_path, overrides)
    is_begun = _has_checkpoints(config)
    if is_begun and value_of("train.init", None, overrides) is None:
        return config, None
    source = load_source(Path(config.train.init).expanduser(), config.finetune)
    if not is_begun:
        return config, source
    _check_is_its_source(config, source)
    return config, None


def load_finetuning(
    yaml_path: Path | None, overrides: Sequence[str]
) -> tuple[ExperimentConfig, Source | None]:
    """The configuration of a run that starts from train.init, and its source.

    If the run has checkpoints, it is continued, and the source is None.

    Raises:
        ConfigError: as for `load_config`, there is no source, or the run was made from another.
        ValueError: the source cannot be used.
    """
    given = given_values(yaml_path, overrides)
    init = str(given("train.init"))
    chosen = {
        key: value
        for key in ("checkpoint", "tokens", "trust")
        if (value := given(f"finetune.{key}")) is not None
    }
    source = load_source(Path(init).expanduser(), from_dict(FinetuneConfig, chosen))
    values = settings_from(source, given("train.steps"))
    for part in ("encoder", "predictor"):
        # Another kind has other settings, so it cannot be compared with the source's later.
        key, kind = f"model.{part}.kind", values["model"][part]["kind"]
        if (given(key) or kind) != kind:
            raise ConfigError(
                f"{key} is {given(key)}, and the model in train.init has a {kind}: leave {key} out"
            )
    data = Path(str(given("data.path") or DataConfig.path))
    values["train"]["folder"] = f"exp/{source.name}-{data.resolve().name}"
    base = (f"the settings of {init}", values)
    config = load_config(ExperimentConfig, yaml_path, overrides, base=base)
    # The default value in a file is no choice: the config.yaml of a run lists all settings.
    is_override = value_of("data.old_share", None, overrides) is not None
    is_chosen = is_override or config.data.old_share != DataConfig.old_share
    if is_chosen and config.data.old_share and not config.data.old_path:
        raise ConfigError(
            f"data.old_share is {config.data.old_share}, and data.old_path is empty: name the "
            "prepared folder of the old data in data.old_path, or leave data.old_share out"
        )
    if config.folder.resolve() == Path(init).expanduser().resolve():
        raise ConfigError(
            f"train.folder is the run in train.init, {init}: choose another folder for the new run"
        )
    if not _has_checkpoints(config):
        _check_rate(values["optimiser"], given)
        return config, source
    _check_is_its_source(config, source)
    # Its own, as earlier versions derived them from other steps, and as the steps may change.
    run = RunFolder(config.folder).config
    if run.is_file():
        for section, name in _OF_THE_STEPS:
            if (own := value_of(f"{section}.{name}", run)) is not None:
                values[section][name] = own
    return load_config(ExperimentConfig, yaml_path, overrides, base=base), None


def _has_checkpoints(config: ExperimentConfig) -> bool:
    return bool(CheckpointFolder(RunFolder(config.folder).checkpoints).paths())


def _check_is_its_source(config: ExperimentConfig, source: Source) -> None:
    """Raise ConfigError if the run that exists was made from other weights than the source's.

    The source may have moved, and runs of earlier versions do not say what they were made from.
    """
    run = RunFolder(config.folder)
    chain = read_chain(config.folder)
    before, own = _digest(chain.origins if chain else ()), _digest(source.origins)
    if before and before != own:
        init = value_of("train.init", run.config) if run.config.is_file() else None
        raise ConfigError(
            f"train.folder={config.train.folder} holds a run made from {init or 'another model'} "
            f"({before[:_DIGEST]}), and train.init={config.train.init} has other weights "
            f"({own[:_DIGEST]}): set train.folder=DIR for a new run; "
            f"`pruned-rnnt train {config.train.folder}` continues the one there"
        )


def _digest(origins: Sequence[Origin]) -> str:
    """That of the weights that training started from, which follow those that they were made from;
    empty if unknown."""
    return next((each.digest for each in reversed(origins) if each.kind == "weights"), "")


def _check_rate(inherited: dict[str, Any], given: Callable[[str], Any]) -> None:
    """Raise ConfigError for another optimiser with a learning rate for the inherited one."""
    name = given("optimiser.name") or inherited["name"]
    # Both kinds of adamw have the same rates.
    is_other = str(name).split("_")[0] != inherited["name"].split("_")[0]
    if is_other and given("optimiser.learning_rate") is None:
        raise ConfigError(
            f"optimiser.name is {name}, and the default learning rate here is one for "
            f"{inherited['name']}: set optimiser.learning_rate (about 1e-3 for adamw and 0.045 for "
            "scaled_adam when training from scratch, a fifth of that for fine-tuning)"
        )


def settings_from(source: Source, chosen_steps: object = None) -> dict[str, Any]:
    """The nested settings that a fine-tuning run has by default.

    chosen_steps: the value of train.steps, which may be wrong; None for the default.
    """
    values = to_dict(source.config)
    train, decode = values["train"], values["decode"]
    again = bool(train["init"])  # the source was fine-tuned, with a fraction of rate and steps
    trained_steps = train["steps"] if source.data_path else None
    if trained_steps is None:
        steps = _USUAL_STEPS
    else:
        steps = max(_FEWEST_STEPS, round(trained_steps * (1.0 if again else _STEPS)))
    if isinstance(chosen_steps, int) and chosen_steps > 0:
        steps = chosen_steps
    warm_up = max(1, round(_WARM_UP * steps))
    optimiser = values["optimiser"]
    optimiser["learning_rate"] *= 1.0 if again else _RATE
    return {
        "data": {k: v for k, v in values["data"].items() if k not in _OWN_DATA_KEYS},
        "model": values["model"],
        "loss": {**values["loss"], "warm_up_steps": warm_up},
        "optimiser": optimiser,
        "schedule": {"kind": "cosine", "warm_up_steps": warm_up},
        "train": {
            **{key: train[key] for key in _INHERITED_TRAIN_KEYS},
            "steps": steps,
            "validate_every": max(1, steps // _VALIDATIONS),
        },
        "decode": {k: v for k, v in decode.items() if k not in _OWN_DECODE_KEYS},
    }
