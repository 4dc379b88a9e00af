"""Writes docs/reference/what_works.md, the table of cells that tests/cells checks.

python -m scripts.what_works
"""

from __future__ import annotations

from tests.cells import page, runner, table
from tests.cells.cell import CRASH, WRONG


def main() -> None:
    reason = page.not_comparable()
    if reason is not None:
        raise SystemExit(f"The page cannot be written here: {reason}.")
    cells = list(table.cells())
    outcomes = runner.run(range(len(cells)))
    results = {cell: outcomes[number] for number, cell in enumerate(cells)}
    failed = [
        f"{cell.name}: {x.detail}" for cell, x in results.items() if x.status in (WRONG, CRASH)
    ]
    if failed:
        raise SystemExit("\n".join(["These cells are neither right nor refused:", *failed]))
    text = page.rendered(results)
    page.PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
