"""The tasks by their names in configuration files (`task:`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.config.load import ConfigError, load_config, value_of
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.task import Task
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.lm_task import LanguageModelExperiment, LanguageModelTask
from pruned_rnnt.train.tasks.speech_task import SpeechTask

TaskMaker = Callable[[Any, Ranks, torch.device], Task]


def load_experiment(
    yaml_path: Path | None, overrides: Iterable[str], *, is_run: bool = False
) -> tuple[ExperimentConfig | LanguageModelExperiment, TaskMaker]:
    """The configuration of a file and overrides, and the constructor of its task.

    Without `task:` it configures a recogniser. is_run: see `load_config`.

    Raises:
        ConfigError: as for `load_config`, or an unknown task.
    """
    overrides = list(overrides)
    name = value_of("task", yaml_path, overrides)
    if name is None:
        return load_config(ExperimentConfig, yaml_path, overrides, is_run=is_run), SpeechTask
    if name != "lm":
        raise ConfigError(f"task is {name!r}; it must be 'lm', or absent for a recogniser")
    config = load_config(LanguageModelExperiment, yaml_path, overrides, is_run=is_run)
    return config, LanguageModelTask
