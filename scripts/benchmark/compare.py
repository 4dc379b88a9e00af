"""Compares rows of a new run with the committed ones.

A row is compared with the newest committed row of the same case, inputs, system and machine. Rows
of other packages are left out: their speed is not ours to guard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.benchmark.results import Row

# Losses are checks of equal inputs and equal results; bfloat16 rounds them in another order.
_LOSS_TOLERANCE = 1e-3
_OURS = "pruned_rnnt"
# The first fractions of a MiB are the allocator's.
_LEAST_MIB = 1.0


class Pair(NamedTuple):
    """A new row and the committed row that it is compared with."""

    new: Row
    old: Row

    def differences(self) -> str:
        """The versions that differ, in words."""
        changed = [
            f"{name} {getattr(self.old, name)} to {getattr(self.new, name)}"
            for name in ("torch", "version")
            if getattr(self.old, name) != getattr(self.new, name)
        ]
        return ", ".join([*changed, f"commit {self.old.commit} to {self.new.commit}"])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """worse, better: lines about rows beyond the tolerance. apart: about rows without a partner."""

    compared: int
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.compared > 0 and not self.worse

    def lines(self) -> list[str]:
        """The whole comparison as text."""
        lines = [f"WORSE {line}" for line in self.worse]
        lines += [f"better {line}" for line in self.better]
        lines += [f"not compared {line}" for line in self.apart]
        state = "passed" if self.passed else "FAILED"
        return [
            *lines,
            f"{state}: {self.compared} rows compared, {len(self.worse)} measures worse, "
            f"{len(self.better)} better, {len(self.apart)} rows not compared",
        ]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines.

    Raises:
        ValueError: a line is no row; the message names file and line.
        OSError: the file cannot be read.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(Row(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is no row of the benchmark: {error}") from error
    return rows


def compare(new: Sequence[Row], committed: Sequence[Row], tolerance: float) -> Comparison:
    """Compare rows.

    Args:
        committed: in the order of their measurement.
        tolerance: relative; 0.1 lets times, memory and launches grow by 10%.
    """
    worse: list[str] = []
    better: list[str] = []
    apart: list[str] = []
    latest = {(row.case, row.system): row for row in new if row.system.startswith(_OURS)}
    for row in latest.values():
        name = f"{row.case}, {row.system} on {row.machine}"
        same = [o for o in committed if (o.case, o.system) == (row.case, row.system)]
        partners = [o for o in same if (o.what, o.machine) == (row.what, row.machine)]
        if not partners:
            apart.append(f"{name}: {_reason(row, same)}")
            continue
        pair = Pair(row, partners[-1])
        worse += [f"{name}: {line} ({pair.differences()})" for line in _worse(pair, tolerance)]
        if row.median_ms < pair.old.median_ms / (1 + tolerance):
            line = _change("ms", pair.old.median_ms, row.median_ms)
            better.append(f"{name}: {line} ({pair.differences()})")
    return Comparison(
        compared=len(latest) - len(apart),
        worse=tuple(worse),
        better=tuple(better),
        apart=tuple(apart),
    )


def _reason(row: Row, same: Sequence[Row]) -> str:
    """Why no committed row fits."""
    if not same:
        return "there is no committed row"
    inputs = [old for old in same if old.what == row.what]
    if not inputs:
        return f"inputs are {row.what}, committed {same[-1].what}"
    return f"committed rows are of {', '.join(sorted({old.machine for old in inputs}))}"


def _worse(pair: Pair, tolerance: float) -> list[str]:
    new, old = pair
    lines = []
    if new.median_ms > old.median_ms * (1 + tolerance):
        lines.append(_change("ms", old.median_ms, new.median_ms))
    if new.peak_mib > max(old.peak_mib * (1 + tolerance), old.peak_mib + _LEAST_MIB):
        lines.append(_change("MiB", old.peak_mib, new.peak_mib))
    if None not in (old.launches, new.launches) and new.launches > old.launches * (1 + tolerance):
        lines.append(_change("launches", old.launches, new.launches))
    if None not in (old.waits, new.waits) and new.waits > old.waits:
        lines.append(f"{old.waits} to {new.waits} waits for the device")
    # Written so that a loss of NaN is worse.
    if not abs(new.loss - old.loss) <= _LOSS_TOLERANCE * abs(old.loss):
        lines.append(f"loss {old.loss} to {new.loss}")
    return lines


def _change(unit: str, old: float, new: float) -> str:
    share = f" ({new / old - 1:+.0%})" if old else ""
    return f"{old:g} to {new:g} {unit}{share}"
