"""Help for every setting: `inspect --keys`, whose YAML loads again, and the page of settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.config.help import field_meanings, settings_as_yaml
from pruned_rnnt.config.load import load_config
from pruned_rnnt.model.encoder_kinds import ENCODER_CONFIGS
from pruned_rnnt.model.model_config import PREDICTOR_CONFIGS
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.lm_task import LanguageModelExperiment
from scripts import settings_page


def sections(config: Any) -> Iterator[Any]:
    yield config
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from sections(value)


def test_every_setting_has_a_meaning() -> None:
    configs = [ExperimentConfig(), LanguageModelExperiment()]
    kinds = [cls() for cls in (*ENCODER_CONFIGS.values(), *PREDICTOR_CONFIGS.values())]
    for section in (*sections(configs[0]), *sections(configs[1]), *kinds):
        settings = {
            field.name
            for field in dataclasses.fields(section)
            if not dataclasses.is_dataclass(getattr(section, field.name))
        }
        meanings = field_meanings(type(section))
        assert [name for name in settings if not meanings.get(name)] == [], type(section)


@pytest.mark.parametrize("cls", [ExperimentConfig, LanguageModelExperiment])
def test_settings_load_again(cls: type, tmp_path: Path) -> None:
    overrides = ["train.steps=7", "train.folder='a b: c'", "optimiser.eps=1e-9"]
    if cls is ExperimentConfig:
        overrides += ["model.encoder.kind=zipformer", "model.encoder.size=small"]
    config = load_config(cls, None, overrides)
    path = tmp_path / "all.yaml"
    path.write_text(settings_as_yaml(config))
    assert load_config(cls, path) == config


def test_keys_have_meaning_unit_default_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data:\n  max_duration: 300\n")
    assert main(["inspect", str(path), "--keys"]) == 0
    shown = capsys.readouterr().out
    assert (
        "  # seconds of speech in a training batch, without padding. (default: 60.0)\n"
        "  max_duration: 300.0\n"
    ) in shown
    assert "(default: adamw)\n  name: adamw\n" in shown
    assert "frames of 40 ms" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_page_of_settings_is_up_to_date() -> None:
    page = settings_page.PAGE.read_text(encoding="utf-8")
    assert settings_page.rendered() == page, "run python -m scripts.settings_page"


def test_page_has_every_section_and_kind() -> None:
    page = settings_page.rendered()
    for heading in ("model.encoder, kind conformer", "model.encoder, kind zipformer", "train"):
        assert f"\n### {heading}\n" in page
    assert "| `num_workers`, `prefetch_factor` | `1`, `4` | " in page
    assert "| `max_duration` | `60.0` | seconds of speech in a training batch" in page
    assert "`train` has the settings above, with `folder=exp/lm`." in page
