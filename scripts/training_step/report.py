"""Tables of the measured steps, their kernels and their losses, as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.training_step.kernels import Kernel, short_name

_HEADER = ("system", "commit", "step ms", "min to max", "against", "real time")
_GPU_HEADER = ("GPU busy ms", "share", "kernels", "GiB allocated", "GiB reserved")
_CHECKS = ("losses", "skipped")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each system; `against` is the time divided by that of the first system."""
    first = rows[0]
    lines = []
    for row in rows:
        low, high = row["step_ms_range"]
        lines.append(
            [
                row["system"],
                row["commit"],
                f"{row['step_ms']:.1f}",
                f"{low:.1f} to {high:.1f}",
                f"{row['step_ms'] / first['step_ms']:.2f}",
                f"{row['times_real_time']:,.0f}x",
                _number(row["gpu_busy_ms"], ".1f"),
                _number(row["gpu_busy_share"], ".1%"),
                _number(row["kernels"], ",.0f"),
                _number(row["peak_allocated_gib"], ".1f"),
                _number(row["peak_reserved_gib"], ".1f"),
                row["losses"],
                str(row["skipped_steps"]),
            ]
        )
    conditions = (
        f"{first['model']}{', causal' * first['causal']}{', CTC head' * first['ctc']}, "
        f"{first['parameters'] / 1e6:.1f} M parameters, {first['precision']}, "
        f"{first['batches']} batches of {first['audio_seconds']:.0f} s and "
        f"{first['utterances']:.0f} utterances, {first['device']}, torch {first['torch']}"
    )
    return f"{conditions}\n\n{aligned([(*_HEADER, *_GPU_HEADER, *_CHECKS), *lines])}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def kernel_table(system: str, kernels: Sequence[Kernel], count: int) -> str:
    """The kernels with the most time in a step, and the rest as one line."""
    shown, rest = kernels[:count], kernels[count:]
    lines = [
        (f"{1000 * kernel.seconds:.2f}", f"{kernel.calls:,.1f}", short_name(kernel.name))
        for kernel in shown
    ]
    if rest:
        seconds, calls = sum(k.seconds for k in rest), sum(k.calls for k in rest)
        lines.append((f"{1000 * seconds:.2f}", f"{calls:,.1f}", f"{len(rest)} other kernels"))
    return f"Kernels of {system}\n{aligned([('ms a step', 'calls', 'kernel'), *lines])}\n"


def losses_table(losses: Mapping[str, Sequence[float]]) -> str:
    """The losses per encoder frame of the steps of each system."""
    header = ["step", *losses]
    steps = zip(*losses.values(), strict=True)
    lines = [
        [str(step), *(f"{loss:.5f}" for loss in several)] for step, several in enumerate(steps, 1)
    ]
    return f"{aligned([header, *lines])}\n"


def aligned(lines: Iterable[Sequence[str]]) -> str:
    """Columns of equal width."""
    cells = list(lines)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
