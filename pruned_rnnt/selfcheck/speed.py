"""The time of a few losses, beside the rows of the benchmark that were measured on the same device.

Axes: N batch, T frames, U symbols, S band, D joiner width, E encoder and predictor width,
V vocabulary.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.loss.logit_losses import rnnt_loss
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.system.switched_kernels import device_names

# In a checkout; an installed package has no rows.
ROWS = Path(__file__).parents[2] / "scripts" / "benchmark" / "results"
_REPEATS = 7
# Seconds after which no call is repeated.
_BUDGET = 2.0


class Case(NamedTuple):
    """The shape of a case of the benchmark, and its name there."""

    name: str
    kind: str
    N: int
    T: int
    U: int
    V: int
    D: int = 0
    autocast: bool = False


_CASES = {
    "cpu": (
        Case("cpu-full", "full", 8, 200, 50, 500),
        Case("cpu-step", "step", 8, 200, 50, 500, 256),
    ),
    "cuda": (
        Case("cuda-full-v28", "full", 128, 150, 40, 28),
        Case("cuda-full-v5000", "full", 32, 150, 20, 5000),
        Case("cuda-step-v5000-bf16", "step", 30, 400, 100, 5000, 512, autocast=True),
    ),
}


class Speed(NamedTuple):
    """Milliseconds of a loss with its gradients here, and in the newest row of the same device."""

    name: str
    what: str
    milliseconds: float
    committed: float | None = None

    def line(self) -> str:
        """For the terminal."""
        text = f"  {self.what}: {self.milliseconds:.2f} ms"
        return text if self.committed is None else f"{text}, benchmark {self.committed:.2f} ms"


def measure_speeds(device: torch.device, rows: Path = ROWS) -> Iterator[Speed]:
    """Median times; a busy machine makes them longer."""
    known = _committed(device, rows)
    for case in _CASES[device.type]:
        work = _full(case, device) if case.kind == "full" else _step(case, device)
        sizes = " ".join(f"{axis} {getattr(case, axis)}" for axis in "NTUV")
        what = f"{case.kind} forward and backward, {sizes}{' bfloat16' * case.autocast}"
        yield Speed(case.name, what, _median(work, device), known.get(case.name))


def _committed(device: torch.device, rows: Path) -> dict[str, float]:
    """Milliseconds by case, of this package on a device of this name."""
    path = rows / f"{device.type}.jsonl"
    if not path.is_file():
        return {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    found = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        row["case"]: row["median_ms"]
        for row in found
        if row["machine"] == name and row["system"] == "pruned_rnnt"
    }


def cpu_name() -> str:
    """As the committed rows of the benchmark name it."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    level, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    used = "" if threads == cores else f", {threads} threads used"
    return f"{cores}-core {device_names('cpu')[0]} ({level}){used}"


def _targets(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = torch.randint(1, case.V, (case.N, case.U), device=device, dtype=torch.int32)
    lengths = (torch.full((case.N,), size, dtype=torch.int32) for size in (case.T, case.U))
    return targets, *lengths  # type: ignore[return-value]


def _full(case: Case, device: torch.device) -> Callable[[], object]:
    shape = (case.N, case.T, case.U + 1, case.V)
    logits = torch.randn(shape, device=device, requires_grad=True)
    targets, *lengths = _targets(case, device)
    lengths = [x.to(device) for x in lengths]
    return lambda: torch.autograd.grad(rnnt_loss(logits, targets, *lengths), logits)


def _step(case: Case, device: torch.device) -> Callable[[], object]:
    width = case.D
    joiner = Joiner(width, width, width, case.V)
    module = PrunedTransducerLoss(joiner, width, width, case.V, warm_up_steps=0).to(device)
    encoder = torch.randn((case.N, case.T, width), device=device, requires_grad=True)
    predictor = torch.randn((case.N, case.U + 1, width), device=device, requires_grad=True)
    targets, *lengths = _targets(case, device)
    leaves = [encoder, predictor, *module.parameters()]

    def work() -> object:
        products = torch.autocast(device.type, torch.bfloat16) if case.autocast else nullcontext()
        with products:
            loss = module(encoder, predictor, targets, *lengths, 0).loss
        return torch.autograd.grad(loss, leaves)

    return work


def _median(work: Callable[[], object], device: torch.device) -> float:
    seconds: list[float] = []
    work()
    while len(seconds) < _REPEATS and sum(seconds) < _BUDGET:
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
