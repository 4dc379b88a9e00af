"""Sources of `prepare own` as people have them: odd tables, folders, Kaldi files and manifests."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lhotse import MonoCut, Recording, RecordingSet, SupervisionSegment, SupervisionSet

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.own_corpus import DuplicateIdMarker
from pruned_rnnt.data.prepare.own_sources import FolderSource, open_source, unread_columns
from tests.data.recorded_speech import text_of, truncate, write_audio


def entries_of(path: Path) -> list[CorpusEntry]:
    return list(open_source(path)[1])


def prepare(source: Path, output: Path, *options: str) -> int:
    arguments = ["prepare", "own", str(source), "--output", str(output), "--num-jobs", "1"]
    return pruned_rnnt([*arguments, "--tokens", "char", *options])


def reasons(output: Path) -> list[tuple[str, str, str]]:
    """Last part of the origin, reason and details of what was left out."""
    lines = (output / "left_out.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return [(v["origin"].rpartition("/")[2], v["reason"], v["details"]) for v in values]


@pytest.fixture(scope="module")
def wav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_audio(tmp_path_factory.mktemp("wav") / "a.wav")


@pytest.mark.parametrize("separator", list("\t,;|"))
@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_header_allows_any_separator(tmp_path: Path, separator: str, suffix: str) -> None:
    table = tmp_path / f"table.{suffix}"
    rows = [["id", "path", "text"], ["1", "a.wav", "hello you"], ["2", "b.wav", "stop"]]
    table.write_text("\n" + "".join(separator.join(row) + "\r\n" for row in rows))
    assert [(e.audio, e.text, e.origin) for e in entries_of(table)] == [
        (str(tmp_path / "a.wav"), "hello you", f"{table}:3"),
        (str(tmp_path / "b.wav"), "stop", f"{table}:4"),
    ]


@pytest.mark.parametrize(
    ("separator", "advice"),
    [
        (",", "put texts with commas in quotation marks"),
        ("\t", "write a space for a tab in a text"),
    ],
)
def test_row_with_more_cells_than_the_header_is_left_out(
    tmp_path: Path, separator: str, advice: str
) -> None:
    table = tmp_path / "table.csv"
    rows = [["path", "text", ""], ["a.wav", "one", " two"], ["b.wav", "three", ""], ["c.wav", "go"]]
    table.write_text("".join(separator.join(row) + "\n" for row in rows))
    problem = "row has more cells than the header"
    assert [(e.origin, e.text, e.problem, e.details) for e in entries_of(table)] == [
        (f"{table}:2", "one", problem, f"3 instead of 2: {advice}"),
        (f"{table}:3", "three", "", ""),
        (f"{table}:4", "go", "", ""),
    ]


@pytest.mark.parametrize("separator", list("\t,"))
def test_text_cut_by_a_line_break_is_left_out(tmp_path: Path, separator: str) -> None:
    """Rows without empty cells at the end, as spreadsheets write them, are not."""
    table = tmp_path / "table.csv"
    rows = [["path", "text", "split"], ["a.wav", "two"], ["lines", "test"], ["b.wav", "go"]]
    rows += [["b", "on"], ["gone.wav", "off"]]
    write_audio(tmp_path / "b.wav").rename(tmp_path / "b")
    table.write_text("".join(separator.join(row) + "\n" for row in rows))
    advice = "write a space for a line break in a text"
    assert [(e.origin, e.problem, e.details) for e in entries_of(table)] == [
        (f"{table}:2", "text is cut by a line break", advice),
        (f"{table}:3", "", ""),  # has no file, which reading the audio shows
        (f"{table}:4", "", ""),
        (f"{table}:5", "", ""),
        (f"{table}:6", "", ""),
    ]


@pytest.mark.parametrize(
    "rows", [["a.wav,one, two", "b.wav,three"], ["a.wav,one", "b.wav,two", "c.wav,three, four"]]
)
def test_numbers_of_cells_that_vary_without_a_header_are_an_error(
    tmp_path: Path, rows: list[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("\n".join(rows) + "\n")
    with pytest.raises(ValueError, match=rf"csv:{len(rows)}: row has \d cells, the first row has"):
        entries_of(table)


def test_cells_may_be_empty_at_the_end_of_rows_without_a_header(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text('a.wav,"two\nlines"\nb.wav,one,\nc.wav,"go, now"\n')
    assert [(e.text, e.problem) for e in entries_of(table)] == [
        ("two\nlines", ""),
        ("one", ""),
        ("go, now", ""),
    ]


@pytest.mark.parametrize("name", ["path", "text", "speaker", "split"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,text,speaker,split,{name.upper()}\na.wav,one,anna,train,x\n")
    with pytest.raises(ValueError, match=f"csv:1: 2 columns have the name `{name}`"):
        entries_of(table)


def test_unclosed_quotation_mark_is_reported(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = ['a.wav,"two\nlines, and ""a word"""', "c.wav,go", 'b.wav,"oops']
    rows += ["c.wav,go"] * 20_000
    table.write_text("path,text\n" + "\n".join(rows) + "\n")
    entries = iter(open_source(table)[1])
    first = next(entries)
    assert (first.origin, first.text) == (f"{table}:2", 'two\nlines, and "a word"')
    with pytest.raises(ValueError, match=r"table\.csv:5: the row that begins here .* quotation"):
        next(entries)


