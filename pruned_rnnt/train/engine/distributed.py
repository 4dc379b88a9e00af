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

# An environment variable: 1 lets processes of one machine share its GPUs, for tests.
SHARE_GPUS = "PRUNED_RNNT_SHARE_GPUS"


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


def launcher_number(name: str, unset: int) -> int:
    """A number that torchrun sets in the environment; `unset` if it is not set, or empty.

    Raises:
        ValueError: it is no number of 0 or more.
    """
    text = os.environ.get(name, "").strip() or str(unset)
    if not text.isdecimal():
        raise ValueError(
            f"{name} is {text!r} in the environment, needs a number of 0 or more: start with "
            "torchrun, which sets it, or unset it"
        )
    return int(text)


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the other processes of a torchrun launch; without torchrun there is one process.

    Raises:
        ValueError: there are more processes than GPUs on this machine, and PRUNED_RNNT_SHARE_GPUS
            is not 1; WORLD_SIZE is set without RANK; or one of these is not a number.
    """
    world_size = launcher_number("WORLD_SIZE", 1)
    if world_size == 1:
        yield Ranks()
        return
    if not os.environ.get("RANK"):
        raise ValueError(
            f"WORLD_SIZE is {world_size}, and RANK is not set: start with torchrun, or unset "
            "WORLD_SIZE to train in one process"
        )
    local_rank = launcher_number("LOCAL_RANK", 0)
    backend = "gloo"
    if torch.cuda.is_available():
        # Gradients on GPUs go over NCCL; counts and flags, which are on the CPU, over gloo.
        backend = "cpu:gloo,cuda:gloo" if _shares_gpus() else "cpu:gloo,cuda:nccl"
        local_rank %= torch.cuda.device_count()
        torch.cuda.set_device(local_rank)
    ranks = Ranks(rank=launcher_number("RANK", 0), world_size=world_size, local_rank=local_rank)
    store, _, _ = next(rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # torchrun on one machine keeps its store when it restarts processes: without a prefix they
        # would find the addresses of their predecessors.
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=world_size)
    try:
        yield ranks
    finally:
        distributed.destroy_process_group()


def _shares_gpus() -> bool:
    """True if this machine has more processes than GPUs, which NCCL does not support.

    Raises:
        ValueError: it has, and PRUNED_RNNT_SHARE_GPUS is not 1.
    """
    processes = launcher_number("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count()
    if processes <= gpus:
        return False
    if os.environ.get(SHARE_GPUS) != "1":
        raise ValueError(
            f"torchrun started {processes} processes on this machine, which has {gpus} CUDA "
            f"device(s); use --nproc-per-node {gpus}, or set {SHARE_GPUS}=1 to test several "
            "processes on one GPU, which is slow because their gradients pass through the host"
        )
    return True
