"""Data of other toolkits as streams of entries: Kaldi's directories, NeMo's JSON lines, lhotse's
manifests; see `own_sources.py`.

The metadata.jsonl of Hugging Face's audio folders (file_name, transcription) has the format of
NeMo's manifests (audio_filepath, duration, text, optional offset).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lhotse import MonoCut, MultiCut
from lhotse.utils import fastcopy

from pruned_rnnt.data.input.manifest_items import MOST_OUTSIDE, manifest_items, text_lines
from pruned_rnnt.data.prepare.alignment_origin import CutEntry, trimmed, with_times_in_utterances
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.table_source import COLUMNS, part_names, split_of_path

_NEMO_PATH = "audio_filepath"
# A part of a cut that leaves out at most so many seconds is the whole cut.
_MOST_LEFT_OUT = 0.01


@dataclass(frozen=True)
class KaldiSource:
    """A Kaldi data directory: wav.scp and text, and optionally segments, utt2spk, utt2lang.

    wav.scp may contain shell commands that end in "|". All files but text are held in memory. A
    line of segments, or without segments of wav.scp, whose id is not in text is an entry with a
    problem.

    allow_commands: allow a shell to run the commands.
    audio_folder: base of relative paths in wav.scp that do not exist in the working directory; by
        default `folder`.

    Raises ValueError naming the first command if commands are not allowed, or the second line for
    a key of wav.scp, segments, utt2spk or utt2lang if the two differ.
    """

    folder: Path
    allow_commands: bool = False
    audio_folder: Path | None = None

    def __iter__(self) -> Iterator[CorpusEntry]:
        audio = self._audio()
        speakers = self._optional("utt2spk")
        languages = self._optional("utt2lang")
        segments = self._optional("segments")
        without_text = dict(segments or audio)
        for line, name, text in _kaldi_lines(self.folder / "text"):
            origin = f"{self.folder / 'text'}:{line}"
            without_text.pop(name, None)
            recording, start, end, problem, details = name, 0.0, None, "", ""
            if segments and name not in segments:
                problem = "not in segments"
            elif segments:
                number, value = segments[name]
                recording, start, end, problem = _segment(value)
                if problem:
                    origin, details = f"{self.folder / 'segments'}:{number}", f"{name} {value}"
            if not problem and recording not in audio:
                problem, details = "not in wav.scp", recording
            elif "\ufffd" in text:
                problem = problem or "text is not UTF-8"
            _, command = audio.get(recording, (0, ""))
            if command and not command.endswith("|"):
                command = str(_resolve_path(self.audio_folder or self.folder, command))
            yield CorpusEntry(
                id=name.replace("/", "-"),
                origin=origin,
                audio=command,
                is_command=command.endswith("|"),
                text=text,
                speaker=speakers.get(name, (0, ""))[1],
                language=languages.get(name, (0, ""))[1],
                start=start,
                duration=None if end is None else round(end - start, 8),
                problem=problem,
                details=details,
            )
        listed = self.folder / ("segments" if segments else "wav.scp")
        for name, (line, _) in without_text.items():
            yield CorpusEntry(
                id=name.replace("/", "-"),
                origin=f"{listed}:{line}",
                problem="not in text",
                details=name,
            )

    def _audio(self) -> dict[str, tuple[int, str]]:
        """The line and the file or command of each recording."""
        path = self.folder / "wav.scp"
        audio = _kaldi_table(path)
        commands = [(line, value) for line, value in audio.values() if value.endswith("|")]
        if commands and not self.allow_commands:
            line, first = commands[0]
            count = "1 command" if len(commands) == 1 else f"{len(commands):,} commands"
            raise ValueError(
                f"{path} has {count} that a shell would run, the first in line {line}: "
                f"{first[:100]!r}. If you trust all of them, pass --allow-commands"
            )
        return audio

    def _optional(self, name: str) -> dict[str, tuple[int, str]]:
        path = self.folder / name
        return _kaldi_table(path) if path.is_file() else {}


def _kaldi_table(path: Path) -> dict[str, tuple[int, str]]:
    """The line number and the value of each key; a line may occur twice, but not a key."""
    table: dict[str, tuple[int, str]] = {}
    for number, key, value in _kaldi_lines(path):
        first, known = table.setdefault(key, (number, value))
        if value != known:
            raise ValueError(
                f"{path}:{number}: second line for {key[:100]!r} (first in line {first}): "
                f"{value[:100]!r} instead of {known[:100]!r}. Remove one of the two lines"
            )
    return table


def _kaldi_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            key, *value = line.split(maxsplit=1) or [""]
            if key:
                yield number, key, value[0].strip() if value else ""


def _resolve_path(folder: Path, path: str) -> Path:
    """A path relative to the working directory if it exists there, else relative to `folder`."""
    return Path(path) if Path(path).exists() else folder / path


def _segment(value: str) -> tuple[str, float, float | None, str]:
    try:
        recording, begin, finish = value.split()[:3]
        start, end = float(begin), float(finish)
    except ValueError:
        return "", 0.0, None, "line of segments is not `utterance recording start end`"
    # In Kaldi -1 means the end of the recording.
    if end == -1 and 0 <= start < math.inf:
        return recording, start, None, ""
    if not 0 <= start < end < math.inf:
        return "", 0.0, None, "segment does not have 0 <= start < end"
    return recording, start, end, ""


@dataclass(frozen=True)
class JsonSource:
    """Lines of JSON objects with a path, a text, and perhaps speaker, split, language, offset.

    The keys have the names of a table's columns. offset and duration, in seconds, select a part of
    the file; duration is used only with offset or with `audio_filepath`, as in NeMo. Relative paths
    start at the file's folder; those of `audio_filepath` start at the working directory if they
    exist there, as in NeMo.

    Keys such as start and end are not read; with them, memory holds all paths.

    Raises ValueError naming a line that is not a JSON object, or the second one of two that select
    parts of one file by other keys.
    """

    path: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        begins: dict[str, str] = {}
        for number, line in text_lines(self.path):
            yield self._entry(f"{self.path}:{number}", number, line, begins)

    def _entry(self, origin: str, number: int, line: str, begins: dict[str, str]) -> CorpusEntry:
        """The entry of a line; begins: by path, of earlier lines, in keys that are not read."""
        item = json_object(line)
        if item is None:
            raise ValueError(f"{origin} is not a JSON object: {line.strip()[:100]!r}")
        cells = {column: _first(item, names) for column, names in COLUMNS.items()}
        path = cells["path"]
        named = {name for name, value in item.items() if value is not None}
        part = part_names(named)
        if part is not None and not {"offset", "duration"} <= named:
            begin = str(item[part[0]])
            if begins.setdefault(str(path), begin) != begin:
                raise ValueError(
                    f"{origin}: {path} is in an earlier line too, with another begin: the keys "
                    f"`{part[0]}` and `{part[1]}` select parts of files, which needs `offset` and "
                    "`duration`, in seconds; remove them if each line has the text of the whole "
                    "file"
                )
        start, duration, problem, details = _part(item)
        if not isinstance(path, str) or not path.strip():
            path, problem = "", f"line without a path ({_NEMO_PATH} or file_name)"
        elif not isinstance(cells["text"], str | None):
            problem, details = "text is not a string", repr(cells["text"])[:100]
        audio = Path(path).expanduser() if path.startswith("~/") else Path(path)
        folder = self.path.parent
        text = cells["text"] if isinstance(cells["text"], str) else ""
        split = str(cells["split"] or "")
        return CorpusEntry(
            id=f"{number:08d}-{audio.stem}",
            origin=origin,
            audio=str(_resolve_path(folder, str(audio)) if _NEMO_PATH in item else folder / audio),
            text=text,
            speaker=str(cells["speaker"] if cells["speaker"] is not None else ""),
            language=str(cells["language"] if cells["language"] is not None else ""),
            split=split or ("" if _NEMO_PATH in item else split_of_path(path)),
            start=start,
            duration=duration,
            problem=problem,
            details=details,
        )


def json_object(line: str) -> dict[str, Any] | None:
    """The JSON object in a line; None for anything else."""
    try:
        item = json.loads(line)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None


def has_audio_path(item: dict[str, Any] | None) -> bool:
    """True if a JSON object has an audio path under one of the names in `COLUMNS`."""
    return item is not None and any(name in item for name in COLUMNS["path"])


def _first(item: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _part(item: dict[str, Any]) -> tuple[float, float | None, str, str]:
    """Start and duration in seconds, a problem (or ""), and its details."""
    values = {"offset": item.get("offset")}
    if _NEMO_PATH in item or values["offset"] is not None:
        values["duration"] = item.get("duration")
    for name, value in values.items():
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value < math.inf):
            return 0.0, None, f"{name} is not a number of seconds >= 0", repr(value)[:100]
    return values["offset"] or 0.0, values.get("duration"), "", ""


@dataclass(frozen=True)
class ManifestSource:
    """A lhotse manifest of cuts, or of recordings with `supervisions`; one entry per supervision.

    A separate manifest of recordings is held in memory.

    allow_commands: as in `manifest_items`.
    """

    path: Path
    supervisions: Path | None = None
    allow_commands: bool = False

    def __iter__(self) -> Iterator[CorpusEntry]:
        if self.supervisions is None:
            yield from with_times_in_utterances(
                each
                for line, item in manifest_items(self.path, self.allow_commands)
                for each in _entries_of_cut(item, f"{self.path}:{line}", self.path.parent)
            )
            return
        listed = manifest_items(self.supervisions)
        yield from paired_entries(
            (recording for _, recording in manifest_items(self.path, self.allow_commands)),
            ((f"{self.supervisions}:{line}", supervision) for line, supervision in listed),
            self.path.parent,
        )


def paired_entries(
    recordings: Iterable[Any], supervisions: Iterable[tuple[str, Any]], folder: Path
) -> Iterator[CorpusEntry]:
    """An entry for each (origin, supervision) pair, with its part of the recording.

    folder: base of relative paths that do not exist in the working directory.
    """
    return with_times_in_utterances(_paired_entries(recordings, supervisions, folder))


def _paired_entries(
    recordings: Iterable[Any], supervisions: Iterable[tuple[str, Any]], folder: Path
) -> Iterator[CutEntry]:
    by_id = {recording.id: recording for recording in recordings}
    for origin, supervision in supervisions:
        recording = by_id.get(supervision.recording_id)
        if recording is None:
            problem = "recording is not listed"
            yield CutEntry(CorpusEntry(id=supervision.id, origin=origin, problem=problem))
        elif problem := _supervision_problem(supervision, recording, "recording"):
            details = _times(supervision, recording)
            yield CutEntry(
                CorpusEntry(id=supervision.id, origin=origin, problem=problem, details=details)
            )
        else:
            whole = fastcopy(recording.to_cut(), id=supervision.id)
            cut = _cut_of_supervision(whole, trimmed(supervision, recording.duration))
            yield CutEntry(_entry_of_cut(with_absolute_paths(cut, folder), origin))


def _entries_of_cut(cut: Any, origin: str, folder: Path) -> Iterator[CutEntry]:
    if not hasattr(cut, "supervisions"):
        raise ValueError(
            f"{origin} is a {type(cut).__name__}: needs cuts, or recordings with --supervisions"
        )
    cut = with_absolute_paths(cut, folder)
    if not isinstance(cut, MonoCut | MultiCut):
        problem = "cut is not a part of one recording"
        details = type(cut).__name__
        yield CutEntry(CorpusEntry(id=cut.id, origin=origin, problem=problem, details=details))
        return
    if not cut.supervisions or not cut.has_recording:
        yield CutEntry(_entry_of_cut(cut, origin), cut.start)
        return
    several = len(cut.supervisions) > 1
    for index, supervision in enumerate(cut.supervisions):
        name = f"{cut.id}-{index}" if several else cut.id
        if problem := _supervision_problem(supervision, cut, "cut"):
            details = _times(supervision, cut)
            yield CutEntry(CorpusEntry(id=name, origin=origin, problem=problem, details=details))
            continue
        # trim() rounds the duration.
        if supervision.start < 0 or supervision.end > cut.duration:
            supervision = trimmed(supervision, cut.duration)
        if several:
            # Each one is an utterance, in its own channel.
            alone = fastcopy(cut, supervisions=[supervision])
            (part,) = alone.trim_to_supervisions(keep_overlapping=False)
        else:
            part = _cut_of_supervision(cut, supervision)
        yield CutEntry(_entry_of_cut(fastcopy(part, id=name), origin), cut.start)


def with_absolute_paths(cut: Any, folder: Path) -> Any:
    """The cut with absolute paths; relative ones start at the working directory, or at `folder`."""
    if not getattr(cut, "has_recording", False):
        return cut
    sources = [s for track in getattr(cut, "tracks", [cut]) for s in _sources(track)]
    relative = [s.source for s in sources if s.type == "file" and not Path(s.source).is_absolute()]
    if relative:
        here = Path.cwd() if Path(relative[0]).exists() else folder.absolute()
        cut = cut.with_recording_path_prefix(str(here))
    return cut


def _sources(track: Any) -> list[Any]:
    recording = getattr(getattr(track, "cut", track), "recording", None)
    return recording.sources if recording is not None else []


def _entry_of_cut(cut: Any, origin: str) -> CorpusEntry:
    """The entry for a lhotse cut of one utterance."""
    supervision = cut.supervisions[0] if cut.supervisions else None
    return CorpusEntry(
        id=cut.id,
        origin=origin,
        text=(supervision.text or "") if supervision else "",
        speaker=(supervision.speaker or "") if supervision else "",
        language=(supervision.language or "") if supervision else "",
        cut=cut,
    )


def _supervision_problem(supervision: Any, whole: Any, kind: str) -> str:
    """Why the supervision does not select a part of `whole`, a cut or a recording; "" if it does.

    kind: the word for `whole`.
    """
    inside = trimmed(supervision, whole.duration)
    if inside.duration < supervision.duration - MOST_OUTSIDE:
        return f"supervision lies outside its {kind}"
    if inside.duration * whole.sampling_rate < 1:
        return f"supervision has no samples of its {kind}"
    return ""


def _times(supervision: Any, whole: Any) -> str:
    return f"{supervision.start} + {supervision.duration} s of {whole.duration} s"


def _cut_of_supervision(cut: Any, supervision: Any) -> Any:
    """The part of the cut that the supervision, which is inside, covers; with the cut's id."""
    part = fastcopy(cut, supervisions=[supervision])
    if supervision.duration < cut.duration - _MOST_LEFT_OUT:
        part = part.truncate(
            offset=supervision.start, duration=supervision.duration, preserve_id=True
        )
    return part
