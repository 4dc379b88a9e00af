"""A table of audio paths and texts as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.data.entries import Entry

_COLUMNS = {
    "path": ("path", "audio", "file", "filename", "wav", "audio_path", "audio_filepath"),
    "text": ("text", "sentence", "transcript", "transcription"),
    "speaker": ("speaker", "speaker_id", "client_id", "spk"),
    "split": ("split", "set", "subset"),
}
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
# A first row of more characters names no columns.
_LONGEST_NAMES = 10_000


@dataclass(frozen=True)
class TableSource:
    """Rows of audio path and text, in columns that tabs or (in .csv) commas part.

    The first row may name the columns: path and text, and optionally speaker and split; it may
    then also part them by semicolons or bars. Without such a row they are path, text, speaker,
    split. Relative paths start at the table's folder.

    Raises:
        ValueError: a first row without two columns, a quotation mark that is never closed, or
            another encoding than UTF-8; with the line.
    """

    path: Path

    def __iter__(self) -> Iterator[Entry]:
        root = self.path.parent
        columns, separator, has_names = self._layout()
        for line, row in self._rows(separator):
            if not any(cell.strip() for cell in row):
                continue
            if has_names:
                has_names = False
                continue
            cells = {
                name: row[index].strip() if index < len(row) else ""
                for name, index in columns.items()
            }
            yield Entry(
                id=f"{line:08d}-{Path(cells['path']).stem}",
                origin=f"{self.path}:{line}",
                audio=str(root / cells["path"]),
                text=cells["text"],
                speaker=cells.get("speaker", ""),
                split=cells.get("split", ""),
                problem=_row_problem(row, columns, cells),
            )

    def _layout(self) -> tuple[dict[str, int], str, bool]:
        """Index of each column; what parts them; whether the first row names them."""
        with self.path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError(f"{self.path} is UTF-16: save it as UTF-8")
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = next((line for line in lines if line.strip()), "")[:_LONGEST_NAMES]
        own = "," if self.path.suffix.lower() == ".csv" else "\t"
        for separator in (own, *_SEPARATORS):
            names = [cell.strip().lower() for cell in _first_row(first, separator)]
            found = {
                column: names.index(alias)
                for column, aliases in _COLUMNS.items()
                for alias in reversed(aliases)
                if alias in names
            }
            if {"path", "text"} <= found.keys():
                return found, separator, True
        cells = len(_first_row(first, own))
        if cells == 1:
            raise ValueError(
                f"{self.path}:1: needs path and text parted by {_SEPARATORS[own]}, or a row that "
                f"names the columns `path` and `text`; got {first[:200].rstrip()!r}"
            )
        return dict(zip(_COLUMNS, range(min(cells, len(_COLUMNS))), strict=False)), own, False

    def _rows(self, separator: str) -> Iterator[tuple[int, list[str]]]:
        """Rows with the lines they begin at."""
        with self.path.open(encoding="utf-8-sig", newline="", errors="replace") as lines:
            if separator == "\t":
                # Quotation marks in a tab-separated file are just characters.
                for number, text in enumerate(lines, 1):
                    yield number, text.rstrip("\r\n").split("\t")
                return
            reader = csv.reader(lines, delimiter=separator, strict=True)
            line = 1
            try:
                for row in reader:
                    yield line, row
                    line = reader.line_num + 1
            except csv.Error as error:
                raise ValueError(
                    f"{self.path}:{line}: the row that begins here cannot be read ({error}): is a "
                    "quotation mark missing? Those inside a text are written twice"
                ) from error


def _first_row(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def _row_problem(row: list[str], columns: dict[str, int], cells: dict[str, str]) -> str:
    if len(row) <= max(columns["path"], columns["text"]):
        return "row has too few columns"
    if "\ufffd" in cells["text"]:
        return "text is not UTF-8"
    return "" if cells["path"] else "row without a path"
