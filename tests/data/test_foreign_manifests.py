"""`prepare own` on the manifests of NeMo, SpeechBrain, Hugging Face, LJSpeech and lhotse as they
are."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.supervision import AlignmentItem
from lhotse.utils import fastcopy

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import read_cuts
from pruned_rnnt.data.input.speech_dataset import aligned_words
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.own_sources import open_source
from tests.data.own_corpus import COUNT, all_texts, left_out, path_of, prepare, write_mixed_audio
from tests.data.recorded_speech import text_of, write_audio

TEXTS = Counter(text_of(i) for i in range(COUNT))


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_audio(tmp_path_factory.mktemp("audio"))


def write_lines(path: Path, items: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def entries_of(path: Path, **options: Path) -> list[CorpusEntry]:
    return list(open_source(path, **options)[1])


def refusal(capsys: pytest.CaptureFixture[str], source: Path, *options: str) -> str:
    output = source.parent / "out"
    assert pruned_rnnt(["prepare", "own", str(source), "--output", str(output), *options]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not output.exists()
    return error


# --- NeMo ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["manifest.json", "manifest.jsonl"])
def test_nemo_manifest(audio: Path, tmp_path: Path, name: str) -> None:
    items: list[dict[str, Any]] = [
        {
            "audio_filepath": str(path_of(audio, i)),
            "duration": round(0.5 + 0.053 * i, 2),
            "text": text_of(i),
        }
        for i in range(COUNT)
    ]
    write_audio(tmp_path / "long.wav", 3.0)
    part = {"audio_filepath": "long.wav", "offset": 0.5, "duration": 1.25, "text": "part"}
    spoilt: list[dict[str, Any]] = [
        {**part, "duration": 2.75},
        {**part, "offset": "0.5"},
        {**part, "offset": -1},
        {"duration": 1.0, "text": "no path"},
        {**part, "audio_filepath": "gone.wav"},
        {**part, "text": ["a"]},
        {**part, "text": None},
    ]
    source = write_lines(tmp_path / name, [*items, part, *spoilt])
    folder = prepare(source, tmp_path / "out", "--dev-share", "0", "--test-share", "0")
    cuts = {cut_text(cut): cut for cut in folder.cuts("train")}
    assert Counter(all_texts(folder).values()) == TEXTS + Counter(["part"])
    assert (cuts["part"].start, cuts["part"].duration) == (0.5, 1.25)
    reasons = [
        "segment ends after its recording",
        "offset is not a number of seconds >= 0",
        "offset is not a number of seconds >= 0",
        "line without a path (audio_filepath or file_name)",
        "audio file not found",
        "text is not a string",
        "empty text",
    ]
    first = COUNT + 2
    assert left_out(folder) == {f"{name}:{first + i}": reason for i, reason in enumerate(reasons)}


def test_error_names_bad_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "manifest.json"
    source.write_text('{"audio_filepath": "a.wav", "text": "a"}\n\n{"audio_filepath": "b.w\n')
    assert 'manifest.json:3 is not a JSON object: \'{"audio_filepath"' in refusal(capsys, source)
    for text in ('{\n  "a": {"wav": "a.wav"}\n}\n', '{"a": {"wav": "a.wav"}, "b": {}}', "[]"):
        source.write_text(text)
        error = refusal(capsys, source)
        assert "manifest.json:1 is not the JSON object of one utterance or recording" in error
        assert (
            "convert it: to SpeechBrain's csv, or to lines with audio_filepath, text and" in error
        )


# --- SpeechBrain ---------------------------------------------------------------------------------
def speechbrain_table(folder: Path, audio: Path, root: str = "$data_root") -> Path:
    rows = [
        f'utt{i},{0.5 + 0.053 * i:.2f},{root}/{path_of(audio, i).name},spk{i % 2}, "{text_of(i)}"'
        for i in range(COUNT)
    ]
    folder.mkdir(exist_ok=True)
    table = folder / "train.csv"
    table.write_text("\n".join(["ID,duration,wav,spk_id,wrd", *rows, ""]))
    return table


def test_speechbrain_table(audio: Path, tmp_path: Path) -> None:
    table = speechbrain_table(tmp_path, audio)
    folder = prepare(table, tmp_path / "out", "--data-root", str(audio))
    assert all_texts(folder) == {f"utt{i}": text_of(i) for i in range(COUNT)}
    speakers = {
        cut.id: cut.supervisions[0].speaker
        for split in folder.splits()
        for cut in folder.cuts(split)
    }
    assert speakers == {f"utt{i}": f"spk{i % 2}" for i in range(COUNT)}


def test_speechbrain_variables_need_the_data_root(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = speechbrain_table(tmp_path, audio, "$data_folder")
    error = refusal(capsys, table)
    assert f"{table}:2: the path $data_folder/u0.flac begins with a variable" in error
    assert "add --data-root DIR with the folder that replaces $data_folder" in error
    assert "no folder for --data-root" in refusal(capsys, table, "--data-root", str(table))
    assert entries_of(speechbrain_table(tmp_path, audio, "x"))[0].audio == f"{tmp_path}/x/u0.flac"


def test_speechbrain_segments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "train.csv"
    table.write_text("ID,duration,wav,start,stop,wrd\na,1.0,a.wav,0,16000,hello\n")
    assert f"{table}:1: the columns `start` and `stop`" in refusal(capsys, table)


@pytest.mark.parametrize("columns", [("start", "end"), ("Offset", "duration"), ("begin", "stop")])
def test_tables_of_parts_are_refused(tmp_path: Path, columns: tuple[str, str]) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,{','.join(columns)},text\na.wav,0,1,hello\na.wav,1,2,you\n")
    with pytest.raises(ValueError, match=r"csv:3: a.wav is in an earlier row too, with another"):
        entries_of(table)


@pytest.mark.parametrize("columns", ["begin_time,end_time", "start_time,duration", "offset,end"])
def test_rows_of_whole_files_may_say_where_they_were_cut(tmp_path: Path, columns: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,{columns},text\na.wav,1.5,3,hello\nb.wav,3,9,you\na.wav,1.5,3,hi\n")
    assert [(e.text, e.start, e.duration) for e in entries_of(table)] == [
        ("hello", 0, None), ("you", 0, None), ("hi", 0, None),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["audio_filepath", "path"])
def test_json_lines_of_parts(tmp_path: Path, path: str) -> None:
    item = {path: "a.wav", "text": "hello", "start": None}
    manifest = tmp_path / "a.jsonl"
    write_lines(manifest, [{**item, "offset": 3, "duration": 1}, {**item, "offset": 4.5}])
    assert [(e.start, e.duration) for e in entries_of(manifest)] == [(3, 1), (4.5, None)]
    for part in ({"start": 3, "end": 5}, {"start": 3, "duration": 2}, {"offset": 3, "end": 5}):
        begin, end = part
        write_lines(manifest, [item, {**item, **part}])
        assert len(entries_of(manifest)) == 2
        write_lines(manifest, [{**item, **part}, {**item, **part, begin: 4}])
        with pytest.raises(ValueError, match=f"a.jsonl:2: .* the keys `{begin}` and `{end}` sel"):
            entries_of(manifest)
    others = {"start": 3.0, "end": 5.0, "start_time": "2024-01-05"}
    lines = [{**item, **others, "offset": n, "duration": 2, "start": n} for n in range(2)]
    write_lines(manifest, lines)
    assert [(e.start, e.duration) for e in entries_of(manifest)] == [(0, 2), (1, 2)]


# --- Hugging Face --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
@pytest.mark.parametrize("text", ["transcription", "text", "sentence"])
def test_hugging_face_folder(audio: Path, tmp_path: Path, name: str, text: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "validation"):
        (source / split).symlink_to(audio)
    items = [
        {"file_name": f"{'validation' if i < 3 else 'train'}/{path_of(audio, i).name}",
         "duration": 9.0, text: text_of(i)} for i in range(COUNT)
    ]  # fmt: skip
    if name == "metadata.jsonl":
        write_lines(source / name, items)
    else:
        rows = [",".join(items[0]), *(",".join(map(str, item.values())) for item in items)]
        (source / name).write_text("\n".join(rows))
    folder = prepare(source, tmp_path / "out")
    assert Counter(all_texts(folder).values()) == TEXTS
    assert folder.splits() == ["dev", "train"]
    assert len(folder.cuts("dev")) == 3
    assert [e.split for e in entries_of(source / name)] == ["validation"] * 3 + ["train"] * 9


def test_hugging_face_folders_of_splits(audio: Path, tmp_path: Path) -> None:
    for split, chosen in (("train", range(6)), ("test", range(6, 8)), ("notes", range(8, 9))):
        items = [{"file_name": str(path_of(audio, i)), "transcription": text_of(i)} for i in chosen]
        write_lines(tmp_path / split / "metadata.jsonl", items)
    found = entries_of(tmp_path)
    assert Counter(entry.split for entry in found) == {"train": 6, "test": 2}
    assert len({entry.id for entry in found}) == 8


@pytest.mark.parametrize("split", ["", "train"])
def test_audio_that_metadata_do_not_list_is_left_out(tmp_path: Path, split: str) -> None:
    for name in ("a.wav", "b/c.wav", "d.wav"):
        write_audio(tmp_path / split / name)
    (tmp_path / split / "metadata.csv").write_text("file_name,text\n./a.wav,go\nb/../d.wav,on\n")
    found = [(e.origin.rpartition("/")[2], e.problem) for e in entries_of(tmp_path)]
    assert found == [
        ("metadata.csv:2", ""),
        ("metadata.csv:3", ""),
        ("c.wav", "audio file that metadata.csv does not list"),
    ]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, r"/dev has audio, but no metadata\.csv or metadata\.jsonl that lists it"),
        ("a.wav,hello\n", r"/dev has audio, but no metadata\.csv or metadata\.jsonl"),
        ("file_name,text,text\n", r"dev/metadata\.csv:1: 2 columns have the name `text`"),
        ("\ufefffile_name,text\n", r"dev/metadata\.csv is UTF-16: save it as UTF-8"),
    ],
)
def test_a_split_whose_metadata_cannot_be_used_is_an_error(
    tmp_path: Path, metadata: str | None, message: str
) -> None:
    for split in ("train", "dev"):
        write_audio(tmp_path / split / "a.wav")
    (tmp_path / "train/metadata.csv").write_text("file_name,text\na.wav,hello\n")
    if metadata is not None:
        encoding = "utf-16-le" if metadata.startswith("\ufeff") else "utf-8"
        (tmp_path / "dev/metadata.csv").write_text(metadata, encoding=encoding)
    with pytest.raises(ValueError, match=message):
        entries_of(tmp_path)


def test_a_test_split_without_texts_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("train", "test", "tr"):
        write_audio(tmp_path / folder / "a.wav")
    (tmp_path / "train/metadata.csv").write_text("file_name,text\na.wav,hello\n")
    (tmp_path / "test/metadata.csv").write_text("file_name\na.wav\n")
    with caplog.at_level(logging.WARNING):
        logging.getLogger("pruned_rnnt").propagate = True
        assert [entry.split for entry in entries_of(tmp_path)] == ["train"]
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/test has audio, but no metadata.csv")
    assert message.endswith("it is left out")


def test_unrelated_metadata_file_is_ignored(audio: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav").with_suffix(".txt").write_text("hello")
    for content in ("recorded with,Zoom H4\n", "camera\n", ""):
        (tmp_path / "metadata.csv").write_text(content)
        assert [(e.id, e.text) for e in entries_of(tmp_path)] == [("a", "hello")]


# --- LJSpeech ------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", ["folder", "table"])
def test_ljspeech(audio: Path, tmp_path: Path, given: str) -> None:
    source = tmp_path / "LJSpeech-1.1"
    source.mkdir()
    (source / "wavs").symlink_to(audio)
    lines = [f'u{i}|Dr. "Who, {i}|{text_of(i)}' for i in range(COUNT)]
    lines[3] = f"u3|{text_of(3)}|"
    lines[4] = f"u4|{text_of(4)}"
    lines[5] = f"u5|5|{text_of(5)}| "
    lines += ["gone|a|a", "u0", "|text", "u1|x|y", "u2|a|b|c"]
    table = source / "metadata.csv"
    table.write_text("\n".join(lines) + "\n")
    folder = prepare(source if given == "folder" else table, tmp_path / "out")
    assert all_texts(folder) == {f"u{i}": text_of(i) for i in range(COUNT)}
    assert left_out(folder) == {
        f"metadata.csv:{COUNT + 1}": "audio file not found",
        f"metadata.csv:{COUNT + 2}": "line is not `id|text` or `id|text|normalised text`",
        f"metadata.csv:{COUNT + 3}": "line without an id",
        f"metadata.csv:{COUNT + 4}": "second entry of the same id",
        f"metadata.csv:{COUNT + 5}": "line is not `id|text` or `id|text|normalised text`",
    }


# --- lhotse --------------------------------------------------------------------------------------
# Start in the recording, duration, and the first word's start in the utterance, in seconds.
PARTS = {"go now": (2.6, 1.0, 0.3), "stop now": (3.7, 1.2, 0.25), "yes yes": (5.1, 0.8, 0.1)}


def spoken_supervision(text: str, start: float, origin: float) -> SupervisionSegment:
    """A part of the recording "long": starts in it and, from another origin, of its words."""
    _, duration, first = PARTS[text]
    words = [
        AlignmentItem(word, origin + first + 0.2 * i, 0.15, 0.5)
        for i, word in enumerate(text.split())
    ]
    name = text.replace(" ", "-")
    return SupervisionSegment(
        name, "long", start, duration, text=text, alignment={"word": words, "phone": []}
    )


def lhotse_source(folder: Path, kind: str) -> tuple[Path, list[str]]:
    recording = Recording.from_file(write_audio(folder / "long.wav", 6.0))
    supervisions = [spoken_supervision(text, part[0], part[0]) for text, part in PARTS.items()]
    source = folder / "source.jsonl"
    if kind in ("recordings", "relative to the supervision"):
        if kind != "recordings":
            supervisions = [spoken_supervision(text, x[0], 0.0) for text, x in PARTS.items()]
        RecordingSet.from_recordings([recording]).to_file(source)
        SupervisionSet.from_segments(supervisions).to_file(folder / "s.jsonl")
        return source, ["--supervisions", str(folder / "s.jsonl")]
    cut = fastcopy(recording.to_cut(), supervisions=supervisions)
    cuts = {
        "several": [cut],
        "several within": [cut.truncate(offset=2.5)],
        "trimmed": cut.trim_to_supervisions(),
        "trimmed, faster": [each.perturb_speed(1.1) for each in cut.trim_to_supervisions()],
        "relative to the cut": [
            fastcopy(
                cut.truncate(offset=start, duration=duration),
                id=text,
                supervisions=[spoken_supervision(text, 0.0, 0.0)],
            )
            for text, (start, duration, _) in PARTS.items()
        ],
    }[kind]
    CutSet.from_cuts(cuts).to_file(source)
    return source, []


@pytest.mark.parametrize("options", [[], ["--shar"]])
@pytest.mark.parametrize(
    "kind",
    [
        "recordings",
        "several",
        "several within",
        "trimmed",
        "trimmed, faster",
        "relative to the cut",
        "relative to the supervision",
    ],
)
def test_word_times_are_relative_to_the_utterance(
    tmp_path: Path, kind: str, options: list[str]
) -> None:
    source, more = lhotse_source(tmp_path, kind)
    options = [*options, *more, "--speeds", "0.8", "--dev-share", "0", "--test-share", "0"]
    folder = prepare(source, tmp_path / "out", *options)
    found = {}
    for cut in folder.cuts("train"):
        speed = PARTS[cut_text(cut)][1] / cut.duration
        words = aligned_words(cut)
        assert [word.word for word in words] == cut_text(cut).split()
        times = [round(speed * x, 2) for word in words for x in (word.start, word.duration)]
        found[cut_text(cut), round(speed, 2)] = times
    speeds = [1.1, 0.88] if kind == "trimmed, faster" else [1.0, 0.8]
    assert found == {
        (text, speed): [first, 0.15, round(first + 0.2, 2), 0.15]
        for text, (_, _, first) in PARTS.items()
        for speed in speeds
    }
    assert "word times" not in (tmp_path / "out" / "report.txt").read_text()


def test_word_times_of_unknown_origin_are_dropped(tmp_path: Path) -> None:
    whole = Recording.from_file(write_audio(tmp_path / "long.wav", 4.0)).to_cut()
    cuts = []
    for index, (start, word) in enumerate([(0.1, 0.2), (2.0, 1.1), (2.0, 3.1), (0.0, "soon")]):
        item = AlignmentItem("go", word, 0.1)
        supervision = SupervisionSegment(f"s{index}", "long", 0.0, 1.0, text="go")
        supervision = supervision.with_alignment("word", [item])
        cut = whole.truncate(offset=start, duration=1.0)
        cuts.append(fastcopy(cut, id=f"c{index}", supervisions=[supervision]))
    source = tmp_path / "cuts.jsonl"
    CutSet.from_cuts(cuts).to_file(source)
    folder = prepare(source, tmp_path / "out", "--dev-share", "0", "--test-share", "0")
    prepared = list(folder.cuts("train"))
    assert all_texts(folder) == dict.fromkeys(["c0", "c1", "c2", "c3"], "go")
    assert [cut.supervisions[0].alignment for cut in prepared] == [None] * 4
    report = (folder.path / "report.txt").read_text()
    outside = "3 utterances lost their word times, which lie outside the utterance (the first: "
    assert f"{outside}{source}:2)" in report
    assert "1 utterance lost their word times, which may be relative to the recording or" in report


@pytest.mark.parametrize("origin", ["recording", "cut"])
def test_unclear_origins_are_those_of_the_other_utterances(tmp_path: Path, origin: str) -> None:
    """Of a cut near the start of its recording, times fit both ways."""
    whole = Recording.from_file(write_audio(tmp_path / "long.wav", 9.0)).to_cut()
    cuts = []
    for index, start in enumerate([0.03, 0.4, 5.0, 6.0]):
        zero = start if origin == "recording" else 0.0
        items = [AlignmentItem("go", round(zero + 0.7, 2), 0.1)]
        supervision = SupervisionSegment(f"s{index}", "long", 0.2, 1.3, text="go")
        supervision = supervision.with_alignment("word", items)
        cut = whole.truncate(offset=start, duration=1.5)
        cuts.append(fastcopy(cut, id=f"c{index}", supervisions=[supervision]))
    CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl")
    options = ["--dev-share", "0", "--test-share", "0"]
    folder = prepare(tmp_path / "cuts.jsonl", tmp_path / "out", *options)
    found = [[word.start for word in aligned_words(cut)] for cut in folder.cuts("train")]
    assert found == [[0.5]] * 4


def test_words_at_the_end_of_a_recording_are_clamped(tmp_path: Path) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "a.wav", 2.0))
    words = [AlignmentItem("go", 0.5, 0.3), AlignmentItem("now", 1.8, 0.4)]
    supervision = SupervisionSegment("s", recording.id, 0.0, 2.0, text="go now")
    supervision = supervision.with_alignment("word", [*words, AlignmentItem("late", 2.5, 0.1)])
    RecordingSet.from_recordings([recording]).to_file(tmp_path / "r.jsonl")
    SupervisionSet.from_segments([supervision]).to_file(tmp_path / "s.jsonl")
    options = ["--supervisions", str(tmp_path / "s.jsonl"), "--dev-share=0", "--test-share=0"]
    folder = prepare(tmp_path / "r.jsonl", tmp_path / "out", *options)
    (cut,) = folder.cuts("train")
    words = [(word.word, word.start, word.duration) for word in aligned_words(cut)]
    assert words == [("go", 0.5, 0.3), ("now", 1.8, 0.2)]
    assert "1 utterance lost some of their word times" in (folder.path / "report.txt").read_text()


def test_words_of_supervisions_in_cuts_of_whole_recordings(tmp_path: Path) -> None:
    """Relative to the supervision, as lhotse's recipe oto_speech writes them."""
    whole = Recording.from_file(write_audio(tmp_path / "long.wav", 9.0)).to_cut()
    supervisions = [
        SupervisionSegment(f"s{start}", "long", start, 1.5, text="go").with_alignment(
            "word", [AlignmentItem("go", 0.5, 0.1)]
        )
        for start in (0.0, 2.0, 6.0)
    ]
    CutSet.from_cuts([fastcopy(whole, supervisions=supervisions)]).to_file(tmp_path / "c.jsonl")
    folder = prepare(tmp_path / "c.jsonl", tmp_path / "out", "--dev-share=0", "--test-share=0")
    found = [[word.start for word in aligned_words(cut)] for cut in folder.cuts("train")]
    assert found == [[0.5]] * 3


def test_cuts_of_lhotse_in_a_folder_of_data_have_relative_word_times(tmp_path: Path) -> None:
    source, _ = lhotse_source(tmp_path, "trimmed")
    for cut in read_cuts(source):
        first = PARTS[cut_text(cut)][2]
        assert [word.start for word in aligned_words(cut)] == [first, round(first + 0.2, 2)]
        elsewhere = fastcopy(cut, start=0.0)
        assert aligned_words(elsewhere) == ()
        late = fastcopy(cut.supervisions[0], alignment={"word": [AlignmentItem("go", 0.2, 9.0)]})
        assert len(aligned_words(fastcopy(cut, supervisions=[late]))) == 1
