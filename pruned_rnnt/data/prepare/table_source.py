"""A table of audio paths and texts as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.splits import split_name

# Names of each column in tables and JSON lines; if several occur, the first of this list is used.
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
# Only this many characters of the first row are searched for column names.
_MAX_HEADER_CHARACTERS = 10_000
_VARIABLE = re.compile(r"\$(\w+)/+")


@dataclass(frozen=True)
class _Layout:
    """columns: index by name. has_header: the first row names the columns.

    id_column: index of the utterance ids, in SpeechBrain's tables.
    split_from_folder: the first folder of a path is its split, in Hugging Face's tables.
    """

    columns: dict[str, int]
    separator: str
    has_header: bool = True
    id_column: int | None = None
    split_from_folder: bool = False


@dataclass(frozen=True)
class TableSource:
    """Rows of audio path and text, in columns separated by tabs or (in .csv) by commas.

    The first row may name the columns: path and text, and optionally speaker and split. Semicolons
    and bars are then accepted as separators too. Without a header the columns are path, text,
    speaker, split. Relative paths start at the table's folder. The column names of SpeechBrain (ID,
    wav, wrd, spk_id) and of Hugging Face (file_name, transcription) are accepted. If there is a
    file_name but no split column, the first folder of the path is the split if it has the name of
    one.

    data_root: the folder that replaces `$data_root`, or another `$NAME`, at the start of a path.

    Raises:
        ValueError: a first row with fewer than two columns, an unclosed quotation mark, an encoding
            other than UTF-8, or `$NAME` without data_root. The message names the line.
    """

    path: Path
    data_root: Path | None = None

    def __iter__(self) -> Iterator[CorpusEntry]:
        layout = self._layout()
        columns, skip_header = layout.columns, layout.has_header
        for line, row in self._rows(layout.separator):
            if not any(cell.strip() for cell in row):
                continue
            if skip_header:
                skip_header = False
                continue
            cells = {
                name: row[index].strip() if index < len(row) else ""
                for name, index in columns.items()
            }
            name = f"{line:08d}-{Path(cells['path']).stem}"
            if layout.id_column is not None and layout.id_column < len(row):
                name = row[layout.id_column].strip().replace("/", "-") or name
            split = cells.get("split", "")
            yield CorpusEntry(
                id=name,
                origin=f"{self.path}:{line}",
                audio=self._audio(cells["path"], line),
                text=cells["text"],
                speaker=cells.get("speaker", ""),
                split=split_of_path(cells["path"]) if layout.split_from_folder else split,
                problem=_row_problem(row, columns, cells),
            )

    def has_header(self) -> bool:
        """Whether the first row names path and text."""
        try:
            return self._layout().has_header
        except ValueError:
            return False

    def _audio(self, path: str, line: int) -> str:
        variable = _VARIABLE.match(path)
        if variable is None:
            return str(self.path.parent / path)
        if self.data_root is None:
            raise ValueError(
                f"{self.path}:{line}: the path {path} begins with a variable; add --data-root DIR "
                f"with the folder that replaces ${variable[1]}"
            )
        return str(self.data_root / path[variable.end() :])

    def _layout(self) -> _Layout:
        with self.path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError(f"{self.path} is UTF-16: save it as UTF-8")
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = next((line for line in lines if line.strip()), "")[:_MAX_HEADER_CHARACTERS]
        own = "," if self.path.suffix.lower() == ".csv" else "\t"
        for separator in (own, *_SEPARATORS):
            names = [cell.strip() for cell in _first_row(first, separator)]
            layout = self._header_layout(names, separator)
            if layout is not None:
                return layout
        cells = len(_first_row(first, own))
        if cells == 1:
            raise ValueError(
                f"{self.path}:1: needs path and text separated by {_SEPARATORS[own]}, or a header "
                f"with the columns `path` and `text`; got {first[:200].rstrip()!r}"
            )
        columns = dict(zip(COLUMNS, range(min(cells, len(COLUMNS))), strict=False))
        return _Layout(columns, own, has_header=False)

    def _header_layout(self, names: list[str], separator: str) -> _Layout | None:
        """The layout if `names` is a header; None if it does not name path and text."""
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
                f"{self.path}:1: the columns `start` and `stop` select parts of files. Tables do "
                "not support this; make a Kaldi directory with `segments` instead"
            )
        return _Layout(
            found,
            separator,
            id_column=names.index("ID") if is_speechbrain else None,
            split_from_folder="split" not in found and lowered[found["path"]] == "file_name",
        )

    def _rows(self, separator: str) -> Iterator[tuple[int, list[str]]]:
        """Each row with the number of its first line."""
        with self.path.open(encoding="utf-8-sig", newline="", errors="replace") as lines:
            if separator == "\t":
                # Quotation marks have no meaning in a tab-separated file.
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
                    f"{self.path}:{line}: the row that begins here cannot be read ({error}). Is a "
                    "quotation mark missing? Quotation marks inside a text must be doubled"
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
    """The first folder of a relative path if it is the name of a split, else ""."""
    folder, slash, _ = path.partition("/")
    return folder if slash and folder and split_name(folder) is not None else ""