def test_utf16_tables_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("a.wav\thello\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"table\.tsv is UTF-16: save it as UTF-8"):
        entries_of(table)


@pytest.mark.parametrize(
    "row",
    [
        *("hello you\ta.wav", "Mr. Smith\ta.wav", f"{'no' * 200}\ta.wav"),
        *("wavfile\tutterance\tspeaker", "audio.path\tutterance"),
    ],
)
def test_a_first_row_that_is_neither_a_header_nor_audio_is_refused(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str], row: str
) -> None:
    table = wav.parent / "first_row.tsv"
    table.write_text(f"{row}\n{wav}\thello\n")
    assert prepare(table, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert f"{table}:1: the first row needs to be a header with the columns `path` (or" in error
    assert f"or to begin with an audio file that exists; got {row[:200]!r}\n" in error
    # Without the suffix of audio, the name of a file that is there is one.
    (wav.parent / "recording").write_bytes(wav.read_bytes())
    table.write_text(f"recording\tgo\n{wav}\thello\n")
    assert [entry.text for entry in entries_of(table)] == ["go", "hello"]


@pytest.mark.parametrize("name", ["gone.mp4", "gone.wav?dl=1"])
def test_a_first_file_that_is_missing_is_left_out(tmp_path: Path, wav: Path, name: str) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(f"{name}\tgo\n{wav}\thello\n")
    assert [Path(entry.audio).name for entry in entries_of(table)] == [name, wav.name]
    table.write_text(f"{name}\tgo\nhello\t{wav}\n")
    with pytest.raises(ValueError, match="or to begin with an audio file that exists; got"):
        entries_of(table)


def test_an_empty_table_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "table.tsv").touch()
    with pytest.raises(ValueError, match=r"needs path and text .*; got an empty file"):
        entries_of(tmp_path / "table.tsv")


