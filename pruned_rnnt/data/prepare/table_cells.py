"""The cells of a line or row of a table, and the quotation marks around them."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator, Sequence


def split_cells(line: str, separator: str, *, quoted: bool) -> list[str]:
    """The cells of a line; quoted: quotation marks may enclose them."""
    if not quoted:
        return line.rstrip("\r\n").split(separator)
    skip = separator != "\t"
    return next(csv.reader([line], delimiter=separator, skipinitialspace=skip), [])


def is_enclosed(cell: str) -> bool:
    """Whether a cell, as it is written, has a quotation mark at both ends."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def quoted_rows(lines: Iterable[str]) -> Iterator[tuple[int, str, list[str] | None]]:
    """The rows of a table with tabs if quotation marks enclose cells.

    Yields the number of the first line, the text until the last line end, and the cells. If the
    marks of a line do not match, the line is a row, with None instead of cells.
    """
    source, again = iter(lines), deque[str]()
    taken: list[str] = []

    def following() -> Iterator[str]:
        while line := again.popleft() if again else next(source, ""):
            taken.append(line)
            yield line

    number = 1
    while True:
        taken.clear()
        try:
            cells = next(csv.reader(following(), delimiter="\t", strict=True), None)
        except csv.Error:
            cells = None
        if not taken:
            return
        if cells is None or (len(taken) > 1 and not _has_line_break(cells)):
            cells = None
            again.extendleft(reversed(taken[1:]))
            del taken[1:]
        yield number, "".join(taken).rstrip("\n"), cells
        number += len(taken)


def _has_line_break(cells: Sequence[str]) -> bool:
    """Whether the lines of these cells are one row, with a line break in an enclosed cell.

    Otherwise they are several rows, one with a quotation mark at the beginning of a text and a
    later one with a mark at the end: what the marks enclose then has a tab.
    """
    return any("\n" in cell and "\t" not in cell for cell in cells)


def enclosed_cells(written: Sequence[str], cells: Sequence[str]) -> list[str]:
    """The contents of the enclosed cells of a row; `written`: its parts between tabs."""
    if len(cells) != len(written):  # a tab is enclosed
        return [cell for cell in cells if "\t" in cell or '"' in cell]
    return [cell for cell, raw in zip(cells, written, strict=True) if raw.startswith('"')]


def filled_width(row: list[str]) -> int:
    """The number of cells without empty ones at the end."""
    return max((index for index, cell in enumerate(row, 1) if cell.strip()), default=0)
