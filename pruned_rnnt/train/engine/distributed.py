"""The processes of a training run: one, or those that torchrun sets in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and the number of processes; `local_rank` counts within the machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all processes, on the CPU, so that no process waits for its GPU."""
        return self.start_sum(values)()

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start `sum`; the returned function waits for the other processes and returns the sum."""
        total = torch.tensor(values, dtype=torch.float64)
        work = distributed.all_reduce(total, async_op=True) if self.world_size > 1 else None

        def finish() -> list[float]:
            if work is not None:
                work.wait()
            summed: list[float] = total.tolist()
            return summed

        return finish

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all processes in order of rank, on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the other processes of a torchrun launch; without torchrun there is one process."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    ranks = Ranks(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )
    # Gradients on GPUs go over NCCL; counts and flags, which are on the CPU, over gloo.
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(ranks.local_rank)
    store, _, _ = next(rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # torchrun on one machine keeps its store when it restarts processes: without a prefix they
        # would find the addresses of their predecessors.
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=world_size,
    )
    try:
        yield ranks
    finally:
        distributed.destroy_process_group()
