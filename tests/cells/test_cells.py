"""Every cell of the table is right or refused, and the page of docs says so."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter

import pytest

import pruned_rnnt
from pruned_rnnt import diagnostics
from pruned_rnnt.compat import k2
from tests.cells import page, runner, table
from tests.cells.cell import CRASH, WRONG, Cell, Outcome
from tests.loss.loss_cases import DEVICES

# Workers start once for a part.
PARTS = {
    "calls": [family for family in page.FAMILIES if family != "compilers"],
    "compilers": ["compilers"],
}
# They report on the installation, draw figures, or only choose a function with cells.
NO_CELLS = {"backend_report", "backend_summary", "load"}
NO_CELLS |= {
    f"diagnostics.{x}" for x in ("lattice_figure", "lattice_occupancy", "utterance_figure")
}
NO_CELLS |= {
    f"compat.k2.{x}"
    for x in (
        "get_hat_logprobs_pruned",
        "get_rnnt_prune_ranges_deprecated",
        "joint_mutual_information_recursion",
    )
}
_FEWEST = 12_000
_SHOWN = 100


@functools.cache
def all_cells() -> list[Cell]:
    return list(table.cells())


def test_the_table_is_whole() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= _FEWEST
    families = [family for part in PARTS.values() for family in part]
    assert {cell.family for cell in cells} == set(families) == set(page.FAMILIES)
    assert {cell.family for cell in cells if cell.slow} == {"compilers"}


def test_every_public_function_has_cells() -> None:
    public = {
        f"{prefix}{name}"
        for prefix, module in (("", pruned_rnnt), ("diagnostics.", diagnostics), ("compat.k2.", k2))
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    assert public - {cell.subject.function for cell in all_cells()} == NO_CELLS


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", PARTS)
def test_every_cell_is_right_or_refused(part: str, device: str) -> None:
    cells = all_cells()
    numbers = [n for n, cell in enumerate(cells) if cell.family in PARTS[part]]
    outcomes = runner.run(numbers, device)
    results = {cells[n]: outcomes[n] for n in numbers}
    failed = {cell: x for cell, x in results.items() if x.status in (WRONG, CRASH)}
    assert not failed, _failures(failed)
    print(Counter(found.status for found in results.values()))
    if device != "cpu" or page.not_comparable() is not None:
        return
    text = page.PAGE.read_text(encoding="utf-8")
    for family in PARTS[part]:
        found = page.section(family, results)
        assert page.committed(family, text) == found, "run python -m scripts.what_works"


@pytest.mark.slow
def test_every_cell_is_right_or_refused_without_kernels() -> None:
    cells = all_cells()
    numbers = [n for n, cell in enumerate(cells) if cell.family in PARTS["calls"]]
    outcomes = runner.run(numbers, backend="fallback")
    failed = {cells[n]: x for n, x in outcomes.items() if x.status in (WRONG, CRASH)}
    assert not failed, _failures(failed)


def _failures(failed: dict[Cell, Outcome]) -> str:
    """A line for each kind of failure."""
    alike: dict[str, list[str]] = {}
    for cell, found in failed.items():
        text = f"{cell.family} | {cell.column}: {found.status}, {found.detail}"
        alike.setdefault(re.sub(r"\d+", "#", text)[:300], []).append(cell.row)
    lines = [f"{text} -- {len(rows)}: {'; '.join(rows[:5])}" for text, rows in alike.items()]
    return "\n".join([f"{len(failed)} cells", *lines[:_SHOWN]])


def test_the_totals_of_the_page_are_sums_of_its_sections() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    counts = re.findall(r"([\d,]+) right, ([\d,]+) refused", text)
    totals, *parts = [[int(x.replace(",", "")) for x in pair] for pair in counts]
    assert len(parts) == len(page.FAMILIES)
    functions = re.findall(r"^\| `.*` \| ([\d,]+) \| ([\d,]+) \|$", text, flags=re.MULTILINE)
    by_function = [[int(x.replace(",", "")) for x in pair] for pair in functions]
    for rows in (parts, by_function):
        assert [sum(column) for column in zip(*rows, strict=True)] == totals
