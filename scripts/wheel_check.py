"""Checks an installed wheel, in an environment that has nothing but the wheel and torch.

    python wheel_check.py [--device cuda]

Needs no compiler and no file of the repository. The losses and gradients of a small lattice are
compared with those of a recursion in plain Python floats, which uses neither torch nor the wheel.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import pruned_rnnt

Lattice = list[list[list[float]]]
FRAMES, SYMBOLS, VOCABULARY = 5, 3, 6
TARGETS = (2, 4, 1)
TOLERANCE = 1e-4


def logits() -> Lattice:
    """(T, U+1, V) numbers without a pattern that a wrong index would hide."""
    return [
        [
            [math.sin(1.7 * t + 2.3 * u + 3.1 * v + t * u * v) for v in range(VOCABULARY)]
            for u in range(SYMBOLS + 1)
        ]
        for t in range(FRAMES)
    ]


def reference_loss(values: Lattice, targets: Sequence[int]) -> float:
    """Minus the log of the summed probabilities of all paths (Graves 2012), in float64."""
    frames, positions = len(values), len(targets) + 1
    total = [[-math.inf] * positions for _ in range(frames + 1)]
    total[0][0] = 0.0
    for t in range(frames):
        for u in range(positions):
            row = values[t][u]
            normaliser = math.log(sum(math.exp(value) for value in row))
            blank = total[t][u] + row[0] - normaliser
            total[t + 1][u] = _log_add(total[t + 1][u], blank)
            if u < len(targets):
                emit = total[t][u] + row[targets[u]] - normaliser
                total[t][u + 1] = _log_add(total[t][u + 1], emit)
    return -total[frames][len(targets)]


def reference_gradient(values: Lattice, targets: Sequence[int], step: float = 1e-5) -> Lattice:
    """Central differences of `reference_loss`."""
    gradient = [[[0.0] * VOCABULARY for _ in row] for row in values]
    for t, rows in enumerate(values):
        for u, row in enumerate(rows):
            for v, value in enumerate(list(row)):
                row[v] = value + step
                above = reference_loss(values, targets)
                row[v] = value - step
                below = reference_loss(values, targets)
                row[v] = value
                gradient[t][u][v] = (above - below) / (2 * step)
    return gradient


def _log_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def check_backend(device: str) -> list[str]:
    """An error message if the kernels are not those of the wheel."""
    print(pruned_rnnt.backend_report())
    summary = pruned_rnnt.backend_summary(device)
    library = Path(pruned_rnnt.__file__).parent / "lib"
    is_own = summary.startswith("native") and str(library) in summary
    return [] if is_own else [f"kernels on {device}: {summary}, needs those in {library}"]


def check_losses(device: str) -> list[str]:
    """Error messages if the full loss, the pruned loss in a full band or a gradient is wrong.

    A band of all positions prunes nothing, so both losses are the same number.
    """
    values = logits()
    loss, gradient = reference_loss(values, TARGETS), reference_gradient(values, TARGETS)
    targets = torch.tensor([TARGETS], dtype=torch.int32, device=device)
    complaints = []
    for name in ("full", "pruned"):
        logits_NTUV = torch.tensor([values], device=device, requires_grad=True)
        if name == "full":
            found = pruned_rnnt.rnnt_loss(logits_NTUV, targets)
        else:
            start_NT = torch.zeros(1, FRAMES, dtype=torch.int32, device=device)
            bounds = pruned_rnnt.Bounds(start_NT, SYMBOLS + 1)
            found = pruned_rnnt.rnnt_loss_pruned(logits_NTUV, targets, bounds)
        found.backward()
        assert logits_NTUV.grad is not None
        wrong = (logits_NTUV.grad[0].cpu() - torch.tensor(gradient)).abs().max()
        value = float(found.detach())
        print(f"{name}: loss {value:.6f}, reference {loss:.6f}, gradients off by {wrong:.1e}")
        if not (abs(value - loss) < TOLERANCE and float(wrong) < TOLERANCE):
            complaints.append(f"the {name} loss or its gradient is not that of the reference")
    return complaints


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    print(f"pruned_rnnt {pruned_rnnt.__version__}: {pruned_rnnt.__file__}")
    print(f"torch {torch.__version__}")
    complaints = [*check_backend(device), *check_losses(device)]
    for complaint in complaints:
        print(f"WRONG: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
