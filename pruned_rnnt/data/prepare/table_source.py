"""A table of audio paths and texts as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.data.prepare.entries import Entry
from pruned_rnnt.data.prepare.splits import split_name

# What tables and JSON lines call each column; of several names the first counts.
COLUMNS = {
    "path": (
        *("path", "audio", "file", "filename", "file_name"),
        *("wav", "audio_path", "audio_filepath"),
    ),
    "text": ("text", "sentence", "transcript", "transcription", "wrd"),
    "speaker": ("speaker", "speaker_id", "client_id", "spk", "spk_id"),
    "split": ("split", "set", "subset"),
}
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
# A first row of more characters names no columns.
_LONGEST_NAMES = 10_000
_VARIABLE = re.compile(r"\$(\w+)/+")


@dataclass(frozen=True)
class _Layout:
    """columns: index of each. has_names: the first row names them. id_column: of SpeechBrain's
    tables, which name their utterances. splits_by_folder: of Hugging Face's, without a column."""

    columns: dict[str, int]
    separator: str
    has_names: bool = True
    id_column: int | None = None
    splits_by_folder: bool = False


@dataclass(frozen=True)
class TableSource:
    """Rows of audio path and text, in columns that tabs or (in .csv) commas part.

    The first row may name the columns: path and text, and optionally speaker and split; it may
    then also part them by semicolons or bars. Without such a row they are path, text, speaker,
    split. Relative paths start at the table's folder. SpeechBrain's (ID, wav, wrd, spk_id) and
    Hugging Face's names (file_name, transcription) are known; the first folder of a file_name is
    its split if it is named like one and there is no such column.

    data_root: the folder that `$data_root`, or another `$NAME` that a path begins with, stands for.

    Raises:
        ValueError: a first row without two columns, a quotation mark that is never closed, another
            encoding than UTF-8, or `$NAME` without data_root; with the line.
    """

    path: Path
    data_root: Path | None = None

    def __iter__(self) -> Iterator[Entry]:
        layout = self._layout()
        columns, has_names = layout.columns, layout.has_names
        for line, row in self._rows(layout.separator):
            if not any(cell.strip() for cell in row):
                continue
            if has_names:
                has_names = False
                continue
            cells = {
                name: row[index].strip() if index < len(row) else ""
                for name, index in columns.items()
            }
            name = f"{line:08d}-{Path(cells['path']).stem}"
            if layout.id_column is not None and layout.id_column < len(row):
                name = row[layout.id_column].strip().replace("/", "-") or name
            split = cells.get("split", "")
            yield Entry(
                id=name,
                origin=f"{self.path}:{line}",
                audio=self._audio(cells["path"], line),
                text=cells["text"],
                speaker=cells.get("speaker", ""),
                split=split_of_path(cells["path"]) if layout.splits_by_folder else split,
                problem=_row_problem(row, columns, cells),
            )

    def names_columns(self) -> bool:
        """Whether the first row names path and text."""
        try:
            return self._layout().has_names
        except ValueError:
            return False

    def _audio(self, path: str, line: int) -> str:
        variable = _VARIABLE.match(path)
        if variable is None:
            return str(self.path.parent / path)
        if self.data_root is None:
            raise ValueError(
                f"{self.path}:{line}: the path {path} begins with a variable: add --data-root DIR "
                f"with the folder that ${variable[1]} stands for"
            )
        return str(self.data_root / path[variable.end() :])

    def _layout(self) -> _Layout:
        with self.path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError(f"{self.path} is UTF-16: save it as UTF-8")
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = next((line for line in lines if line.strip()), "")[:_LONGEST_NAMES]
        own = "," if self.path.suffix.lower() == ".csv" else "\t"
        for separator in (own, *_SEPARATORS):
            names = [cell.strip() for cell in _first_row(first, separator)]
            layout = self._named_layout(names, separator)
            if layout is not None:
                return layout
        cells = len(_first_row(first, own))
        if cells == 1:
            raise ValueError(
                f"{self.path}:1: needs path and text parted by {_SEPARATORS[own]}, or a row that "
                f"names the columns `path` and `text`; got {first[:200].rstrip()!r}"
            )
        columns = dict(zip(COLUMNS, range(min(cells, len(COLUMNS))), strict=False))
        return _Layout(columns, own, has_names=False)

    def _named_layout(self, names: list[str], separator: str) -> _Layout | None:
        """The columns that a first row of `names` has; None when it does not name path and text."""
        lowered = [name.lower() for name in names]
        found = {
            column: lowered.index(alias)
            for column, aliases in COLUMNS.items()
            for alias in reversed(aliases)
            if alias in lowered
        }
        if not {"path", "text"} <= found.keys():
            return None
        is_speechbrain = {"ID", "wav"} <= set(names)
        if is_speechbrain and {"start", "stop"} <= set(names):
            raise ValueError(
                f"{self.path}:1: the columns `start` and `stop` select parts of files, which is "
                "not supported in tables: make a Kaldi directory with `segments` instead"
            )
        return _Layout(
            found,
            separator,
            id_column=names.index("ID") if is_speechbrain else None,
            splits_by_folder="split" not in found and lowered[found["path"]] == "file_name",
        )

    def _rows(self, separator: str) -> Iterator[tuple[int, list[str]]]:
        """Rows with the lines they begin at."""
        with self.path.open(encoding="utf-8-sig", newline="", errors="replace") as lines:
            if separator == "\t":
                # Quotation marks in a tab-separated file are just characters.
                for number, text in enumerate(lines, 1):
                    yield number, text.rstrip("\r\n").split("\t")
                return
            reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True)
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
    return next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])


def _row_problem(row: list[str], columns: dict[str, int], cells: dict[str, str]) -> str:
    if len(row) <= max(columns["path"], columns["text"]):
        return "row has too few columns"
    if "\ufffd" in cells["text"]:
        return "text is not UTF-8"
    return "" if cells["path"] else "row without a path"


def split_of_path(path: str) -> str:
    """The first folder of a relative path if a split is called so, else ""."""
    folder, slash, _ = path.partition("/")
    return folder if slash and folder and split_name(folder) is not None else ""