def test_paths_that_cannot_be_opened_are_examples(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(f"gone.wav\tgo\n{'word ' * 100}\t{wav}\n")
    assert prepare(table, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert f"1 audio file not found (the first: {table}:1, {tmp_path}/gone.wav)" in error
    assert f"1 audio file cannot be opened (the first: {table}:2, " in error
    assert "File name too long" in error


def test_columns_that_are_not_read_are_named(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.tsv"
    columns = ("path", "text", "speeker", "Splt", "lang-code", "start", "end")
    table.write_text("\t".join(columns) + "\n" + f"{wav}\tgo\tanna\ttest\ten\t0\t1\n" * 4)
    assert prepare(table, tmp_path / "out") == 0
    hint = (
        "hint: columns that are not read: speeker (did you mean `speaker`?), Splt (did you mean "
        "`split`?), lang-code (did you mean `lang`?), start, end\n"
    )
    assert capsys.readouterr().out.startswith(hint)
    assert hint in (tmp_path / "out" / "report.txt").read_text()
    # Other properties of a speaker are not the speaker.
    columns = ("path", "text", "speaker_age", "spk_gender", "lang_prob", "set_id", "lang_id")
    table.write_text("\t".join(columns) + "\n")
    said = "columns that are not read: speaker_age, spk_gender, lang_prob, set_id, lang_id (did you"
    assert unread_columns(open_source(table)[1]) == [f"{said} mean `lang`?)"]
    # A column that the table has is not what another one means.
    table.write_text(f"path\ttext\tspeaker\tSpeaker ID\n{wav}\tgo\ta\t1\n")
    source = open_source(table)[1]
    assert unread_columns(source) == ["columns that are not read: Speaker ID"]
    folder = tmp_path / "corpus"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / "metadata.csv").write_text(f"file_name,text,Speaker ID\n{wav},go,1\n")
    said = "columns that are not read: Speaker ID (did you mean `speaker_id`?)"
    assert unread_columns(open_source(folder)[1]) == [said]
    (tmp_path / "clips").mkdir()
    table.write_text(f"client_id\tpath\tsentence\tage\n1\t{wav}\tgo\t40\n")
    assert unread_columns(open_source(table)[1]) == []


def test_a_row_with_shifted_cells_has_no_unknown_split(tmp_path: Path, wav: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{wav},{text_of(i)},speaker,train\n" for i in range(3)]
    rows += [f"{wav},not, today,speaker,train\n"]
    table.write_text("path,text,speaker,split\n" + "".join(rows))
    assert prepare(table, tmp_path / "out") == 0
    advice = "5 instead of 4: put texts with commas in quotation marks"
    assert reasons(tmp_path / "out") == [
        ("table.csv:5", "row has more cells than the header", advice)
    ]


def test_unknown_splits_share_one_reason(tmp_path: Path, wav: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{wav},{text_of(i)},{'train' if i < 3 else f'speaker {i}'}\n" for i in range(6)]
    table.write_text("path,text,split\n" + "".join(rows))
    assert prepare(table, tmp_path / "out") == 0
    assert reasons(tmp_path / "out") == [
        (f"table.csv:{i + 2}", "split is none of train, dev and test", f"speaker {i}")
        for i in range(3, 6)
    ]


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("mp3", r": it has [\d,]+ of 6\d,\d+ samples"),
        ("flac", r": it has [\d,]+ of 64,000 samples"),
        ("aiff", r": it has 64,027 of 128,054 bytes"),
    ],
)
def test_truncated_files_have_the_reasons_of_transcription(
    tmp_path: Path, wav: Path, suffix: str, message: str
) -> None:
    path = truncate(write_audio(tmp_path / f"a.{suffix}", 4.0))
    table = tmp_path / "table.tsv"
    table.write_text(f"{path}\tgo\n{wav}\tstop\n{wav}\tgo\n{wav}\ton\n")
    assert prepare(table, tmp_path / "out") == 0
    ((_, reason, details),) = reasons(tmp_path / "out")
    assert reason == "truncated: fewer samples than the header says"
    assert re.fullmatch(re.escape(str(path)) + message, details)


def test_cyclic_links_are_followed_once(tmp_path: Path, wav: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "up").symlink_to(tmp_path)
    (tmp_path / "a/x.wav").symlink_to(wav)
    (tmp_path / "a/x.txt").write_text("hello")
    assert [entry.id for entry in FolderSource(tmp_path)] == ["a-x"]


def test_folder_with_links_and_unusual_names(tmp_path: Path, wav: Path) -> None:
    source = tmp_path / "source"
    (source / "folder.wav").mkdir(parents=True)
    (source / "folder.txt").write_text("hello")
    (source / "u.txt").mkdir()
    (source / "dead.txt").write_text("hello")
    (source / "dead.wav").symlink_to(tmp_path / "gone.wav")
    for name in ("u.wav", "a-b.wav", "a/b.wav", "c.wav", "d.wav"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(wav)
        if name != "u.wav":
            (source / name).with_suffix(".txt").write_text("hello")
    assert prepare(source, tmp_path / "out") == 0
    assert sorted(reasons(tmp_path / "out")) == [
        ("dead.txt", "audio file not found", str(source / "dead.wav")),
        ("folder.txt", "text file without an audio file of the same name", ""),
        ("u.txt", "text file cannot be read", "Is a directory"),
    ]


def test_paths_that_give_the_same_id_are_different_utterances(tmp_path: Path, wav: Path) -> None:
    source = tmp_path / "source"
    for name in ("a-b.wav", "a/b.wav", "c.wav", "d.wav"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).symlink_to(wav)
        (source / name).with_suffix(".txt").write_text("hello")
    assert prepare(source, tmp_path / "out") == 0
    folder = PreparedFolder(tmp_path / "out")
    cuts = [cut for split in folder.splits() for cut in folder.cuts(split)]
    found = {str(Path(cut.recording.sources[0].source).relative_to(source)): cut.id for cut in cuts}
    other = found.pop("a/b.wav")
    assert found == {"a-b.wav": "a-b", "c.wav": "c", "d.wav": "d"}
    assert re.fullmatch("a-b-[0-9a-f]{8}", other)


def test_folders_with_names_of_splits_are_splits(tmp_path: Path, wav: Path) -> None:
    names = ("Dev", "cv", "eval", "test", "tr", "train", "validation")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.wav").symlink_to(wav)
    (tmp_path / "dev.wav").symlink_to(wav)
    found = {entry.id: entry.split for entry in FolderSource(tmp_path)}
    # tr may be Turkish, and cv Common Voice.
    splits = {f"{name}-a": "" if len(name) == 2 else name for name in names}
    assert found == {**splits, "dev": ""}


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, wav: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.wav").symlink_to(wav)
    listed = os.scandir

    def failing(path: str) -> Any:
        if Path(path).name == "b":
            raise OSError(errno.EIO, "Input/output error", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(OSError, match="Input/output error"):
        list(FolderSource(tmp_path))


def test_a_name_that_is_not_utf8_is_left_out(tmp_path: Path, wav: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b", "c", "caf\udce9"):
        (source / f"{name}.wav").symlink_to(wav)
        (source / f"{name}.txt").write_text("hello")
    assert prepare(source, tmp_path / "out") == 0
    folder = PreparedFolder(tmp_path / "out")
    assert sum(len(folder.cuts(split)) for split in folder.splits()) == 3
    (line,) = (folder.path / "left_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["origin"] == f"{source}/caf\udce9.txt"
    (skipped,) = folder.report()["skipped"]
    assert "caf" in skipped["path"]


def test_texts_of_a_folder_have_audio(tmp_path: Path, wav: Path) -> None:
    for name in ("UP.WAV", "b.aiff"):
        (tmp_path / name).symlink_to(wav)
    for name in ("UP.TXT", "b.txt", "call.txt", "notes.txt"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "call.amr").write_bytes(b"#!AMR")
    found = [(e.id, e.text, e.problem, e.details) for e in FolderSource(tmp_path)]
    problem = "text file without an audio file of the same name"
    assert found == [
        ("UP", "hello", "", ""),
        ("b", "hello", "", ""),
        ("call.txt", "", problem, "call.amr has another suffix"),
        ("notes.txt", "", problem, ""),
    ]


def test_transcripts_are_texts(tmp_path: Path, wav: Path) -> None:
    """Of `transcribe --output`, as for training on them; other texts may have tabs."""
    for name in ("a.wav", "b.wav", "c.wav", "d.wav"):
        (tmp_path / name).symlink_to(wav)
    (tmp_path / "a.txt").write_text("calls/a.wav\tturn left\n")
    (tmp_path / "b.txt").write_text("b.MP3\tturn left\n     0.10     0.40  turn\n")
    (tmp_path / "c.txt").write_text("a.wav\tturn left\n")
    (tmp_path / "d.txt").write_text("d\tturn left\n")
    found = [(e.text, e.problem) for e in FolderSource(tmp_path)]
    assert found[:2] == [("turn left", ""), ("turn left", "")]
    assert found[2:] == [("a.wav\tturn left\n", ""), ("d\tturn left\n", "")]


@pytest.mark.parametrize("name", ["", "text"])
def test_error_for_folder_without_audio_lists_suffixes(tmp_path: Path, name: str) -> None:
    (tmp_path / (name or "notes.md")).write_text("u1 hello\n")
    with pytest.raises(ValueError, match=r"no audio files below .* \.wav, .* needs `wav\.scp`"):
        entries_of(tmp_path)


def test_kaldi_files_of_other_encodings_and_bad_segments(tmp_path: Path, wav: Path) -> None:
    source = tmp_path / "kaldi"
    source.mkdir()
    names = ["u1", "u2", "u3", "u4", "u5", "u6"]
    (source / "wav.scp").write_text(f"r1\t{wav}\r\n")
    (source / "text").write_bytes(
        "\ufeff".encode() + b"".join(f"{name} go\r\n".encode() for name in names) + b"u1 again\n"
    )
    segments = ["r1 0.1 0.4", "r1 0.4 0.1", "r1 -3 0.4", "r1 nan 0.4", "r1 0 inf", "r1 0 -1"]
    pairs = zip(names, segments, strict=True)
    (source / "segments").write_text("".join(f"{n} {s}\n" for n, s in pairs))
    with (source / "text").open("ab") as file:
        file.write("u6x caf\u00e9\n".encode("latin-1"))
    with (source / "segments").open("a") as file:
        file.write("u6x r1 0 0.3\nu/7 r1 0 0.3\n")
    assert prepare(source, tmp_path / "out", "--dev-share", "0", "--test-share", "0") == 0
    wrong = "segment does not have 0 <= start < end"
    assert reasons(tmp_path / "out") == [
        ("segments:2", wrong, "u2 r1 0.4 0.1"),
        ("segments:3", wrong, "u3 r1 -3 0.4"),
        ("segments:4", wrong, "u4 r1 nan 0.4"),
        ("segments:5", wrong, "u5 r1 0 inf"),
        ("text:7", "second entry of the same id", f"{source}/text:1"),
        ("text:8", "text is not UTF-8", ""),
        ("segments:8", "not in text", "u/7"),
    ]
    assert [cut.id for cut in PreparedFolder(tmp_path / "out").cuts("train")] == ["u1", "u6"]


def test_kaldi_recordings_without_segments_need_texts(tmp_path: Path, wav: Path) -> None:
    (tmp_path / "wav.scp").write_text(f"u1 {wav}\nu2 {wav}\n")
    (tmp_path / "text").write_text("u2 go\n")
    found = [(e.id, Path(e.origin).name, e.problem) for e in entries_of(tmp_path)]
    assert found == [("u2", "text:1", ""), ("u1", "wav.scp:1", "not in text")]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("wav.scp", "r1 a.wav", "r1 b.wav"),
        ("segments", "u1 r1 0 1", "u1 r1 1 2"),
        ("utt2spk", "u1 anna", "u1 ben"),
        ("utt2lang", "u1 de", "u1 fr"),
    ],
)
def test_kaldi_key_with_two_values_is_an_error(
    tmp_path: Path, name: str, first: str, second: str
) -> None:
    (tmp_path / "wav.scp").write_text("r1 a.wav\n")
    (tmp_path / "text").write_text("u1 go\n")
    (tmp_path / name).write_text(f"{first}\nother x 0 1\n{first}\n")
    assert entries_of(tmp_path)[0].id == "u1"
    (tmp_path / name).write_text(f"{first}\nother x 0 1\n{second}\n")
    key, value = second.split(maxsplit=1)
    message = f"{tmp_path / name}:3: second line for '{key}' (first in line 1): '{value}' instead"
    with pytest.raises(ValueError, match=re.escape(message)):
        entries_of(tmp_path)


def test_a_command_runs_once_for_all_segments(tmp_path: Path, wav: Path) -> None:
    source, runs = tmp_path / "kaldi", tmp_path / "runs"
    source.mkdir()
    scp = [f"r1 echo >> {runs}; cat {wav} |", f"r2 echo >> {runs}; echo no such tape >&2; false |"]
    (source / "wav.scp").write_text("\n".join(scp) + "\n")
    names = [f"r{r}-{i}" for r in (1, 2) for i in range(4)]
    (source / "segments").write_text("".join(f"{n} {n[:2]} 0 0.{n[-1]}5\n" for n in names))
    (source / "text").write_text("".join(f"{n} go\n" for n in names))
    assert prepare(source, tmp_path / "out", "--min-duration", "0.04", "--allow-commands") == 0
    assert len(runs.read_text().splitlines()) == 2
    left_out = reasons(tmp_path / "out")
    assert [reason for _, reason, _ in left_out] == ["command of wav.scp failed"] * 4
    assert "no such tape" in left_out[0][2]


def _cuts(wav: Path, names: list[str]) -> list[str]:
    recording = Recording.from_file(wav)
    lines = []
    for name in names:
        cut = recording.to_cut()
        cut.id = name
        cut.supervisions = [
            SupervisionSegment(name, recording.id, 0, recording.duration, text="go")
        ]
        lines.append(json.dumps(cut.to_dict()) + "\n")
    return lines


def _write_cut(path: Path, recording: Recording, *supervisions: SupervisionSegment) -> None:
    """Adds a cut of a whole recording to a manifest; its id is that of the first supervision."""
    cut = recording.to_cut()
    cut.id, cut.supervisions = supervisions[0].id, list(supervisions)
    with path.open("a") as file:
        file.write(json.dumps(cut.to_dict()) + "\n")


def _prepared_cuts(source: Path, output: Path, *options: str) -> dict[str, MonoCut]:
    assert prepare(source, output, "--dev-share", "0", "--test-share", "0", *options) == 0
    return {cut_text(cut): cut for cut in PreparedFolder(output).cuts("train")}


@pytest.mark.parametrize("given", ["cut", "one", "pair"])
@pytest.mark.parametrize("wanted", ["0", "1"])
def test_a_supervision_is_read_from_its_own_channel(
    tmp_path: Path, given: str, wanted: str
) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "st.wav", channels=3), "st")
    named = {"left": 0, "right": 1, "both": [0, 1], "third": 2}
    supervisions = [
        SupervisionSegment(text, "st", 0.0, 0.5, channel, text) for text, channel in named.items()
    ]
    source, options = tmp_path / "source.jsonl", ("--channel", wanted)
    if given == "pair":
        RecordingSet.from_recordings([recording]).to_file(source)
        SupervisionSet.from_segments(supervisions).to_file(tmp_path / "s.jsonl")
        options += ("--supervisions", str(tmp_path / "s.jsonl"))
    elif given == "cut":
        _write_cut(source, recording, *supervisions)
    else:
        for supervision in supervisions:
            _write_cut(source, recording, supervision)
    cuts = _prepared_cuts(source, tmp_path / "out", *options)
    channels = {text: (cut.channel, cut.supervisions[0].channel) for text, cut in cuts.items()}
    own = {"left": 0, "right": 1, "both": int(wanted), "third": 2}
    assert channels == {text: (channel, channel) for text, channel in own.items()}


def test_a_supervision_in_no_channel_of_its_cut_is_left_out(tmp_path: Path) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "st.wav", channels=2), "st")
    source = tmp_path / "cuts.jsonl"
    for text, channel in (("go", 1), ("stop", 5)):
        _write_cut(source, recording, SupervisionSegment(text, "st", 0.0, 0.5, channel, text))
    assert list(_prepared_cuts(source, tmp_path / "out")) == ["go"]
    reason = "cut without the channel of its supervision"
    assert reasons(tmp_path / "out") == [("cuts.jsonl:2", reason, "channels [5] of [0, 1]")]


