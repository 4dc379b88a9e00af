"""What a corpus says about an utterance before anything was checked, and the check itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lhotse import MonoCut, SupervisionSegment
from lhotse.utils import fastcopy

from pruned_rnnt.data.audio.audio_file import HIGHEST_RATE
from pruned_rnnt.data.audio.recordings import LeftOut, open_recording
from pruned_rnnt.data.input.filters import cut_text

# Of what a model learns from; recognition takes lower ones.
LOWEST_RATE = 8000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One utterance as its source names it.

    id: unique in the corpus. origin: "FILE:LINE" or the file which says so. text: raw.
    audio: a file; "" with `cut`. is_command: it is a command instead, which ends in "|" and writes
        audio (Kaldi's wav.scp); a shell runs it.
    start, duration: the part of the audio, in seconds; duration None is all of it.
    problem: why the source itself is wrong, if it is; such an entry is only reported. The words
        are the same for the same cause; `details` has what is particular about this one.
    cut: the lhotse cut, for sources which are manifests.
    """

    id: str
    origin: str
    text: str = ""
    audio: str = ""
    is_command: bool = False
    speaker: str = ""
    split: str = ""
    start: float = 0.0
    duration: float | None = None
    problem: str = ""
    details: str = ""
    cut: Any = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an utterance must satisfy, in seconds; and which channel of several is used."""

    min_duration: float = 0.1
    max_duration: float = 40.0
    channel: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.min_duration < self.max_duration:
            raise ValueError(
                "durations need 0 < min < max seconds, got "
                f"{self.min_duration} and {self.max_duration}"
            )


def entry_cut(entry: Entry, text: str, limits: Limits) -> MonoCut:
    """The cut of an entry, with `text`. Raises LeftOut."""
    if entry.problem:
        raise LeftOut(entry.problem, entry.details)
    if entry.cut is not None:
        cut = _with_text(entry, text, limits)
    else:
        recording = open_recording(entry.audio, entry.is_command)
        duration = entry.duration
        if duration is None:
            duration = round(recording.duration - entry.start, 8)
        if entry.start < 0 or entry.start + duration > recording.duration + 0.05:
            raise LeftOut(
                "segment ends after its recording",
                f"{entry.start} + {duration} s of {recording.duration} s",
            )
        if limits.channel not in recording.channel_ids:
            raise LeftOut(f"no channel {limits.channel}", f"channels {recording.channel_ids}")
        supervision = SupervisionSegment(
            id=entry.id,
            recording_id=recording.id,
            start=0.0,
            duration=duration,
            channel=limits.channel,
            text=text,
            speaker=entry.speaker or None,
        )
        cut = MonoCut(
            id=entry.id,
            start=entry.start,
            duration=min(duration, round(recording.duration - entry.start, 8)),
            channel=limits.channel,
            supervisions=[supervision],
            recording=recording,
        )
    if cut.duration < limits.min_duration:
        raise LeftOut(f"shorter than {limits.min_duration} s", f"{cut.duration:.3f} s")
    if cut.duration > limits.max_duration:
        raise LeftOut(f"longer than {limits.max_duration} s", f"{cut.duration:.1f} s")
    if cut.sampling_rate < LOWEST_RATE:
        raise LeftOut(f"sampling rate below {LOWEST_RATE} Hz", f"{cut.sampling_rate} Hz")
    if cut.sampling_rate > HIGHEST_RATE:
        raise LeftOut(f"sampling rate above {HIGHEST_RATE:,} Hz", f"{cut.sampling_rate:,} Hz")
    return cut


def _with_text(entry: Entry, text: str, limits: Limits) -> MonoCut:
    cut = entry.cut
    if not isinstance(cut, MonoCut):
        channel = limits.channel if limits.channel in cut.channel else cut.channel[0]
        cut = cut.to_mono()[cut.channel.index(channel)]
    if not cut.has_recording:
        raise LeftOut("cut without a recording")
    if text == cut_text(cut):
        return cut
    first = min(cut.supervisions, key=lambda s: s.start)
    whole = fastcopy(first, text=text, start=0.0, duration=cut.duration)
    return fastcopy(cut, supervisions=[whole])


def counted(counts: Mapping[str, int]) -> str:
    """ "3 A, 1 B", most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in ordered)
