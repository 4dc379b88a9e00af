"""The model card of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import to_dict
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.licences.chain import Chain
from pruned_rnnt.model.parameter_values import fingerprint
from pruned_rnnt.model.speech_model import CtcModel
from pruned_rnnt.pretrained.model_card import ModelCard
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.measured import read_measurements
from pruned_rnnt.train.engine.run_files import versions
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import LoadedModel

# Settings that name files of one machine: the card has only the last part of the path.
_PATHS = {"data": ("path", "old_path"), "train": ("folder", "init"), "finetune": ("tokens",)}
# Sections that do not say how the model was trained.
_LEFT_OUT = ("card", "decode")


def card_of_run(config: ExperimentConfig, loaded: LoadedModel, chain: Chain) -> ModelCard:
    """The card of a run's model.

    Raises:
        ValueError: a stored measurement is damaged.
    """
    model = loaded.model
    is_ctc = isinstance(model, CtcModel)
    return ModelCard(
        config=config.card,
        chain=chain,
        name=config.card.name or config.folder.resolve().name,
        checkpoint=loaded.name,
        kind=f"{model.config.encoder.kind} {'ctc' if is_ctc else 'transducer'}",
        causal=model.encoder.config.causal,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        symbols=model.vocab_size,
        data=_data_sentences(config.data),
        results=tuple(read_measurements(RunFolder(config.folder).results, fingerprint(model))),
        settings=_settings(config),
        code=_training_code(config.folder),
    )


def _data_sentences(data: DataConfig) -> str:
    """About the training data, and old data that are mixed in; empty if nothing is known."""
    sentences = [_data_sentence(data.path, data.train)]
    if data.old_path and data.old_share > 0:
        old = _data_sentence(data.old_path, data.train)
        old = old or f"`{Path(data.old_path).resolve().name}`."
        sentences.append(f"A share of {data.old_share:.0%} of the utterances is old data: {old}")
    return " ".join(sentence for sentence in sentences if sentence)


def _data_sentence(path: str, train: str) -> str:
    """From prepare.json of a folder; empty if it is not there."""
    try:
        report = PreparedFolder(Path(path)).report()
        split = report["splits"][train]
        return (
            f"`{Path(path).resolve().name}`, prepared by the recipe `{report['recipe']}`: "
            f"{split['utterances']:,} utterances, {split['hours']:.2f} hours, "
            f"{len(split['speakers']):,} speakers (split {train})."
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError):
        return ""


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Settings that differ from the defaults, without the folders of this machine."""
    values = _changed(to_dict(ExperimentConfig()), to_dict(config))
    for section, names in _PATHS.items():
        for name in names:
            if path := values.get(section, {}).get(name):
                values[section][name] = Path(path).resolve().name
    return {section: value for section, value in values.items() if section not in _LEFT_OUT}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of `after` that `before` does not have."""
    changed: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping):
            value = _changed(old if isinstance(old, Mapping) else {}, value)
            if value:
                changed[key] = value
        elif key not in before or old != value:
            changed[key] = value
    return changed


def _training_code(folder: Path) -> str:
    lines = versions(folder)
    if not lines:
        return ""
    last = lines[-1]
    commit = f", commit {last['commit']}" if last.get("commit") else ""
    return f"pruned_rnnt {last.get('version')}{commit}, torch {last.get('torch')}"
