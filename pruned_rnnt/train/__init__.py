"""Training. `pruned_rnnt.train.Trainer` trains a model of your own, from Python.

The names here need the extra `train`; they are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pruned_rnnt.train.engine.bad_steps import TrainingStopped
    from pruned_rnnt.train.engine.checkpoint import CheckpointError, load_checkpoint
    from pruned_rnnt.train.engine.report import BatchSize
    from pruned_rnnt.train.engine.train_config import TrainConfig
    from pruned_rnnt.train.optim.optimiser import OptimiserConfig
    from pruned_rnnt.train.optim.schedule import ScheduleConfig
    from pruned_rnnt.train.own_trainer import Trainer

__all__ = [
    "BatchSize",
    "CheckpointError",
    "OptimiserConfig",
    "ScheduleConfig",
    "TrainConfig",
    "Trainer",
    "TrainingStopped",
    "load_checkpoint",
]

_MODULES = {
    "BatchSize": "engine.report",
    "CheckpointError": "engine.checkpoint",
    "OptimiserConfig": "optim.optimiser",
    "ScheduleConfig": "optim.schedule",
    "TrainConfig": "engine.train_config",
    "Trainer": "own_trainer",
    "TrainingStopped": "engine.bad_steps",
    "load_checkpoint": "engine.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
