"""An utterance as its corpus describes it, unchecked, and how it becomes a checked cut."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lhotse import MonoCut, SupervisionSegment
from lhotse.utils import fastcopy, to_list

from pruned_rnnt.data.audio.audio_file import HIGHEST_RATE
from pruned_rnnt.data.audio.recordings import UnusableUtterance, open_recording
from pruned_rnnt.data.input.filters import LONGEST_SECONDS, cut_language, cut_text
from pruned_rnnt.data.input.manifest_items import id_fault

# Lowest sampling rate of training data in Hz; transcription accepts lower rates.
LOWEST_RATE = 8000


@dataclass(frozen=True, kw_only=True)
class CorpusEntry:
    """One utterance as its source describes it.

    id: unique in the corpus; one that `id_fault` refuses is a problem.
    origin: "FILE:LINE", or the file that describes it. text: raw.
    language: code of the language, or "".
    audio: path of a file; "" with `cut`. is_command: `audio` is a shell command instead, which
        ends in "|" and writes audio (Kaldi's wav.scp).
    start, duration: the part of the audio, in seconds; duration None means all of it.
    problem: why the description cannot be used; such an entry is only reported. The same cause
        always has the same words; `details` holds the rest.
    cut: the lhotse cut, for sources that are manifests.
    note: what the utterance lost, worded to follow "12 utterances"; report.txt counts each note.
    """

    id: str
    origin: str
    text: str = ""
    audio: str = ""
    is_command: bool = False
    speaker: str = ""
    language: str = ""
    split: str = ""
    start: float = 0.0
    duration: float | None = None
    problem: str = ""
    details: str = ""
    cut: Any = None
    note: str = ""

    def __post_init__(self) -> None:
        if not self.problem and (fault := id_fault(self.id)):
            object.__setattr__(self, "problem", "id that cannot be used")
            object.__setattr__(self, "details", f"{ascii(self.id)[:100]} {fault}")

    @property
    def recording(self) -> str:
        """The file or command that the utterance is a part of, or the id of its recording; the
        utterance's id if it has none."""
        if self.cut is not None and self.cut.has_recording:
            # Ids of recordings need not be unique: lhotse takes the stem of the file.
            sources = [each.source for each in self.cut.recording.sources]
            paths = [source for source in sources if isinstance(source, str)]
            return "\n".join(paths) or str(self.cut.recording.id)
        audio = self.audio if self.is_command or not self.audio else os.path.normpath(self.audio)
        return audio or self.id


@dataclass(frozen=True, kw_only=True)
class UtteranceLimits:
    """Bounds on the duration in seconds, and the channel to use of several.

    A lhotse supervision in one channel is read from that channel.
    """

    min_duration: float = 0.1
    max_duration: float = LONGEST_SECONDS
    channel: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.min_duration < self.max_duration:
            raise ValueError(
                "min-duration must be above 0 and below max-duration, got "
                f"{self.min_duration} and {self.max_duration} s"
            )


def cut_of_entry(
    entry: CorpusEntry, text: str, limits: UtteranceLimits, language: str = ""
) -> MonoCut:
    """Makes the cut of an entry, with `text` and the language, and checks it.

    Raises UnusableUtterance.
    """
    if entry.problem:
        raise UnusableUtterance(entry.problem, entry.details)
    if entry.cut is not None:
        cut = _with_text(entry, text, limits, language)
    else:
        recording = open_recording(entry.audio, entry.is_command)
        duration = entry.duration
        if duration is None:
            duration = round(recording.duration - entry.start, 8)
        if entry.start < 0 or entry.start + duration > recording.duration + 0.05:
            raise UnusableUtterance(
                "segment ends after its recording",
                f"{entry.start} + {duration} s of {recording.duration} s",
            )
        if limits.channel not in recording.channel_ids:
            raise UnusableUtterance(
                f"no channel {limits.channel}", f"channels {recording.channel_ids}"
            )
        supervision = SupervisionSegment(
            id=entry.id,
            recording_id=recording.id,
            start=0.0,
            duration=duration,
            channel=limits.channel,
            text=text,
            speaker=entry.speaker or None,
            language=language or None,
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
        raise UnusableUtterance(f"shorter than {limits.min_duration} s", f"{cut.duration:.3f} s")
    if cut.duration > limits.max_duration:
        raise UnusableUtterance(f"longer than {limits.max_duration} s", f"{cut.duration:.1f} s")
    if cut.sampling_rate < LOWEST_RATE:
        raise UnusableUtterance(f"sampling rate below {LOWEST_RATE} Hz", f"{cut.sampling_rate} Hz")
    if cut.sampling_rate > HIGHEST_RATE:
        raise UnusableUtterance(
            f"sampling rate above {HIGHEST_RATE:,} Hz", f"{cut.sampling_rate:,} Hz"
        )
    return cut


def _with_text(entry: CorpusEntry, text: str, limits: UtteranceLimits, language: str) -> MonoCut:
    cut = entry.cut
    if not isinstance(cut, MonoCut):
        cut = cut.to_mono()[cut.channel.index(_channel(cut, limits.channel))]
    if not cut.has_recording:
        raise UnusableUtterance("cut without a recording")
    if text == cut_text(cut) and language == cut_language(cut):
        return cut
    first = min(cut.supervisions, key=lambda s: s.start)
    whole = fastcopy(first, text=text, start=0.0, duration=cut.duration, language=language or None)
    return fastcopy(cut, supervisions=[whole])


def _channel(cut: Any, wanted: int) -> int:
    """The channel to use of a cut with several: that of its supervision; of several, `wanted`.

    Raises UnusableUtterance if the cut does not have the channel of its supervision.
    """
    spoken = to_list(cut.supervisions[0].channel if cut.supervisions else cut.channel)
    channels = [channel for channel in spoken if channel in cut.channel]
    if not channels:
        raise UnusableUtterance(
            "cut without the channel of its supervision",
            f"channels {spoken} of {cut.channel}",
        )
    return wanted if wanted in channels else channels[0]
