"""Whether a run may continue a checkpoint: its task and its settings."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pruned_rnnt.config.load import ConfigError, differences, from_dict, to_dict
from pruned_rnnt.train.engine.task import RunConfig, Task
from pruned_rnnt.train.engine.train_config import TrainConfig, pick_device

logger = logging.getLogger(__name__)

# Keys that may change between a run and its continuation, as they do not affect training.
_FREE_KEYS = (
    "card.",
    "decode.",
    "data.num_workers",
    "data.prefetch_factor",
    "data.path",
    "data.old_path",
    "data.allow_commands",
    "data.valid",
    "finetune.checkpoint",
    "finetune.tokens",
    "finetune.trust",
    "train.folder",
    "train.init",
    "train.log_every",
    "train.mean_every",
    "train.loggers",
    "train.validate_every",
    "train.save_every",
    "train.picture_every",
    "train.keep_",
    "train.early_stopping_patience",
    "train.max_bad_steps",
    "train.shard",
)


class Changes(NamedTuple):
    """Lines about settings that have changed since a checkpoint.

    different: about all of them. changed: about those that affect training.
    """

    different: list[str]
    changed: list[str]


def check_settings(
    saved: dict[str, Any], config: RunConfig, *, allow_changes: bool, warns: bool
) -> Changes:
    """What has changed since a checkpoint.

    Args:
        saved: the configuration in the checkpoint.
        warns: log a warning for each change that affects training.

    Raises:
        ConfigError: changes that affect training are not allowed.
    """
    # A setting that is newer than the checkpoint had the value that is now its default.
    before = from_dict(type(config), saved, "the checkpoint")
    different = differences(to_dict(before), to_dict(config))
    same_device = _kind_of_device(before.train) == _kind_of_device(config.train)
    free = (*_FREE_KEYS, "train.device") if same_device else _FREE_KEYS
    changed = [line for line in different if not line.startswith(free)]
    if changed and not allow_changes:
        raise ConfigError(
            f"{config.train.folder} holds a run with another configuration "
            f"({'; '.join(changed)}): choose another train.folder, or pass --allow-changes "
            "(in Python: allow_changes=True) to continue with the new one"
        )
    for line in changed if warns else ():
        logger.warning("configuration changed: %s", line)
    return Changes(different, changed)


def check_task(
    saved: str, task: Task, config: RunConfig, *, allow_changes: bool, warns: bool
) -> None:
    """ConfigError if a checkpoint is that of another task, which minimises another loss.

    Args:
        saved: `task_name` of its task; empty if unknown.
        allow_changes: continue with another task.
        warns: log a warning about it.
    """
    own = task_name(task)
    # Only the names of classes: a program may be renamed, or be imported.
    if not saved or saved.rpartition(".")[2] == own.rpartition(".")[2]:
        return
    if not allow_changes:
        raise ConfigError(
            f"{config.train.folder} holds a run of the task {saved}, and this program "
            f"trains {own}, which may have other losses: continue it with the program that "
            "began it, choose another train.folder, or pass --allow-changes (in Python: "
            "allow_changes=True), for instance because the class has a new name"
        )
    if warns:
        logger.warning("task changed: %s -> %s", saved, own)


def task_name(task: Task) -> str:
    """The name of the task's class with its module, or with its file if that is the program."""
    module = type(task).__module__
    path = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and path is not None:
        module = Path(path).stem
    return f"{module}.{type(task).__qualname__}"


def _kind_of_device(config: TrainConfig) -> str:
    return pick_device(config).type if config.device == "auto" else config.device
