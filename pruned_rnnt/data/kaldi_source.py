"""A Kaldi data directory as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.data.entries import Entry


@dataclass(frozen=True)
class KaldiSource:
    """A Kaldi data directory: wav.scp, text, and where they exist segments and utt2spk.

    wav.scp may hold commands that end in "|". wav.scp, segments and utt2spk are held in memory.
    """

    folder: Path

    def __iter__(self) -> Iterator[Entry]:
        audio = {key: value for _, key, value in _kaldi_lines(self.folder / "wav.scp")}
        speakers = self._optional("utt2spk")
        segments = self._optional("segments")
        for line, name, text in _kaldi_lines(self.folder / "text"):
            recording, start, end, problem = name, 0.0, None, ""
            if segments:
                recording, start, end, problem = _segment(segments.get(name))
            if not problem and recording not in audio:
                problem = "not in wav.scp"
            command = audio.get(recording, "")
            if command and not command.endswith("|"):
                command = str(_from_here_or(self.folder, command))
            yield Entry(
                id=name.replace("/", "-"),
                origin=f"{self.folder / 'text'}:{line}",
                audio=command,
                text=text,
                speaker=speakers.get(name, ""),
                start=start,
                duration=None if end is None else round(end - start, 8),
                problem=problem,
            )

    def _optional(self, name: str) -> dict[str, str]:
        path = self.folder / name
        if not path.is_file():
            return {}
        return {key: value for _, key, value in _kaldi_lines(path)}


def _kaldi_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            key, _, value = line.strip().partition(" ")
            if "\t" in key:
                key, _, value = line.strip().partition("\t")
            if key:
                yield number, key, value.strip()


def _from_here_or(folder: Path, path: str) -> Path:
    """Relative paths of manifests start where the program runs, or else at the manifest."""
    return Path(path) if Path(path).exists() else folder / path


def _segment(value: str | None) -> tuple[str, float, float | None, str]:
    if value is None:
        return "", 0.0, None, "not in segments"
    try:
        recording, start, end = value.split()[:3]
        # Kaldi writes -1 for the end of the recording.
        return recording, float(start), float(end) if float(end) >= 0 else None, ""
    except ValueError:
        return "", 0.0, None, "line of segments is not `utterance recording start end`"
