"""Errors of float32 losses and gradients on long lattices, for this package and fast_rnnt.

    python -m scripts.benchmark.precision [--device cuda] [--keep]
    python -m scripts.benchmark.precision --table

For every lattice this prints the relative error (L2) of the occupancies and of the simple loss's
gradients, the largest deviation of a frame's blank mass from 1, the loss, and the exact loss. The
exact values are those of this package in float64, which the tests compare with a sum over all
paths. --keep adds rows to results/precision.jsonl; --table only prints the kept rows as Markdown
(the file results/PRECISION.md).

Axes: T frames, U symbols, V vocabulary; one utterance.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import pruned_rnnt
from scripts.benchmark.results import FOLDER, commit, machine

VOCABULARY = 50


class Lattice(NamedTuple):
    """am (1,T,V), lm (1,U+1,V) of a trivial joiner, and targets (1,U)."""

    name: str
    am: Tensor
    lm: Tensor
    targets: Tensor


class LatticeResults(NamedTuple):
    """Results of a system on a lattice, as float64 tensors: the loss, occupancies (1,T,U+1) and the
    gradients of am and lm."""

    loss: Tensor
    emit: Tensor
    blank: Tensor
    am_grad: Tensor
    lm_grad: Tensor

    @property
    def occupancies(self) -> tuple[Tensor, ...]:
        return self.emit, self.blank

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        return self.am_grad, self.lm_grad


@dataclass(frozen=True, kw_only=True)
class Row:
    """Relative errors of one system on one lattice; mass_error and the losses are absolute."""

    case: str
    system: str
    version: str
    occupancy_error: float
    gradient_error: float
    mass_error: float
    loss: float
    exact_loss: float
    machine: str
    torch: str
    commit: str
    date: str


def lattices() -> Iterator[Lattice]:
    torch.manual_seed(0)
    for kind, frames, symbols in (
        ("flat", 500, 50),
        ("flat", 2000, 200),
        ("flat", 5000, 100),
        ("random", 5000, 100),
        ("flat", 30_000, 60),
        ("random", 30_000, 60),
        ("flat", 30_000, 400),
    ):
        scale = 1.5 if kind == "random" else 0.0
        yield Lattice(
            f"{kind} T {frames} U {symbols}",
            scale * torch.randn(1, frames, VOCABULARY),
            scale * torch.randn(1, symbols + 1, VOCABULARY),
            torch.randint(1, VOCABULARY, (1, symbols)),
        )


def our_results(lattice: Lattice, device: str, dtype: torch.dtype) -> LatticeResults:
    leaves = [x.to(device, dtype).requires_grad_() for x in (lattice.am, lattice.lm)]
    loss, occupancy = pruned_rnnt.rnnt_loss_simple(*leaves, lattice.targets.to(device))
    grads = torch.autograd.grad(loss, leaves)
    return LatticeResults(*(x.detach().cpu().double() for x in (loss, *occupancy, *grads)))


def fast_rnnt_results(lattice: Lattice, device: str) -> LatticeResults:
    fast_rnnt = importlib.import_module("fast_rnnt")
    am, lm = (x.clone().to(device).requires_grad_() for x in (lattice.am, lattice.lm))
    loss, (px_grad, py_grad) = fast_rnnt.rnnt_loss_simple(
        lm, am, lattice.targets.to(device), 0, reduction="sum", return_grad=True
    )
    grads = torch.autograd.grad(loss, (am, lm))
    # Gradients of the loss, (1,U,T+1) and (1,U+1,T), as occupancies (1,T,U+1).
    emit = -torch.nn.functional.pad(px_grad[:, :, :-1].transpose(1, 2), (0, 1))
    values = (loss, emit, -py_grad.transpose(1, 2), *grads)
    return LatticeResults(*(x.detach().cpu().double() for x in values))


def relative_error(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """L2 norm of the difference divided by that of the exact values, over all tensors."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(got, exact, strict=True))
    return (difference / sum(float(x.square().sum()) for x in exact)) ** 0.5


def systems(device: str) -> dict[str, tuple[str, Callable[[Lattice], LatticeResults]]]:
    """By name: the version, and a function that computes the results on a lattice."""
    found: dict[str, tuple[str, Callable[[Lattice], LatticeResults]]] = {
        "pruned_rnnt": (commit(), lambda lattice: our_results(lattice, device, torch.float32))
    }
    try:
        fast_rnnt = importlib.import_module("fast_rnnt")
    except ImportError:
        return found
    version = getattr(fast_rnnt, "__version__", "unknown")
    found["fast_rnnt"] = (version, lambda lattice: fast_rnnt_results(lattice, device))
    return found


def measured(device: str) -> Iterator[Row]:
    for lattice in lattices():
        exact = our_results(lattice, "cpu", torch.float64)
        for name, (version, compute) in systems(device).items():
            got = compute(lattice)
            yield Row(
                case=lattice.name,
                system=name,
                version=version,
                occupancy_error=relative_error(got.occupancies, exact.occupancies),
                gradient_error=relative_error(got.gradients, exact.gradients),
                mass_error=float((got.blank.sum(2) - 1).abs().max()),
                loss=float(got.loss),
                exact_loss=float(exact.loss),
                machine=machine(device),
                torch=torch.__version__,
                commit=commit(),
                date=datetime.date.today().isoformat(),
            )


def kept_table() -> str:
    """The kept rows as Markdown: grouped by lattice, in the order in which they were added."""
    rows = [Row(**json.loads(line)) for line in (FOLDER / "precision.jsonl").open()]
    lines = [
        "# Errors of float32 against float64",
        "",
        "Relative (L2) errors of the occupancies and of the simple loss's gradients, largest error",
        "of a frame's blank mass (exactly 1), and the loss. pruned_rnnt's version is a commit.",
        "`python -m scripts.benchmark.precision --table` prints this file from precision.jsonl.",
        "",
        "| lattice | system | machine | occupancies | gradients | mass | loss | float64 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    order = {case: i for i, case in enumerate(dict.fromkeys(row.case for row in rows))}
    for row in sorted(rows, key=lambda row: order[row.case]):
        errors = " | ".join(
            f"{x:.1e}" for x in (row.occupancy_error, row.gradient_error, row.mass_error)
        )
        lines.append(
            f"| {row.case} | {row.system} {row.version} | {row.machine} | {errors} "
            f"| {row.loss:.3f} | {row.exact_loss:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", default="cpu", help="device of the float32 computation (default cpu)"
    )
    parser.add_argument("--keep", action="store_true", help="add the rows to the results folder")
    parser.add_argument("--table", action="store_true", help="print the kept rows as Markdown")
    options = parser.parse_args()
    if options.table:
        print(kept_table())
        return
    print(f"{'lattice':22} {'system':12} {'version':10} occupancy gradient  mass     loss")
    for row in measured(options.device):
        print(
            f"{row.case:22} {row.system:12} {row.version:10} {row.occupancy_error:8.1e} "
            f"{row.gradient_error:8.1e} {row.mass_error:8.1e} {row.loss:.4f} "
            f"(exact {row.exact_loss:.4f})",
            flush=True,
        )
        if options.keep:
            with (FOLDER / "precision.jsonl").open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
