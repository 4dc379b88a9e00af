"""The length of training that prepare suggests."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from pruned_rnnt.config.load import load_config, value_of
from pruned_rnnt.data.prepare.prepare_report import PrepareReport, training_length
from pruned_rnnt.train.experiment import ExperimentConfig


@pytest.mark.parametrize(
    ("hours", "max_duration", "steps", "validate_every"),
    [
        (0.01, 60, 2000, 100),
        (2.0, 72, 5000, 250),
        (16.0, 580, 5000, 250),
        (100.0, 600, 30_000, 1500),
        (2900.0, 600, 870_000, 5000),
        (29_000.0, 600, 870_000, 5000),
    ],
)
def test_length_follows_the_hours(
    hours: float, max_duration: int, steps: int, validate_every: int
) -> None:
    length = training_length(hours)
    assert (length.max_duration, length.steps) == (max_duration, steps)
    assert length.validate_every == validate_every
    assert length.epochs == pytest.approx(steps * max_duration / (3600 * hours))
    assert length.warm_up_steps <= steps // 10
    assert length.loss_warm_up_steps <= steps // 5


def test_settings_can_be_given_to_train() -> None:
    config = load_config(ExperimentConfig, None, training_length(100.0).settings())
    assert config.train.steps == 30_000
    assert config.data.max_duration == 600
    assert config.schedule.warm_up_steps == 500
    assert config.loss.warm_up_steps == 2000


@pytest.mark.parametrize("name", ["data/d", "odd/z #b", "odd/a: b", "0x10", "it's", " x"])
@pytest.mark.parametrize("split", ["train", "noise", "test"])
def test_the_command_that_is_printed_names_the_folder(name: str, split: str) -> None:
    shown = io.StringIO()
    report = PrepareReport(recipe="own", options={})
    report.add_split(split, [])
    report.show(Path(name), Console(file=shown))
    (command,) = (line for line in shown.getvalue().splitlines() if ": pruned-rnnt" in line)
    (setting,) = (item for item in shlex.split(command) if item.startswith("data."))
    file = "/noise_cuts.jsonl.gz" if split == "noise" else ""
    assert value_of(setting.partition("=")[0], None, [setting]) == name + file


def test_librispeech_is_trained_as_long_as_suggested() -> None:
    config = load_config(ExperimentConfig, "librispeech")
    hours = 960.9 * (1 + 1 / 0.9 + 1 / 1.1)
    audio = 4 * config.data.max_duration * config.train.steps / 3600
    suggested = training_length(hours)
    assert suggested.steps * suggested.max_duration / 3600 == pytest.approx(audio, rel=0.02)


def test_nothing_is_suggested_for_no_speech() -> None:
    with pytest.raises(ValueError, match="hours is 0"):
        training_length(0.0)
