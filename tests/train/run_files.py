"""Files of a run in a form for comparison, and the simulated death of a training process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.engine.trainer import Trainer


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one level, tensors as lists."""
    if isinstance(values, dict):
        items: Any = values.items()
    elif isinstance(values, list | tuple):
        items = enumerate(values)
    else:
        return {prefix: values.tolist() if isinstance(values, torch.Tensor) else values}
    result = {}
    for key, value in items:
        result.update(flat(value, f"{prefix}.{key}"))
    return result


def checkpoint_of(run: Path, step: int) -> dict[str, Any]:
    """All values of a checkpoint except for the name of the run."""
    values = load_checkpoint(run / f"checkpoints/step-{step:08d}.pt")
    values["config"]["train"].pop("folder")
    return flat(values)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """(step, training loss) of each line of metrics.jsonl."""
    return [
        (line["step"], line["total_per_frame"])
        for line in read_metrics(run)
        if line["group"] == "train"
    ]


class Killed(Exception):
    """Simulates the death of the process."""


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Training in this context dies after the step, before it saves or logs anything."""
    record = Trainer._record

    def record_then_die(self: Trainer) -> None:
        is_new = self._unrecorded is not None
        record(self)
        if is_new and self.state.counters.step == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_record", record_then_die)
        with pytest.raises(Killed):
            yield
