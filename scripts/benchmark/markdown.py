"""The committed rows in results/*.jsonl, and Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"

Row = dict[str, Any]


def read_rows(table: str, folder: Path = FOLDER) -> list[Row]:
    lines = (folder / f"{table}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def provenance(rows: Iterable[Row]) -> str:
    """One sentence for each machine, version and commit with which the rows were measured."""
    found = dict.fromkeys(
        (row.get("machine") or row["device"], row["torch"], row["commit"], row["date"])
        for row in rows
    )
    return "".join(
        f"\nMeasured on {machine}, torch {torch}, commit {commit}, {date}."
        for machine, torch, commit, date in found
    ) + ("\n" if found else "")