# Start, duration, and the reason why it is left out, for a recording of 0.6 s.
_PLACES = {
    "inside": (0.1, 0.4, ""),
    "a little longer": (0.1, 0.54, ""),
    "after": (8.0, 1.0, "supervision lies outside its {kind}"),
    "before": (-2.0, 1.0, "supervision lies outside its {kind}"),
    "much longer": (0.1, 1.5, "supervision lies outside its {kind}"),
    "empty": (0.2, 0.0, "supervision has no samples of its {kind}"),
    "at the end": (0.6, 0.03, "supervision has no samples of its {kind}"),
}


@pytest.mark.parametrize("given", ["cut", "one", "pair"])
def test_a_supervision_outside_its_recording_is_left_out(tmp_path: Path, given: str) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "a.wav"), "a")
    supervisions = [
        SupervisionSegment(f"s{i}", "a", start, duration, text=text)
        for i, (text, (start, duration, _)) in enumerate(_PLACES.items())
    ]
    source, options = tmp_path / "source.jsonl", ()
    if given == "pair":
        RecordingSet.from_recordings([recording]).to_file(source)
        SupervisionSet.from_segments(supervisions).to_file(tmp_path / "s.jsonl")
        options = ("--supervisions", str(tmp_path / "s.jsonl"))
    elif given == "cut":
        _write_cut(source, recording, *supervisions)
    else:
        for supervision in supervisions:
            _write_cut(source, recording, supervision)
    cuts = _prepared_cuts(source, tmp_path / "out", *options)
    parts = {text: (cut.start, cut.duration) for text, cut in cuts.items()}
    assert parts == {"inside": (0.1, 0.4), "a little longer": (0.1, 0.5)}
    file, kind = ("s.jsonl", "recording") if given == "pair" else ("source.jsonl", "cut")
    assert reasons(tmp_path / "out") == [
        (
            f"{file}:{1 if given == 'cut' else i}",
            reason.format(kind=kind),
            f"{start} + {duration} s of 0.6 s",
        )
        for i, (start, duration, reason) in enumerate(_PLACES.values(), 1)
        if reason
    ]


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ((0.2, 0.3), (0.2, 0.3)),
        ((0.0, 0.5), (0.0, 0.5)),
        ((0.0, 0.6), (0.0, 0.6)),
        ((0.005, 0.592), (0.0, 0.6)),
        ((-0.01, 0.65), (0.0, 0.6)),
    ],
)
def test_a_cut_is_trimmed_to_its_only_supervision(
    tmp_path: Path, place: tuple[float, float], part: tuple[float, float]
) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "a.wav"), "a")
    source = tmp_path / "cuts.jsonl"
    _write_cut(source, recording, SupervisionSegment("s", "a", *place, text="go"))
    cut = _prepared_cuts(source, tmp_path / "out")["go"]
    assert (cut.id, cut.start, cut.duration) == ("s", *part)


