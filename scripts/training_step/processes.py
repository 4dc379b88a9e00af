"""The efficiency of several torchrun processes compared with one process that trains alone.

Each process has the model twice. The kinds of runs, in turns:

- alone: the first process trains by itself, and the others wait;
- side_by_side: every process trains by itself at the same time, which shows the cost of shared
  power, memory and processors without communication;
- together: all processes train one model, each on batches of the same shapes.

The slowest process counts. The efficiency is the time alone divided by the time of the other kind,
within a turn.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pruned_rnnt.train.engine.distributed import Ranks, process_group
from scripts.benchmark.results import commit, machine
from scripts.training_step.batches import BatchLengths
from scripts.training_step.session import Session


def measure_processes(
    overrides: Sequence[str],
    batches: Sequence[BatchLengths],
    about: dict[str, Any],
    at_step: int,
) -> list[dict[str, Any]]:
    """The row, in the first process, which prints it; no row in the others.

    Args:
        about: settings, for the row; `turns` and `warm_up` are the numbers of runs.
    """
    with tempfile.TemporaryDirectory() as folder, process_group() as ranks:
        own, common = (
            Session(overrides, batches, Path(folder) / name, at_step=at_step, ranks=who)
            for name, who in (("alone", Ranks(local_rank=ranks.local_rank)), ("together", ranks))
        )
        kinds = {"alone": own, "side_by_side": own, "together": common}
        for _ in range(about["warm_up"]):
            for name in ("side_by_side", "together"):
                _seconds(ranks, kinds[name], everyone=True)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(about["turns"]):
            for name in reversed(kinds) if turn % 2 else kinds:
                seconds[name].append(_seconds(ranks, kinds[name], everyone=name != "alone"))
        if not ranks.is_first:
            return []
        values = {
            f"{name}_step_ms": [1000 * s for s in several] for name, several in seconds.items()
        }
        for name in ("side_by_side", "together"):
            values[f"{name}_efficiency"] = [
                alone / other for alone, other in zip(seconds["alone"], seconds[name], strict=True)
            ]
        row = {
            "system": "this",
            "commit": commit(),
            "world_size": ranks.world_size,
            **about,
            **common.about(),
            "device": machine(common.device.type),
            **{name: statistics.median(several) for name, several in values.items()},
            "range": {name: [min(several), max(several)] for name, several in values.items()},
        }
        print(json.dumps(row))
        return [row]


def _seconds(ranks: Ranks, session: Session, *, everyone: bool) -> float:
    """Time of a step of a run by all processes, or by the first while the others wait."""
    # The processes that wait sleep in a socket.
    ranks.gather(0)
    seconds = session.run().seconds if everyone or ranks.is_first else 0.0
    slowest: float = max(ranks.gather(seconds))
    return slowest
