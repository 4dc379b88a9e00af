"""The transcription of a recording, and its formats: text, JSON lines, subtitles and CTM."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pruned_rnnt.data.tokens.text_normalisation import (
    joins_the_character_before,
    written_without_spaces,
)
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.word_times import (
    FEATURE_SECONDS,
    WORD_START,
    TimedWord,
    ctm_name,
    ctm_text,
    words_of_parts,
)
from pruned_rnnt.transcribe.joined_path import RecordingPath
from pruned_rnnt.transcribe.lost_speech import Mark

# A subtitle ends at a pause, or before it becomes too long to read.
_PAUSE_SECONDS = 0.8
_MOST_SECONDS = 6.0
_MOST_CHARACTERS = 80
# Surrogates stand for bytes of a file name that are not UTF-8; they cannot be written.
_SURROGATES = re.compile(r"[\ud800-\udfff]")
# Line breaks, other control characters and surrogates.
_LINE_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# At the end of a segment, what belongs to the word that follows: opening brackets and quotation
# marks, hyphens, and apostrophes; and the symbols among which its last letter is looked for.
_BEFORE_A_WORD = ("Ps", "Pi", "Pd")
_APOSTROPHES = "'\u2019"
_LOOK_BACK = 8
# Characters to read of a line; the path of an audio file is shorter.
_MOST_LINE = 10_000


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


class NumberedResult(NamedTuple):
    """The transcription of a recording, or why it has none; number: of those before it."""

    number: int
    result: Transcription | Exception


def transcriptions(
    recordings: Sequence[RecordingPath], tokenizer: Tokenizer
) -> list[Transcription | Exception]:
    """The transcription of each recording whose segments are decoded, or its error."""
    parts = [recording.path.word_parts() for recording in recordings]
    apart = [_spaced_apart(recording.path.stretches, tokenizer) for recording in recordings]
    symbols_of_texts = [part for own in apart for part in own]
    symbols_of_words = [part.symbols for own in parts for part in own]
    # One call for all takes the least time.
    decoded = iter(tokenizer.decode_all([*symbols_of_texts, *symbols_of_words]))
    texts = [" ".join(filter(None, islice(decoded, len(own)))) for own in apart]
    words = [words_of_parts(own, list(islice(decoded, len(own)))) for own in parts]
    return [
        recording.error
        or Transcription(
            text=text,
            words=own,
            score=recording.path.score,
            seconds=round(recording.frames * FEATURE_SECONDS, 2),
            language=tokenizer.language_of(recording.path.symbols),
            marks=tuple(recording.path.marks),
            warning=recording.warning,
        )
        for recording, text, own in zip(recordings, texts, words, strict=True)
    ]


def _spaced_apart(stretches: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[list[int]]:
    """The symbols of the text, divided where a pause needs a space that no symbol stands for. A
    pause ends a word, as in the words with times, even if the next symbol does not begin one.

    There is no space after what belongs to the next word (an opening bracket, a hyphen, an
    apostrophe), in scripts without spaces, and of models whose symbols begin no words.
    """
    names, tags = tokenizer.symbols, set(tokenizer.languages.values())
    has_words = any(name.startswith(WORD_START) for name in names)
    parts: list[list[int]] = [[]]
    for stretch in stretches:
        first = next((names[symbol] for symbol in stretch if symbol not in tags), "")[:1]
        before = "".join(names[symbol] for symbol in parts[-1][-_LOOK_BACK:])
        letter = next(filter(str.isalnum, reversed(before)), "")
        if (
            has_words
            and before
            and unicodedata.category(before[-1]) not in _BEFORE_A_WORD
            and before[-1] not in _APOSTROPHES
            and first.isalnum()
            and not joins_the_character_before(first)
            and not any(map(written_without_spaces, (letter, first)))
        ):
            parts.append([])
        parts[-1] += stretch
    return parts


def transcript(result: Transcription, name: str, kind: str, times: bool) -> str:
    """The transcript of one file in the format `kind`; every line ends with a line break.

    text: `name<tab>text`, then with `times` a line `start end word` for each word. It is no table
        for spreadsheets, which may run a text that begins with = + - or @ as a formula.
    jsonl: one object with file, seconds, text, score (log-probability of the path), warning (empty
        if there is none), words, each with start, end and confidence, and marks, each with kind,
        start and end; of models with language tags also the language.
    srt: numbered subtitles; a mark is one in brackets.
    ctm: `name 1 start duration word confidence` for each word; a mark is a comment.
    """
    # A line break in a file's name would begin another line, but JSON has its own escapes.
    name = _SURROGATES.sub(_escaped, name) if kind == "jsonl" else on_one_line(name)
    if kind == "srt":
        return _srt(result)
    if kind == "ctm":
        words = [(w.word, w.start, w.end, w.confidence) for w in result.words]
        notes = "".join(f";; {ctm_name(name)} 1 {mark_text(mark)}\n" for mark in result.marks)
        return ctm_text(name, words) + notes
    if kind == "jsonl":
        words_of_file = [
            {"word": w.word, "start": w.start, "end": w.end, "confidence": w.confidence}
            for w in result.words
        ]
        values = {
            "file": name,
            "seconds": result.seconds,
            "text": result.text,
            **({"language": result.language} if result.language else {}),
            "score": round(result.score, 4),
            "warning": result.warning,
            "words": words_of_file,
            "marks": [mark._asdict() for mark in result.marks],
        }
        return json.dumps(values, ensure_ascii=False) + "\n"
    lines = [f"{name}\t{result.text}"]
    if times:
        timed = [(w.start, w.end, w.word) for w in result.words]
        timed += [(mark.start, mark.end, f"[{mark.kind}]") for mark in result.marks]
        lines += [f"{start:9.2f}{end:9.2f}  {text}" for start, end, text in sorted(timed)]
    return "\n".join(lines) + "\n"


def is_transcript(file: Path, name: str, kind: str) -> bool:
    """Whether a file may be an earlier result of `transcript` for the audio file called `name`, in
    any folder and format of audio; or is empty. Subtitles look alike, whoever wrote them."""
    try:
        with file.open(encoding="utf-8") as lines:
            first, second = lines.readline(_MOST_LINE), lines.readline(_MOST_LINE)
    except (OSError, ValueError):
        return False
    if not first:
        return True
    if kind == "srt":
        return first == "1\n" and " --> " in second
    if kind == "jsonl":
        return first.startswith('{"file": ')
    stem = on_one_line(Path(name).stem)
    if kind == "ctm":
        columns = first.removeprefix(";; ").split(" ")
        found = ctm_name(columns[0].rpartition("/")[2])
        return found == ctm_name(stem) and columns[1:2] == ["1"]
    cell, tab, _ = first.partition("\t")
    return bool(tab) and Path(cell).stem == stem


def on_one_line(name: str) -> str:
    """A file's name with escapes for line breaks, other control characters, and bytes that are no
    UTF-8, which cannot be written."""
    return _LINE_BREAKS.sub(_escaped, name)


def _escaped(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def mark_text(mark: Mark) -> str:
    """For example `3.20 to 4.60 s: speech without text`."""
    return f"{mark.start:.2f} to {mark.end:.2f} s: {mark.kind}"


def subtitles(words: Sequence[TimedWord], breaks: Sequence[float] = ()) -> list[list[TimedWord]]:
    """Group words into subtitles: a new one at each pause and at the times `breaks` in seconds, and
    before one is too long to read."""
    parts: list[list[TimedWord]] = []
    characters = 0
    for word in words:
        characters += 1 + len(word.word)
        part = parts[-1] if parts else []
        if (
            not part
            or word.start - part[-1].end > _PAUSE_SECONDS
            or word.end - part[0].start > _MOST_SECONDS
            or characters > _MOST_CHARACTERS
            or any(part[-1].start < moment <= word.start for moment in breaks)
        ):
            parts.append([word])
            characters = len(word.word)
        else:
            part.append(word)
    return parts


def _srt(result: Transcription) -> str:
    # Some players show only one of two subtitles that overlap; other marks are about a text.
    between = [mark for mark in result.marks if mark.kind == "speech without text"]
    over = [mark for mark in result.marks if mark not in between]
    spelled = _with_spaces(result)
    apart = [
        (part[0].start, part[-1].end, "".join(islice(spelled, len(part))).lstrip())
        for part in subtitles(result.words, [mark.start for mark in between])
    ]
    apart = sorted([*apart, *map(_subtitle_of_mark, between)])
    # A mark may start with a word; neither is then cut to nothing.
    starts = [start for start, _, _ in apart] + [math.inf]
    shown = [
        (start, min(end, starts[bisect_right(starts, start)]), text) for start, end, text in apart
    ]
    return "\n".join(
        f"{number}\n{_clock(start)} --> {_clock(end)}\n{text}\n"
        for number, (start, end, text) in enumerate(
            sorted([*shown, *map(_subtitle_of_mark, over)]), start=1
        )
    )


def _with_spaces(result: Transcription) -> Iterator[str]:
    """Each word, after a space unless the text has none there."""
    place = 0
    for timed in result.words:
        word = timed.word
        found = result.text.find(word, place)
        yield word if found == place else f" {word}"
        place = found + len(word) if found >= 0 else place


def _subtitle_of_mark(mark: Mark) -> tuple[float, float, str]:
    return mark.start, mark.end, f"[{mark.kind}]"


def _clock(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d},{rest % 1000:03d}"