def test_a_mix_of_recordings_is_left_out(tmp_path: Path, wav: Path) -> None:
    source = tmp_path / "cuts.jsonl"
    source.write_text("".join(_cuts(wav, ["a"])))
    mixed = Recording.from_file(wav).to_cut().pad(duration=2.0)
    with source.open("a") as file:
        file.write(json.dumps(mixed.to_dict()) + "\n")
    assert list(_prepared_cuts(source, tmp_path / "out")) == ["go"]
    assert reasons(tmp_path / "out") == [
        ("cuts.jsonl:2", "cut is not a part of one recording", "MixedCut")
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 3\n', "cuts.jsonl.gz:3 is not a valid line of a lhotse manifest: Expecting"),
        ("null\n", "cuts.jsonl.gz:3 is not a valid line of a lhotse manifest: "),
        (
            '{"audio_filepath": "a.wav"}\n',
            "cuts.jsonl.gz:3 is not a valid line of a lhotse manifest: ",
        ),
    ],
)
def test_error_names_bad_manifest_line(tmp_path: Path, wav: Path, line: str, message: str) -> None:
    source = tmp_path / "cuts.jsonl.gz"
    with gzip.open(source, "wt") as file:
        file.write("".join([*_cuts(wav, ["a"]), "\n", line]))
    with pytest.raises(ValueError, match=re.escape(message)):
        entries_of(source)


