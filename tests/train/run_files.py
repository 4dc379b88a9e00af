"""What a run left on disk, in a form that two runs can be compared in; and its sudden end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.engine.step_report import StepReport
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
    """All of a checkpoint but the name of the run."""
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
    """Stands for the end of the process."""


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process 'dies' when it has made this step, before it can save or log anything."""
    account = Trainer._account

    def account_then_die(self: Trainer, report: StepReport, batches: list[Batch]) -> None:
        account(self, report, batches)
        if self.state.counters.step == step:
            raise Killed

    monkeypatch.setattr(Trainer, "_account", account_then_die)
