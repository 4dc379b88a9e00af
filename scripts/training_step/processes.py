"""The efficiency of several torchrun processes compared with one process that trains alone.

Each process has the model twice. The kinds of runs, in turns:

- alone: the first process trains by itself, and the others wait;
- exchange: on GPUs, the same, but its gradients take the way to other processes (buckets and NCCL)
  in a group of one process: the cost of an exchange without the transfer;
- side_by_side: every process trains by itself at the same time, which shows the cost of shared
  power, memory and processors without communication;
- together: all processes train one model, each on batches of the same shapes.

The slowest process counts. The efficiency is the time alone divided by the time of the other kind,
within a turn; processes that share a GPU (PRUNED_RNNT_SHARE_GPUS=1) may take as many times longer
as there are processes on each GPU. Gradients of processes that share a GPU pass through the host,
which says nothing about several GPUs; the table then has a model of their efficiency.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from pruned_rnnt.train.engine.distributed import Ranks, process_group
from pruned_rnnt.train.engine.gradients import SummedGradients
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

        def session(name: str, who: Ranks) -> Session:
            return Session(overrides, batches, Path(folder) / name, at_step=at_step, ranks=who)

        by_itself = Ranks(local_rank=ranks.local_rank)
        own, common = session("alone", by_itself), session("together", ranks)
        kinds = {"alone": own, "side_by_side": own, "together": common}
        on_gpu = common.device.type == "cuda"
        if on_gpu:
            kinds["exchange"] = session("exchange", by_itself)
            _exchange_by_itself(kinds["exchange"], ranks)
        # On this machine; several machines have as many processes for each GPU.
        gpus = min(torch.cuda.device_count(), ranks.world_size) if on_gpu else ranks.world_size
        for _ in range(about["warm_up"]):
            for session_of_kind in {id(each): each for each in kinds.values()}.values():
                _seconds(ranks, session_of_kind, everyone=True)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(about["turns"]):
            for name in reversed(kinds) if turn % 2 else kinds:
                everyone = name in ("side_by_side", "together")
                seconds[name].append(_seconds(ranks, kinds[name], everyone=everyone))
        if not ranks.is_first:
            return []
        values = {
            f"{name}_step_ms": [1000 * s for s in several] for name, several in seconds.items()
        }
        for name in ("side_by_side", "together"):
            values[f"{name}_efficiency"] = [
                ranks.world_size / gpus * alone / other
                for alone, other in zip(seconds["alone"], seconds[name], strict=True)
            ]
        trained = [p for p in common.trainer.model.parameters() if p.requires_grad]
        row = {
            "system": "this",
            "commit": commit(),
            "world_size": ranks.world_size,
            "gpus": gpus if on_gpu else None,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
            **about,
            **common.about(),
            "device": machine(common.device.type),
            **{name: statistics.median(several) for name, several in values.items()},
            "range": {name: [min(several), max(several)] for name, several in values.items()},
        }
        print(json.dumps(row))
        return [row]


def _exchange_by_itself(session: Session, ranks: Ranks) -> None:
    """Let the gradients of `session` take the way to other processes in a group of one process."""
    groups = [distributed.new_group([rank], backend="nccl") for rank in range(ranks.world_size)]
    stepper = session.stepper.wrapped
    graphs = session.trainer.task.model.encoder_graphs
    stepper.gradients = SummedGradients(
        stepper.gradients.parameters,
        group=groups[ranks.rank],
        captured=None if graphs is None else graphs.gradients,
    )


def _seconds(ranks: Ranks, session: Session, *, everyone: bool) -> float:
    """Time of a step of a run by all processes, or by the first while the others wait."""
    # The processes that wait sleep in a socket.
    ranks.gather(0)
    seconds = session.run().seconds if everyone or ranks.is_first else 0.0
    slowest: float = max(ranks.gather(seconds))
    return slowest