def test_error_names_damaged_gzip_file(tmp_path: Path, wav: Path) -> None:
    source = tmp_path / "cuts.jsonl.gz"
    with gzip.open(source, "wt") as file:
        file.write("".join(_cuts(wav, [f"{i:x}" for i in range(500)])))
    whole = source.read_bytes()
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 0xFF
    for broken in (whole[: len(whole) // 2], bytes(spoilt), b"no gzip"):
        source.write_bytes(broken)
        with pytest.raises(ValueError, match=r"cuts\.jsonl\.gz"):
            entries_of(source)


@pytest.mark.parametrize("shar", [False, True])
def test_cuts_of_the_same_id_are_left_out(tmp_path: Path, wav: Path, shar: bool) -> None:
    source = tmp_path / "cuts.jsonl"
    source.write_text("".join(_cuts(wav, ["a", "b", "a", "c", "b", "a", "d"])))
    options = ["--shard-size", "2", *(["--shar"] if shar else [])]
    assert prepare(source, tmp_path / "out", *options) == 0
    folder = PreparedFolder(tmp_path / "out")
    found = Counter(cut.id for split in folder.splits() for cut in folder.cuts(split))
    assert found == Counter("abcd")
    again = "second entry of the same id"
    assert sorted(reasons(tmp_path / "out")) == [
        ("cuts.jsonl:3", again, f"{source}:1"),
        ("cuts.jsonl:5", again, f"{source}:2"),
        ("cuts.jsonl:6", again, f"{source}:1"),
    ]


def test_duplicate_ids_need_one_pass() -> None:
    class Source:
        read = 0

        def __iter__(self):
            self.read += 1
            yield from (CorpusEntry(id=str(i % 7), origin=f"x:{i}") for i in range(9))

    source = Source()
    checked = DuplicateIdMarker(source)
    next(iter(checked))  # an iteration that is given up
    wrong = [(e.id, e.details) for e in checked.marked() if e.problem]
    assert wrong == [("0", "x:0"), ("1", "x:1")]
    assert source.read == 3
    assert sum(1 for _ in checked) == 9
    assert sum(bool(e.problem) for e in checked.marked()) == 2
    assert source.read == 5


def test_shards_are_reused_after_tokenizer_error(
    tmp_path: Path,
    wav: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{wav}\t{text_of(i)}\n" for i in range(6)))
    out = tmp_path / "out"
    assert prepare(table, out, "--tokens", "bpe", "--vocab-size", "5") == 1
    error = capsys.readouterr().err
    assert "change --vocab-size or --tokens and run again" in error
    monkeypatch.setattr("pruned_rnnt.data.prepare.shard_writer.write_shard", None)
    assert prepare(table, out, "--tokens", "bpe", "--vocab-size", "60") == 0
    assert len(PreparedFolder(out).cuts("train")) == 4


def test_options_are_checked_before_the_work(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(f"{wav}\tgo\n")
    monkeypatch.setattr("pruned_rnnt.data.prepare.own_corpus.plan_splits", None)
    assert prepare(table, tmp_path) == 1
    assert "has no prepare.json" in capsys.readouterr().err
    assert prepare(table, tmp_path / "out", "--tokenizer-from", str(tmp_path / "none")) == 1
    assert "no tokenizer at" in capsys.readouterr().err
    assert prepare(table, tmp_path / "out", "--num-jobs", "0") == 1
    assert "--num-jobs must be at least 1, got 0" in capsys.readouterr().err
    for size in ("0", "-5", "2"):
        assert prepare(table, tmp_path / "out", "--tokens", "bpe", "--vocab-size", size) == 1
        expected = f"vocab_size must be at least 3, got {size}; change --vocab-size"
        assert expected in capsys.readouterr().err
    assert prepare(table, tmp_path / "out", "--tokens=bpe", "--vocab-size=99", "--byte-fallback")
    error = capsys.readouterr().err
    assert "at least 261 with byte_fallback, got 99; change --vocab-size\n" in error
    assert prepare(table, tmp_path / "out", "--tokens=word", "--byte-fallback") == 1
    error = capsys.readouterr().err
    assert "--byte-fallback needs --tokens unigram, bpe or char, got word" in error
    for other in ("--tokens char", "--tokens word", "--tokenizer-from none"):
        assert prepare(table, tmp_path / "out", "--vocab-size", "5", *other.split()) == 1
        expected = f"--vocab-size 5 has no effect with {other.removesuffix(' none')}: leave it out"
        assert expected in capsys.readouterr().err


def test_language_tags_need_a_language_before_the_work(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(f"{wav}\tgo\n" * 3)
    with monkeypatch.context() as patched:
        patched.setattr("pruned_rnnt.data.prepare.shard_writer.write_shard", None)
        assert prepare(table, tmp_path / "out", "--language-tags") == 1
    assert "--language-tags needs the languages" in capsys.readouterr().err
    assert prepare(table, tmp_path / "out", "--language-tags", "--language=en") == 0


def test_texts_without_the_tag_of_a_copied_tokenizer_are_counted(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, tagged = tmp_path / "table.csv", tmp_path / "tagged"
    table.write_text(f"path,text,split,language\n{wav},go,train,en\n{wav},on,train,tr\n")
    assert prepare(table, tagged, "--language-tags") == 0
    assert "without one" not in capsys.readouterr().out
    copied = ["--tokenizer-from", str(tagged)]
    table.write_text(f"path,text,split,language\n{wav},go,train,\n{wav},on,train,de\n")
    assert prepare(table, tmp_path / "out", *copied) == 0
    hint = "the tokenizer has tags of en, tr, and train has 2 utterances without one (de 1, unknown"
    assert f"Hint: {hint} 1)" in capsys.readouterr().out
    assert f"hint: {hint} 1)" in (tmp_path / "out/report.txt").read_text()
    table.write_text(f"path,text,split\n{wav},go,train\n{wav},on,train\n")
    assert prepare(table, tmp_path / "named", *copied, "--language=tr") == 0
    assert "without one" not in capsys.readouterr().out
    # Texts without tags need no language.
    assert prepare(table, tmp_path / "plain") == 0
    assert "without one" not in capsys.readouterr().out


def test_bytes_as_tokens_lead_to_byte_fallback(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare(wav.parent, tmp_path / "out", "--tokens", "bytes")
    assert "bytes is none of unigram, bpe, char, word: recipes of" in capsys.readouterr().err


def test_advice_about_a_vocabulary_is_new(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,text,language\n{wav},go,en\n{wav},stop,tr\n{wav},on,fr\n")
    options = ("--tokens=bpe", "--vocab-size=262", "--byte-fallback", "--language-tags")
    assert prepare(table, tmp_path / "out", *options) == 1
    error = capsys.readouterr().err
    assert "change --vocab-size or --tokens" in error
    assert "add --byte-fallback" not in error


def test_source_without_training_names_its_splits(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,text,split\n{wav},go,test\n{wav},stop,dev\n{wav},on,test\n")
    assert prepare(table, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "no train utterances are left: only those of dev and test; " in error
    assert "add --only-test and --tokenizer-from" in error


def test_printed_train_command_is_quoted_and_progress_is_complete(
    tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "my [de] table.tsv"
    table.write_text("".join(f"{wav}\t{text_of(i)}\n" for i in range(6)))
    assert prepare(table, tmp_path / "my [de] data") == 0
    shown = capsys.readouterr().out
    assert "6 of 6" in shown
    assert f"train --config own 'data.path={tmp_path}/my [de] data'" in shown
    assert f"{table}: table" in shown
