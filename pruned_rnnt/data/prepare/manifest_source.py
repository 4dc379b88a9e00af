"""Lhotse manifests as streams of entries; see `own_sources.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lhotse.utils import fastcopy

from pruned_rnnt.data.input.manifest_items import manifest_items
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry


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
            for line, item in manifest_items(self.path, self.allow_commands):
                yield from _entries_of_cut(item, f"{self.path}:{line}", self.path.parent)
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
    """Yields an entry for each (origin, supervision) pair, with its part of the recording.

    folder: base of relative paths that do not exist in the working directory.
    """
    by_id = {recording.id: recording for recording in recordings}
    for origin, supervision in supervisions:
        recording = by_id.get(supervision.recording_id)
        if recording is None:
            yield CorpusEntry(id=supervision.id, origin=origin, problem="recording is not listed")
        else:
            cut = _cut_of_supervision(recording, supervision)
            yield entry_of_cut(with_absolute_paths(cut, folder), origin)


def _entries_of_cut(cut: Any, origin: str, folder: Path) -> Iterator[CorpusEntry]:
    if not hasattr(cut, "supervisions"):
        raise ValueError(
            f"{origin} is a {type(cut).__name__}: needs cuts, or recordings with --supervisions"
        )
    cut = with_absolute_paths(cut, folder)
    if len(cut.supervisions) < 2:
        yield entry_of_cut(cut, origin)
        return
    # In a cut with several supervisions each one is an utterance.
    for index, part in enumerate(cut.trim_to_supervisions(keep_overlapping=False)):
        yield entry_of_cut(fastcopy(part, id=f"{cut.id}-{index}"), origin)


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


def entry_of_cut(cut: Any, origin: str) -> CorpusEntry:
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


def _cut_of_supervision(recording: Any, supervision: Any) -> Any:
    inside = supervision.trim(recording.duration)
    cut = fastcopy(recording.to_cut(), id=supervision.id, supervisions=[inside])
    if inside.start > 0 or inside.duration < recording.duration - 0.01:
        cut = cut.truncate(offset=inside.start, duration=inside.duration, preserve_id=True)
    return cut
