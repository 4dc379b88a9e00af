"""The transcriptions of recordings, from the paths of their segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.decode.word_times import TimedWord, words_of_parts
from pruned_rnnt.transcribe.joined_path import JoinedPath, SegmentPlace
from pruned_rnnt.transcribe.lost_speech import Mark


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """The text of a recording.

    words: with times and confidences; empty if they were not asked for.
    score: natural log-probability of the path, or the sum of those of all segments.
    seconds: length of the audio.
    language: code of the first language tag that the model wrote; "" without one.
    marks: stretches of the audio in which there is speech but no text, or text but no speech.
    warning: how the file ends before its header says, so that text may be missing; else empty.
    """

    text: str
    words: tuple[TimedWord, ...]
    score: float
    seconds: float
    language: str = ""
    marks: tuple[Mark, ...] = ()
    warning: str = ""

    def __str__(self) -> str:
        return self.text


class DecodedSegment(NamedTuple):
    """The best path through a segment, that of the CTC head, if there is one, and its marks."""

    hypothesis: Hypothesis
    head: HeadPath | None
    place: SegmentPlace
    marks: Sequence[Mark] = ()


@dataclass
class RecordingPath:
    """What is known of one recording.

    error: why it could not be read or decoded.
    frames, warning: feature frames, and the warning of the transcription; known at the end.
    segments: how many were added; waiting: how many of them are not decoded yet.
    """

    path: JoinedPath
    error: Exception | None = None
    frames: int = 0
    warning: str = ""
    segments: int = 0
    waiting: int = 0
    _decoded: dict[int, DecodedSegment | None] = field(default_factory=dict)
    _joined: int = 0

    def add(self) -> int:
        """The number of the next segment, which waits to be decoded."""
        self.segments += 1
        self.waiting += 1
        return self.segments - 1

    def decoded(self, number: int, segment: DecodedSegment | None) -> None:
        """Segments may be decoded in any order; None: it has no path."""
        self.waiting -= 1
        self._decoded[number] = segment
        while self._joined in self._decoded:
            found = self._decoded.pop(self._joined)
            self._joined += 1
            if found is not None:
                self.path.append(*found)


def transcriptions(
    recordings: Sequence[RecordingPath], tokenizer: Tokenizer
) -> list[Transcription | Exception]:
    """The transcription of each recording whose segments are decoded, or its error."""
    parts = [recording.path.word_parts() for recording in recordings]
    symbols = [recording.path.symbols for recording in recordings]
    symbols_of_words = [part.symbols for own in parts for part in own]
    # One call for all takes the least time.
    decoded = iter(tokenizer.decode_all([*symbols, *symbols_of_words]))
    texts = list(islice(decoded, len(recordings)))
    words = [words_of_parts(own, list(islice(decoded, len(own)))) for own in parts]
    return [
        recording.error
        or Transcription(
            text=text,
            words=own,
            score=recording.path.score,
            seconds=round(recording.frames * FEATURE_SECONDS, 2),
            language=tokenizer.language_of(own_symbols),
            marks=tuple(recording.path.marks),
            warning=recording.warning,
        )
        for recording, text, own, own_symbols in zip(recordings, texts, words, symbols, strict=True)
    ]
