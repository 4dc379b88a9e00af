"""Transcripts in every format."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import unicodedata
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import TimedWord, timed_tokens, timed_words
from pruned_rnnt.transcribe.joined_path import JoinedPath, RecordingPath, SegmentPlace
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.transcribe_command import run_transcribe
from pruned_rnnt.transcribe.transcript_files import AudioInput, TranscriptFiles
from pruned_rnnt.transcribe.transcription import (
    NumberedResult,
    Transcription,
    is_transcript,
    subtitles,
    transcript,
    transcriptions,
)


def words(*items: tuple[str, float, float]) -> tuple[TimedWord, ...]:
    return tuple(
        TimedWord(word=word, start=start, end=end, confidence=0.5) for word, start, end in items
    )


def example() -> Transcription:
    found = words(("one", 0.04, 0.3), ("twö", 0.4, 0.6), ("three", 3661.2, 3661.5))
    return Transcription(text="one twö three", words=found, score=-1.23456, seconds=3700.0)


def test_json_lines() -> None:
    text = transcript(example(), "a b.wav", "jsonl", False)
    assert text.endswith("\n")
    values = json.loads(text)
    assert values["file"] == "a b.wav"
    assert values["seconds"] == 3700.0
    assert values["text"] == "one twö three"
    assert values["score"] == -1.2346
    assert values["words"][1] == {"word": "twö", "start": 0.4, "end": 0.6, "confidence": 0.5}


class _Example:
    """A recogniser that finds `example` in all recordings."""

    batch_seconds = 1.0

    def transcribe_each(self, audio: list[Path], **_: object) -> list[Transcription]:
        return [example() for _ in audio]

    def transcribe_numbered(self, audio: list[Path], **_: object) -> list[NumberedResult]:
        return [NumberedResult(number, example()) for number in reversed(range(len(audio)))]


@pytest.mark.parametrize("kind", ["text", "jsonl", "srt", "ctm"])
def test_names_that_are_no_utf8(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(os.fsdecode(b"caf\xe9.wav")), Path("b.wav")]
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", output)
    for folder in (None, tmp_path):
        options = Namespace(format=kind, output=folder, times=False, channel=None)
        items = [AudioInput(path, path.stem) for path in paths]
        assert run_transcribe(_Example(), items, options)  # type: ignore[arg-type]
    _, written = sorted(tmp_path.iterdir())
    assert os.fsencode(written.stem) == b"caf\xe9"
    output.flush()
    shown = output.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert shown.startswith(written.read_text())
    assert "caf\\udce9" in shown


def test_names_of_files_are_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "one\nwrote two.txt"
    with TranscriptFiles() as files:
        files.add("text", AudioInput(Path("one\nwrote two.wav"), "one\nwrote two"), target)
    assert capsys.readouterr().out == f"wrote {tmp_path}/one\\nwrote two.txt\n"
    assert target.read_text() == "text"


def test_files_are_written_in_order_and_after_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dir.txt").mkdir()
    names = [f"{number:03d}" for number in range(600)]
    with TranscriptFiles() as files:
        for name in [*names, "dir"]:
            files.add(name, AudioInput(Path(f"{name}.wav"), name), tmp_path / f"{name}.txt")
    assert not files.all_written
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"wrote {tmp_path / name}.txt" for name in names]
    assert shown.err.startswith("pruned-rnnt transcribe: dir.wav: its transcript cannot be written")
    assert all((tmp_path / f"{name}.txt").read_text() == name for name in names)

    def interrupted() -> None:
        with TranscriptFiles() as files:
            for name in names:
                files.add("new", AudioInput(Path(f"{name}.wav"), name), tmp_path / f"{name}.txt")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all((tmp_path / f"{name}.txt").read_text() == "new" for name in names)


def test_a_full_disk_keeps_earlier_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "a.txt"
    target.write_text("earlier")
    monkeypatch.setattr(Path, "write_bytes", fill)

    def write() -> None:
        with TranscriptFiles() as files:
            for _ in range(400):
                files.add("new", AudioInput(Path("a.wav"), "a"), target)

    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        write()
    assert target.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [target]
    assert capsys.readouterr().out == ""


def test_subtitle_times_have_hours() -> None:
    text = transcript(example(), "a", "srt", False)
    cues = re.findall(r"(\d+)\n(\S+) --> (\S+)\n(.+)\n(?:\n|$)", text)
    assert cues == [
        ("1", "00:00:00,040", "00:00:00,600", "one twö"),
        ("2", "01:01:01,200", "01:01:01,500", "three"),
    ]
    assert len(text.splitlines()) == 7


def test_subtitles_end_at_pauses_and_before_they_are_too_long() -> None:
    pause = words(("a", 0.0, 0.5), ("b", 1.2, 1.5), ("c", 2.4, 2.5))
    assert [len(part) for part in subtitles(pause)] == [2, 1]
    steady = words(*((str(i), 0.5 * i, 0.5 * i + 0.4) for i in range(40)))
    parts = subtitles(steady)
    assert [word for part in parts for word in part] == list(steady)
    assert all(part[-1].end - part[0].start <= 6.0 for part in parts)
    assert len(parts) == 4
    long = words(*(("x" * 30, 0.1 * i, 0.1 * i + 0.1) for i in range(6)))
    assert [len(part) for part in subtitles(long)] == [2, 2, 2]
    huge = words(("x" * 100, 0.0, 0.1), ("y", 0.1, 0.2))
    assert [len(part) for part in subtitles(huge)] == [1, 1]
    assert subtitles(()) == []


def test_subtitles_have_the_spaces_of_the_text() -> None:
    said = words(("今", 0.0, 0.2), ("日", 0.2, 0.4), ("は", 0.4, 0.6), ("one", 0.7, 0.9))
    for text in ("今日は one", "今日 は one"):
        found = Transcription(text=text, words=said, score=0.0, seconds=1.0)
        assert transcript(found, "a", "srt", False).splitlines()[2] == text


@pytest.mark.parametrize(
    "text",
    [
        "วันนี้อากาศดีมากพรุ่งนี้ก็จะแจ่มใสเราจะไปภูเขากันและทะเลก็มองเห็นได้",
        "น้ำคำนำดำทำจำกำ" * 4,
        "ភាសាខ្មែរ" * 9,
    ],
)
def test_no_subtitle_begins_within_a_written_character(text: str) -> None:
    tokenizer = train_tokenizer([text], TokenizerConfig(kind="char"))
    symbols = tokenizer.encode(text)
    frames = [8 * n for n in range(len(symbols))]
    tokens = timed_tokens(tokenizer.symbols, symbols, frames, [-0.1] * len(symbols))
    said = timed_words(tokenizer, tokens)
    parts = subtitles(said)
    assert len(parts) > 3
    assert "".join(word.word for part in parts for word in part) == text
    assert not any(unicodedata.category(word.word[0])[0] == "M" for word in said)
    assert not any(word.word[0] == "ำ" or word.word[-1] in "\u17d2เแไใโ" for word in said)


def test_ctm_and_text() -> None:
    lines = transcript(example(), "a", "ctm", False).splitlines()
    assert lines[0] == "a 1 0.040 0.260 one 0.5000"
    assert len(lines) == 3
    assert transcript(example(), "a", "text", False) == "a\tone twö three\n"
    with_times = transcript(example(), "a", "text", True).splitlines()
    assert with_times[1].split() == ["0.04", "0.30", "one"]
    assert len(with_times) == 4


def test_marks_are_in_every_format() -> None:
    marks = (Mark("speech without text", 0.7, 2.25), Mark("text without speech", 4.0, 4.3))
    marked = replace(example(), marks=marks)
    assert json.loads(transcript(marked, "a", "jsonl", False))["marks"][0] == {
        "kind": "speech without text",
        "start": 0.7,
        "end": 2.25,
    }
    blocks = transcript(marked, "a", "srt", False).split("\n\n")
    assert blocks[1] == "2\n00:00:00,700 --> 00:00:02,250\n[speech without text]"
    assert transcript(marked, "a", "ctm", False).splitlines()[-1] == (
        ";; a 1 4.00 to 4.30 s: text without speech"
    )
    lines = transcript(marked, "a", "text", True).splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["one", "twö", "[speech", "[text", "three"]


def test_subtitles_do_not_overlap_speech_without_text() -> None:
    said = words(("one", 0.0, 0.4), ("two", 0.5, 1.2), ("three", 1.5, 1.9))
    marks = (Mark("speech without text", 0.9, 1.6),)
    marked = Transcription(text="one two three", words=said, score=0.0, seconds=2.0, marks=marks)
    times = re.findall(
        r"00:00:0(\S+) --> 00:00:0(\S+)\n(.+)", transcript(marked, "a", "srt", False)
    )
    assert times == [
        ("0,000", "0,900", "one two"),
        ("0,900", "1,500", "[speech without text]"),
        ("1,500", "1,900", "three"),
    ]


def test_a_word_where_a_mark_starts_has_a_subtitle() -> None:
    said = words(("one", 1.0, 1.5), ("two", 3.0, 3.5), ("three", 3.6, 4.0))
    marks = (Mark("speech without text", 3.0, 3.6),)
    marked = Transcription(text="one two three", words=said, score=0.0, seconds=4.0, marks=marks)
    times = re.findall(r"00:00:0(\S+) --> 00:00:0(\S+)\n", transcript(marked, "a", "srt", False))
    assert times == [("1,000", "1,500"), ("3,000", "3,600"), ("3,000", "4,000")]


@pytest.mark.parametrize("kind", ["text", "jsonl", "srt", "ctm"])
def test_transcripts_are_known_again(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a"
    name = "a b" if kind == "ctm" else "calls/a b.wav"
    for result in (example(), replace(example(), text="", words=())):
        file.write_text(transcript(result, name, kind, True))
        assert is_transcript(file, "a b.wav", kind)
        assert is_transcript(file, "a b.flac", kind)
    for text in ("by hand\n", "b.wav\tby hand\n", '{"text": "by hand"}\n', "a_b by hand\n"):
        file.write_text(text)
        assert not is_transcript(file, "a b.wav", kind)
    for name in (";;a", "calls/;;a"):
        file.write_text(transcript(example(), name, kind, True))
        assert is_transcript(file, ";;a.wav", kind)


@pytest.mark.parametrize(
    ("kind", "text"), [("text", "a\t\n"), ("srt", ""), ("ctm", ""), ("jsonl", None)]
)
def test_empty_transcription(kind: str, text: str | None) -> None:
    nothing = Transcription(text="", words=(), score=0.0, seconds=1.0)
    found = transcript(nothing, "a", kind, True)
    assert json.loads(found)["words"] == [] if text is None else found == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("one tw", "▁three", "one tw three"),
        ("one tw", "three", "one tw three"),
        ("one tw", ".", "one tw."),
        ("天气", "今天", "天气今天"),
        ("天气。", "3月", "天气。3月"),
        ("one (", "two", "one (two"),
        ("l'", "ami", "l'ami"),
    ],
)
def test_a_pause_between_segments_ends_a_word(before: str, after: str, text: str) -> None:
    tokenizer = train_tokenizer([f"{before} {after.lstrip('▁')} ."], TokenizerConfig(kind="char"))
    path = JoinedPath(tokenizer, with_words=True)
    for begin, part in ((0, f"▁{before}"), (200, after)):
        symbols = tuple(tokenizer.symbols.index(c) for c in part.replace(" ", "▁"))
        found = Hypothesis(
            symbols=symbols,
            frames=tuple(range(len(symbols))),
            score=0.0,
            symbol_scores=(-0.1,) * len(symbols),
        )
        path.append(found, None, SegmentPlace(begin, 0, 100))
    (result,) = transcriptions([RecordingPath(path, frames=300)], tokenizer)
    assert isinstance(result, Transcription)
    assert result.text == text
    if after.endswith("three"):
        assert [timed.word for timed in result.words] == text.split()
        subtitle = transcript(result, "a", "srt", False)
        assert "one tw\n" in subtitle
        assert "\nthree\n" in subtitle
