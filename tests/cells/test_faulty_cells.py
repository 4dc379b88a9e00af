"""The table notices each kind of wrong call, and a crash ends only its own cell."""

from __future__ import annotations

import pytest

from tests.cells import faulty_table, runner
from tests.cells.cell import CRASH, REFUSED, RIGHT, WRONG

EXPECTED = {
    "right": (RIGHT, ""),
    "crash": (CRASH, "the process ended with code -6"),
    "right after a crash": (RIGHT, ""),
    "inaccurate": (WRONG, "result is off by 1.0e-03 of its largest element"),
    "wrong gradient": (WRONG, "the gradient of x is off by"),
    "no gradient": (WRONG, "the gradient of x is missing"),
    "infinite": (WRONG, "result is off by inf"),
    "raw error": (WRONG, "RuntimeError: mat1 and mat2"),
    "vague error": (WRONG, "ValueError: the input is bad (names none of x)"),
    "refused": (REFUSED, "x is bad"),
    "accepted": (WRONG, "accepted"),
}


@pytest.mark.slow
def test_each_fault_is_noticed() -> None:
    names = [cell.row for cell in faulty_table.cells()]
    outcomes = runner.run(range(len(names)), table=faulty_table.__name__)
    assert set(names) == set(EXPECTED)
    for number, name in enumerate(names):
        status, detail = EXPECTED[name]
        assert outcomes[number].status == status, name
        assert outcomes[number].detail.startswith(detail), name
