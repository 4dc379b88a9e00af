"""A table of audio paths and texts as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.splits import split_name
from pruned_rnnt.data.prepare.table_cells import (
    enclosed_cells,
    filled_width,
    is_enclosed,
    quoted_rows,
    split_cells,
)

# Names of each column in tables and JSON lines; if several occur, the first of this list is used.
COLUMNS = {
    "path": (
        *("path", "audio", "file", "filename", "file_name"),
        *("wav", "audio_path", "audio_filepath"),
    ),
    "text": ("text", "sentence", "transcript", "transcription", "wrd"),
    "speaker": ("speaker", "speaker_id", "client_id", "spk", "spk_id"),
    "split": ("split", "set", "subset"),
    "language": ("language", "locale", "lang"),
}
# Names of the begin and the end (or length) of a part of a file. All but the last of each are of
# other programs, and not read: where the audio of each row has been cut, they say from where.
_BEGINS = ("start", "start_time", "begin", "begin_time", "offset")
_ENDS = ("stop", "end", "end_time", "duration")
# The columns of a table without a header, in order.
_UNNAMED = ("path", "text", "speaker", "split")
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
# Only this many characters of the first row are searched for column names.
_MAX_HEADER_CHARACTERS = 10_000
_NO_PARTS = (
    "Tables do not support this; make a Kaldi directory with `segments`, or a NeMo manifest with "
    "`offset` and `duration`, instead"
)
_VARIABLE = re.compile(r"\$(\w+)/+")
# What may follow the name of a column; `set_id` may number anything.
_NAME_END = re.compile(r"(?<!set)_(code|ids?|name)$")


class _NoTableError(ValueError):
    """The first row is neither a header nor path and text."""


@dataclass(frozen=True)
class _Layout:
    """columns: index by name; `begin` is one that is not read.

    has_header: the first row names the columns.
    quoted: of a table with tabs: whether quotation marks enclose cells (see `TableSource`).
    id_column: index of the utterance ids, in SpeechBrain's tables.
    unread: the names of the columns that are not read.
    split_from_folder: the first folder of a path is its split, in Hugging Face's tables.
    """

    columns: dict[str, int]
    separator: str
    has_header: bool = True
    quoted: bool = False
    id_column: int | None = None
    unread: tuple[str, ...] = ()
    split_from_folder: bool = False


@dataclass(frozen=True)
class TableSource:
    """Rows of audio path and text, in columns separated by tabs or (in .csv) by commas.

    The first row may name the columns: path and text, and optionally speaker, split and language.
    Semicolons and bars are then accepted as separators too. Without a header the columns are path,
    text, speaker, split. Relative paths start at the table's folder. The column names of
    SpeechBrain (ID, wav, wrd, spk_id), of Hugging Face (file_name, transcription) and of Common
    Voice (sentence, client_id, locale) are accepted. If there is a file_name but no split column,
    the first folder of the path is the split if it has the name of one.

    With tabs, quotation marks enclose cells only if the whole table is written so: every cell that
    begins with a mark ends with one, marks inside it are doubled, and either some are, or every
    text is enclosed, or a text has a line break in it. Otherwise they are ordinary characters. With
    other separators a cell that begins with a quotation mark is enclosed in them.

    data_root: the folder that replaces `$data_root`, or another `$NAME`, at the start of a path.
    audio_folder: where relative paths start, if it is not the table's folder.

    A row with more cells than the first one is a problem, because its text may be cut at a
    separator, and so is one whose text is cut by a line break. Without a header, the first text of
    a table with commas may be the one that is cut: there, other numbers of cells are an error.

    Columns such as begin_time and end_time are not read; with them, memory holds all paths.

    Raises:
        ValueError: a first row with fewer than two columns, that neither names path and text nor
            begins with an audio file, with two columns of one name, or with SpeechBrain's start and
            stop, two parts of one file (by the columns above), rows with different numbers of cells
            in a .csv without a header, an unclosed quotation mark, in a table with tabs a line
            break in an enclosed text although other quotation marks do not match, an encoding other
            than UTF-8, or `$NAME` without data_root. The message names the line.
    """

    path: Path
    data_root: Path | None = None
    audio_folder: Path | None = None

    def __iter__(self) -> Iterator[CorpusEntry]:
        layout = self._with_quotes(self._layout())
        columns, most_cells, written_cells = layout.columns, 0, 0
        begins: dict[str, str] = {}
        rows = ((line, row) for line, row in self._rows(layout) if any(map(str.strip, row)))
        for (line, row), (_, following) in pairwise(chain(rows, [(0, [])])):
            if most_cells == 0:
                most_cells = filled_width(row) if layout.has_header else len(row)
                if layout.has_header:
                    written_cells = len(row)
                    continue
            problem, details = self._row_problem(row, layout, most_cells, line)
            if not problem and len(row) < most_cells:
                problem, details = self._cut(row, following, columns, written_cells)
            cells = {
                name: row[index].strip() if index < len(row) else ""
                for name, index in columns.items()
            }
            path, begin = cells["path"], cells.get("begin", "")
            if path and begin and begins.setdefault(path, begin) != begin:
                raise ValueError(
                    f"{self.path}:{line}: {path} is in an earlier row too, with another begin: the "
                    f"rows are parts of files. {_NO_PARTS}; or delete the columns of begin and end "
                    "if each row has the text of the whole file"
                )
            name = f"{line:08d}-{Path(path).stem}"
            if layout.id_column is not None and layout.id_column < len(row):
                name = row[layout.id_column].strip().replace("/", "-") or name
            split = cells.get("split", "")
            yield CorpusEntry(
                id=name,
                origin=f"{self.path}:{line}",
                audio=self._audio(path, line),
                text=cells["text"],
                speaker=cells.get("speaker", ""),
                language=cells.get("language", ""),
                split=split_of_path(path) if layout.split_from_folder else split,
                problem=problem,
                details=details,
            )

    def _row_problem(
        self, row: list[str], layout: _Layout, most_cells: int, line: int
    ) -> tuple[str, str]:
        """Why the row cannot be used, or "", with details; `most_cells` is of the first row."""
        path, text = layout.columns["path"], layout.columns["text"]
        if len(row) <= max(path, text):
            return "row has too few columns", ""
        width, is_tabs = filled_width(row), layout.separator == "\t"
        advice = f"put texts with {_SEPARATORS[layout.separator]} in quotation marks"
        if is_tabs:
            advice = "write a space for a tab in a text"
        if not (layout.has_header or is_tabs or width <= most_cells <= len(row)):
            raise ValueError(
                f"{self.path}:{line}: row has {len(row)} cells, the first row has {most_cells}: "
                f"{advice}, or name the columns in a first row"
            )
        if width > most_cells:
            first = "header" if layout.has_header else "first row"
            return (
                f"row has more cells than the {first}",
                f"{width} instead of {most_cells}: {advice}",
            )
        if "\ufffd" in row[text]:
            return "text is not UTF-8", ""
        return ("" if row[path].strip() else "row without a path"), ""

    def _cut(
        self,
        row: Sequence[str],
        following: Sequence[str],
        columns: Mapping[str, int],
        header_cells: int,
    ) -> tuple[str, str]:
        """The problem and details of a row that ends with its text, if the next row is the rest of
        this text and the cells after it. Other short rows may lack empty cells at the end."""
        path, text = columns["path"], columns["text"]
        if len(row) != text + 1 or len(following) != header_cells - text:
            return "", ""
        audio = following[path].strip() if path < len(following) else ""
        if self._is_audio(audio, 0):
            return "", ""
        return "text is cut by a line break", "write a space for a line break in a text"

    def has_header(self) -> bool:
        """Whether the first row names path and text.

        Raises ValueError for UTF-16, and for a header that cannot be used.
        """
        try:
            return self._layout().has_header
        except _NoTableError:
            return False

    def unread_columns(self) -> str:
        """Says which columns are not read and, of names that are almost those of a column that the
        table lacks, what was perhaps meant; "" if all are read.

        Raises ValueError as `has_header` does, and if the first row cannot be used.
        """
        layout = self._layout()
        if not layout.unread:
            return ""
        lacking = [n for column in COLUMNS if column not in layout.columns for n in COLUMNS[column]]
        named = []
        for name in layout.unread:
            spelled = re.sub(r"[\s-]+", "_", name.lower())
            guess = difflib.get_close_matches(spelled, lacking, n=1, cutoff=0.85)
            guess = guess or [n for n in lacking if n == _NAME_END.sub("", spelled)]
            named.append(f"{name} (did you mean `{guess[0]}`?)" if guess else name)
        return f"columns that are not read: {', '.join(named)}"

    def _audio(self, path: str, line: int) -> str:
        variable = _VARIABLE.match(path)
        if variable is None:
            return str((self.audio_folder or self.path.parent) / path)
        if self.data_root is None:
            raise ValueError(
                f"{self.path}:{line}: the path {path} begins with a variable; add --data-root DIR "
                f"with the folder that replaces ${variable[1]}"
            )
        return str(self.data_root / path[variable.end() :])

    def _is_audio(self, path: str, line: int) -> bool:
        """Whether the suffix is that of audio, or the file is there."""
        if Path(path).suffix.lower() in AUDIO_SUFFIXES:
            return True
        try:
            return Path(self._audio(path, line)).is_file()
        except OSError:  # a text that is too long for a name
            return False

    def _is_missing_audio(self, cells: Sequence[str], second: str, separator: str) -> bool:
        """Whether the first row begins with a file that is not there, and not with a text or the
        name of a column: it has a suffix, and the second row begins with audio."""
        following = split_cells(second, separator, quoted=True)
        suffix = Path(cells[0].strip()).suffix
        # A header may have such names too, as `audio.path`.
        names = {cell.strip().lower().rpartition(".")[2] for cell in cells}
        is_header = any(names.intersection(aliases) for aliases in COLUMNS.values())
        is_file = len(suffix) > 1 and " " not in suffix and not is_header
        return is_file and bool(following) and self._is_audio(following[0].strip(), 2)

    def _layout(self) -> _Layout:
        """The layout by the first row, without `quoted`."""
        with self.path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError(f"{self.path} is UTF-16: save it as UTF-8")
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            rows = filter(str.strip, lines)
            first, second = (next(rows, "")[:_MAX_HEADER_CHARACTERS] for _ in range(2))
        own = "," if self.path.suffix.lower() == ".csv" else "\t"
        for separator in (own, *_SEPARATORS):
            names = [cell.strip() for cell in split_cells(first, separator, quoted=True)]
            layout = self._header_layout(names, separator)
            if layout is not None:
                return layout
        cells = split_cells(first, own, quoted=own != "\t")
        got = repr(first[:200].rstrip()) if first else "an empty file"
        if len(cells) < 2:
            raise _NoTableError(
                f"{self.path}:1: needs path and text separated by {_SEPARATORS[own]}, or a header "
                f"with the columns `path` and `text`; got {got}"
            )
        # Whether quotation marks enclose cells of a table with tabs is not known yet.
        written = split_cells(first, own, quoted=True)
        path = written[0].strip()
        if path and not (self._is_audio(path, 1) or self._is_missing_audio(written, second, own)):
            accepted = " and ".join(
                f"`{name}` (or {', '.join(COLUMNS[name][1:])})" for name in ("path", "text")
            )
            raise _NoTableError(
                f"{self.path}:1: the first row needs to be a header with the columns {accepted}, "
                f"or to begin with an audio file that exists; got {got}"
            )
        columns = dict(zip(_UNNAMED, range(len(cells)), strict=False))
        return _Layout(columns, own, has_header=False)

    def _with_quotes(self, layout: _Layout) -> _Layout:
        """The layout with `quoted` set; reads the whole table if it has tabs."""
        if layout.separator != "\t":
            return replace(layout, quoted=True)
        some_doubled, all_enclosed, rows = False, True, 0
        # Lines: where a text with a line break begins, and where quotation marks do not match.
        broken = unmatched = 0
        column = layout.columns["text"]
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, written, cells in quoted_rows(lines):
                if not written.strip():
                    continue
                rows += 1
                raw = written.split("\t")
                enclosed = is_enclosed(raw[column]) if column < len(raw) else False
                all_enclosed &= enclosed or (layout.has_header and rows == 1)
                if cells is None:
                    unmatched = unmatched or number
                    continue
                if "\n" in written:
                    broken = broken or number
                some_doubled |= any('"' in cell for cell in enclosed_cells(raw, cells))
        if broken and unmatched:
            raise ValueError(
                f"{self.path}:{broken}: a text in quotation marks has a line break, but quotation "
                f"marks of line {unmatched} do not enclose a cell: write a space for each line "
                "break in a text, or enclose all cells that have quotation marks and double these"
            )
        is_written_so = broken > 0 or some_doubled or all_enclosed
        return replace(layout, quoted=is_written_so and not unmatched)

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
        for index in found.values():
            if (count := lowered.count(lowered[index])) > 1:
                raise ValueError(
                    f"{self.path}:1: {count} columns have the name `{lowered[index]}`: rename or "
                    "delete all but one"
                )
        is_speechbrain = {"ID", "wav"} <= set(names)
        read = {*found.values(), *([names.index("ID")] if is_speechbrain else [])}
        part = part_names(lowered)
        if part == ("start", "stop"):
            raise ValueError(
                f"{self.path}:1: the columns `start` and `stop` select parts of files. {_NO_PARTS}"
            )
        if part is not None:
            found["begin"] = lowered.index(part[0])
        return _Layout(
            found,
            separator,
            id_column=names.index("ID") if is_speechbrain else None,
            unread=tuple(name for i, name in enumerate(names) if name and i not in read),
            split_from_folder="split" not in found and lowered[found["path"]] == "file_name",
        )

    def _rows(self, layout: _Layout) -> Iterator[tuple[int, list[str]]]:
        """Each row with the number of its first line."""
        separator = layout.separator
        with self.path.open(encoding="utf-8-sig", newline="", errors="replace") as lines:
            if not layout.quoted:
                for number, text in enumerate(lines, 1):
                    yield number, split_cells(text, separator, quoted=False)
                return
            skip = separator != "\t"
            reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=skip)
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


def part_names(names: Collection[str]) -> tuple[str, str] | None:
    """Those of `names` that are the begin and the end of a part of a file; None without both."""
    begin, end = (next((name for name in both if name in names), "") for both in (_BEGINS, _ENDS))
    return (begin, end) if begin and end else None


def split_of_path(path: str) -> str:
    """The first folder of a relative path if it is the name of a split, else ""."""
    folder, slash, _ = path.partition("/")
    return folder if slash and folder and split_name(folder) is not None else ""
