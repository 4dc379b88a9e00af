"""A Kaldi data directory as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry


@dataclass(frozen=True)
class KaldiSource:
    """A Kaldi data directory: wav.scp and text, and optionally segments, utt2spk, utt2lang.

    wav.scp may contain shell commands that end in "|". All files but text are held in memory.

    allow_commands: allow a shell to run the commands.
    audio_folder: base of relative paths in wav.scp that do not exist in the working directory; by
        default `folder`.

    Raises ValueError naming the first command if commands are not allowed.
    """

    folder: Path
    allow_commands: bool = False
    audio_folder: Path | None = None

    def __iter__(self) -> Iterator[CorpusEntry]:
        audio = self._audio()
        speakers = {key: value for _, key, value in self._optional("utt2spk")}
        languages = {key: value for _, key, value in self._optional("utt2lang")}
        segments = {key: (line, value) for line, key, value in self._optional("segments")}
        for line, name, text in _kaldi_lines(self.folder / "text"):
            origin = f"{self.folder / 'text'}:{line}"
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
            command = audio.get(recording, "")
            if command and not command.endswith("|"):
                command = str(resolve_path(self.audio_folder or self.folder, command))
            yield CorpusEntry(
                id=name.replace("/", "-"),
                origin=origin,
                audio=command,
                is_command=command.endswith("|"),
                text=text,
                speaker=speakers.get(name, ""),
                language=languages.get(name, ""),
                start=start,
                duration=None if end is None else round(end - start, 8),
                problem=problem,
                details=details,
            )

    def _audio(self) -> dict[str, str]:
        """The file or command of each recording."""
        path = self.folder / "wav.scp"
        lines = list(_kaldi_lines(path))
        commands = [(line, value) for line, _, value in lines if value.endswith("|")]
        if commands and not self.allow_commands:
            line, first = commands[0]
            count = "1 command" if len(commands) == 1 else f"{len(commands):,} commands"
            raise ValueError(
                f"{path} has {count} that a shell would run, the first in line {line}: "
                f"{first[:100]!r}. If you trust all of them, pass --allow-commands"
            )
        return {key: value for _, key, value in lines}

    def _optional(self, name: str) -> Iterator[tuple[int, str, str]]:
        path = self.folder / name
        return _kaldi_lines(path) if path.is_file() else iter(())


def _kaldi_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            key, *value = line.split(maxsplit=1) or [""]
            if key:
                yield number, key, value[0].strip() if value else ""


def resolve_path(folder: Path, path: str) -> Path:
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
