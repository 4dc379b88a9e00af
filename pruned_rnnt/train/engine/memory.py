"""Memory in bytes: out-of-memory errors, release of cached memory, peak usage, and the tensors that
a training process keeps from step to step.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.system.allocator import return_freed_memory
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.train.engine.average import ParameterMean, RunningAverage
from pruned_rnnt.train.engine.gradients import LocalGradients
from pruned_rnnt.train.optim.owners import bytes_of, owners_of

# Start of the message about a step or batch that did not fit into memory.
OUT_OF_MEMORY = "out of memory"


def out_of_memory_in(work: Callable[[], None], release: Callable[[], None] = lambda: None) -> str:
    """Run `work`; returns the allocator's message if memory ran out, else an empty string.

    The memory that the failed work held is released, after a call of `release`, which drops other
    tensors. Other errors are raised.
    """
    message = ""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # MemoryError has no text.
        message = (str(error) or type(error).__name__).splitlines()[0]
    # Outside the except block, since the exception's frames hold the tensors of the work.
    if message:
        release()
        release_memory()
    return message


def release_memory() -> None:
    """Release cached memory, and tensors that are held by the frames of a past exception.

    For use after a failure or between trials: it is slow, and so are the next allocations.
    """
    gc.collect()
    # Otherwise `peak` on a CPU would count memory that earlier work freed.
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> bool:
    """Reset `peak`; False if the system cannot (for a CPU, only Linux can)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if not (clear := Path("/proc/self/clear_refs")).exists():
        return False
    clear.write_text("5")
    return True


def peak(device: torch.device) -> int:
    """Peak memory since `reset_peak`: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """Bytes of one process; activations and what the allocator wastes come on top.

    parameters: of the model, with its buffers.
    gradients: that the update reads.
    optimiser: moments and what else the optimiser keeps for each parameter.
    averages: running average and mean of the parameters.
    """

    parameters: int
    gradients: int
    optimiser: int
    averages: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.averages

    def __str__(self) -> str:
        sizes = {name: size / 2**20 for name, size in dataclasses.asdict(self).items()}
        # Log lines have 80 columns.
        return ", ".join(f"{n} {s:.{0 if s >= 100 else 1}f}" for n, s in sizes.items()) + " MiB"


def state_memory(
    model: nn.Module,
    gradients: LocalGradients,
    optimiser: torch.optim.Optimizer,
    averages: Iterable[RunningAverage | ParameterMean | None],
) -> StateMemory:
    """The memory of this process."""
    return StateMemory(
        parameters=bytes_of([*model.parameters(), *model.buffers()]),
        gradients=gradients.kept_bytes(),
        optimiser=sum(_optimiser_bytes(each) for each in optimiser.state.values()),
        averages=sum(bytes_of(each.tensors()) for each in averages if each is not None),
    )


def divided_memory(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    averages: Iterable[RunningAverage | ParameterMean | None],
    processes: int,
) -> StateMemory:
    """The memory of that of several processes which has most, with train.shard=optimiser.

    Args:
        optimiser, averages: those of one process that has all.
    """
    trained = [p for group in optimiser.param_groups for p in group["params"]]
    owners = owners_of([p.numel() for p in trained], processes)
    gradients = _shares([bytes_of([p]) for p in trained], owners, processes)
    moments = _shares([_optimiser_bytes(optimiser.state[p]) for p in trained], owners, processes)
    kept = [0] * processes
    for average in averages:
        if average is not None:
            of_average = owners_of([each.numel() for each in average.tensors()], processes)
            sizes = [bytes_of([each]) for each in average.tensors()]
            shares = _shares(sizes, of_average, processes)
            kept = [one + other for one, other in zip(kept, shares, strict=True)]
    parameters = bytes_of([*model.parameters(), *model.buffers()])
    each_rank = [
        StateMemory(parameters=parameters, gradients=own, optimiser=of_own, averages=averaged)
        for own, of_own, averaged in zip(gradients, moments, kept, strict=True)
    ]
    return max(each_rank, key=lambda memory: memory.total)


def _shares(sizes: Sequence[int], owners: Sequence[int], processes: int) -> list[int]:
    """The sum of the sizes of each process."""
    sums = [0] * processes
    for size, owner in zip(sizes, owners, strict=True):
        sums[owner] += size
    return sums


def _optimiser_bytes(state: dict[str, Any]) -> int:
    return bytes_of(value for value in state.values() if isinstance(value, Tensor))
