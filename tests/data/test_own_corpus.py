"""`prepare own`: four shapes of source, what is left out and why, splits, and training on it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig, cut_text
from tests.data.own_corpus import COUNT, all_texts, left_out, path_of, prepare, write_mixed_audio
from tests.data.recorded_speech import TEXTS, text_of, truncate, write_audio
from tests.data.spoken_corpus import noise


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_audio(tmp_path_factory.mktemp("audio"))


def test_folder_with_every_kind_of_bad_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for index in range(COUNT):
        path = write_audio(source / f"s{index % 2}" / f"u{index}.wav")
        path.with_suffix(".txt").write_text(text_of(index) + "\n")
    write_audio(source / "no_text.wav")
    spoilt = {
        "empty_text.wav": "empty text",
        "truncated.wav": "truncated: fewer samples than the header says",
        "foreign.wav": "audio cannot be read",
        "empty.wav": "empty audio file",
        "silent.wav": "silent: every sample is zero",
        "short.wav": "shorter than 0.1 s",
        "long.wav": "longer than 2.0 s",
        "slow.wav": "sampling rate below 8000 Hz",
        "nan.wav": "samples that are infinite or NaN",
        "latin.wav": "text is not UTF-8",
        "u0.flac": "second audio file of the same stem",
    }
    for name in spoilt:
        write_audio(source / name).with_suffix(".txt").write_text("some text")
    (source / "u0.wav").write_bytes((source / "u0.flac").read_bytes())
    del spoilt["u0.flac"]
    (source / "empty_text.txt").write_text(" \n")
    (source / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    truncate(source / "truncated.wav")
    (source / "foreign.wav").write_text("this is no audio")
    (source / "empty.wav").write_bytes(b"")
    soundfile.write(source / "silent.wav", np.zeros(16000), 16000)
    soundfile.write(source / "short.wav", noise(0.05), 16000)
    soundfile.write(source / "long.wav", noise(2.5), 16000)
    soundfile.write(source / "slow.wav", noise(0.5), 6000)
    soundfile.write(source / "nan.wav", np.full(16000, np.nan), 16000, subtype="FLOAT")
    folder = prepare(source, tmp_path / "out", "--max-duration", "2")
    expected = {name.replace(".wav", ".txt"): reason for name, reason in spoilt.items()}
    expected["no_text.txt"] = "no text file next to the audio"
    expected["u0.txt"] = "second audio file of the same stem"
    assert left_out(folder) == expected
    # The flac came first; the file of other content was the second.
    assert Counter(all_texts(folder).values()) == Counter(
        [text_of(index) for index in range(COUNT)] + ["some text"]
    )
    report = (folder.path / "report.txt").read_text()
    assert "no_text.txt: no text file next to the audio" in report
    assert "foreign.txt: audio cannot be read" in report
    assert "Format not recognised" in report
    assert "LATIN SMALL LETTER U" in report
    assert folder.report()["skipped_counts"] == dict(Counter(expected.values()))


def test_stored_features_match_the_audio(audio: Path, tmp_path: Path) -> None:
    from pruned_rnnt.data.audio.audio_file import read_audio
    from pruned_rnnt.data.audio.features import audio_features

    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(COUNT)))
    folder = prepare(table, tmp_path / "out")
    assert len(all_texts(folder)) == COUNT
    for split in folder.splits():
        for cut in folder.cuts(split):
            wanted = audio_features(read_audio(cut.recording.sources[0].source)).numpy()
            stored = cut.load_features()
            assert abs(len(stored) - len(wanted)) <= 1
            frames = min(len(stored), len(wanted)) - 2
            assert np.abs(stored[:frames] - wanted[:frames]).max() < 0.1


@pytest.mark.parametrize("kind", ["tsv", "csv", "tsv header", "csv header"])
def test_tables(audio: Path, tmp_path: Path, kind: str) -> None:
    suffix, _, header = kind.partition(" ")
    comma = "," if suffix == "csv" else "\t"
    table = audio / f"table.{suffix}"
    rows = [[path_of(audio, i).name, text_of(i)] for i in range(COUNT)]
    rows += [["missing.wav", "some text"], ["u1.wav", ""]]
    if header:
        rows = [["anna", row[1], row[0]] for row in rows]
        rows.insert(0, ["Speaker", "sentence", "path"])
    table.write_text("\ufeff" + "".join(comma.join(row) + "\r\n" for row in rows))
    folder = prepare(table, tmp_path / "out")
    first = 2 if header else 1
    assert left_out(folder) == {
        f"{table.name}:{COUNT + first}": "audio file not found",
        f"{table.name}:{COUNT + first + 1}": "empty text",
    }
    assert Counter(all_texts(folder).values()) == Counter(text_of(i) for i in range(COUNT))


def test_a_table_of_one_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("a.wav hello\n")
    assert pruned_rnnt(["prepare", "own", str(table), "--output", str(tmp_path / "out")]) == 1
    assert "table.tsv:1: needs path and text separated by tabs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_error_for_empty_train_split_lists_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("a.wav\thello\nb.wav\tyou\n")
    assert pruned_rnnt(["prepare", "own", str(table), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "no train utterances are left" in error
    assert "audio file not found" in error


def test_kaldi_directory(audio: Path, tmp_path: Path) -> None:
    source = tmp_path / "kaldi"
    source.mkdir()
    long = write_audio(tmp_path / "long.wav", 3.0)
    scp = [f"rec1 {long}", f"rec2 cat {path_of(audio, 1)} |", "rec3 false |", "rec4 gone.wav"]
    (source / "wav.scp").write_text("\n".join(scp) + "\n")
    segments = {
        "a-1": "rec1 0.5 1.5", "a-2": "rec1 2.0 -1", "b-1": "rec2 0 0.3", "c-1": "rec3 0 1",
        "d-1": "rec4 0 1", "e-1": "rec1 2.5 9.5", "f-1": "rec9 0 1", "g-1": "rec1 one two",
    }  # fmt: skip
    (source / "segments").write_text("".join(f"{k} {v}\n" for k, v in segments.items()))
    (source / "text").write_text("".join(f"{key} HELLO YOU\n" for key in segments) + "h-1 NO\n")
    (source / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in segments))
    all_train = ("--dev-share", "0", "--test-share", "0")
    folder = prepare(source, tmp_path / "out", *all_train, "--allow-commands")
    cuts = {cut.id: cut for cut in folder.cuts("train")}
    assert {key: (cut.start, cut.duration) for key, cut in cuts.items()} == {
        "a-1": (0.5, 1.0), "a-2": (2.0, 1.0), "b-1": (0.0, 0.3),
    }  # fmt: skip
    assert [cut.supervisions[0].speaker for cut in cuts.values()] == ["a", "a", "b"]
    assert left_out(folder) == {
        "text:4": "command of wav.scp failed",
        "text:5": "audio file not found",
        "text:6": "segment ends after its recording",
        "text:7": "not in wav.scp",
        "segments:8": "line of segments is not `utterance recording start end`",
        "text:9": "not in segments",
    }
    samples_S = soundfile.read(long)[0]
    part_S = cuts["a-1"].load_audio()[0]
    assert np.abs(part_S - samples_S[8000:24000]).max() < 1e-4


@pytest.mark.parametrize("kind", ["cuts", "recordings"])
def test_lhotse_manifests(audio: Path, tmp_path: Path, kind: str) -> None:
    recordings = [Recording.from_file(path_of(audio, i)) for i in range(COUNT)]
    supervisions = [
        SupervisionSegment(f"x{i}", r.id, 0.0, r.duration, text=text_of(i))
        for i, r in enumerate(recordings)
    ]
    supervisions.append(SupervisionSegment("part", "u9", 0.25, 0.5, text="stop", speaker="a"))
    options: list[str] = []
    if kind == "recordings":
        source = tmp_path / "recordings.jsonl.gz"
        RecordingSet.from_recordings(recordings).to_file(source)
        SupervisionSet.from_segments(supervisions).to_file(tmp_path / "supervisions.jsonl")
        options = ["--supervisions", str(tmp_path / "supervisions.jsonl")]
    else:
        source = tmp_path / "cuts.jsonl"
        CutSet.from_manifests(
            RecordingSet.from_recordings(recordings), SupervisionSet.from_segments(supervisions)
        ).to_file(source)
    folder = prepare(source, tmp_path / "out", *options)
    texts = Counter([text_of(i) for i in range(COUNT)] + ["stop"])
    assert Counter(all_texts(folder).values()) == texts
    (part,) = [
        cut for split in folder.splits() for cut in folder.cuts(split) if cut_text(cut) == "stop"
    ]
    assert (part.start, part.duration) == (0.25, 0.5)
    assert abs(len(part.load_features()) - 50) <= 1


def test_supervisions_without_recordings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "supervisions.jsonl"
    SupervisionSet.from_segments([SupervisionSegment("a", "r", 0, 1, text="x")]).to_file(source)
    assert pruned_rnnt(["prepare", "own", str(source), "--output", str(tmp_path / "out")]) == 1
    assert "supervisions.jsonl:1 is a SupervisionSegment: needs cuts" in capsys.readouterr().err


def test_texts_are_normalised(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(f"{path_of(audio, 0)}\tDon\u2019t  \u201cSTOP\u201d, 'e\u0301cole'!\n")
    options = ["--case", "lower", "--punctuation", "remove", "--dev-share", "0"]
    folder = prepare(table, tmp_path / "out", *options, "--test-share", "0")
    assert list(all_texts(folder).values()) == ["don't stop \u00e9cole"]


def test_length_of_training_is_suggested_for_the_hours_with_all_speeds(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{path_of(audio, index)}\tyes\n" for index in range(4)))
    everything = ["--dev-share", "0", "--test-share", "0"]
    folder = prepare(table, tmp_path / "out", *everything, "--speeds", "0.9")
    hours = sum(cut.duration for cut in folder.cuts("train")) / 3600
    assert len(folder.cuts("train")) == 8
    shown = capsys.readouterr().out
    assert f"Settings for {hours:.3g} hours on one GPU: data.max_duration=60 " in shown
    prepare(table, tmp_path / "test", "--only-test", "--tokenizer-from", str(folder.path))
    assert "Settings for" not in capsys.readouterr().out


def test_hints_about_texts_and_tokens(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    texts = ["Yes, please", "not today", "who's calling?"] * 4
    table = tmp_path / "table.tsv"
    lines = (f"{path_of(audio, index)}\t{text}\n" for index, text in enumerate(texts))
    table.write_text("".join(lines))
    everything = ["--dev-share", "0", "--test-share", "0"]
    folder = prepare(table, tmp_path / "out", "--tokens", "bpe", *everything)
    shown = capsys.readouterr().out
    case, punctuation, tokens = (line for line in shown.splitlines() if line.startswith("Hint: "))
    assert "upper-case (4) and lower-case (" in case
    assert "--case lower" in case
    assert "(, ?; " in punctuation or "(? ,; " in punctuation
    assert "--punctuation remove" in punctuation
    assert f"found {len(folder.tokenizer())} tokens, not the 500 of --vocab-size" in tokens
    report = (folder.path / "report.txt").read_text()
    assert all(f"hint: {hint.removeprefix('Hint: ')}\n" in report for hint in (case, tokens))
    prepare(table, tmp_path / "out2", "--case", "lower", "--punctuation", "remove", *everything)
    assert "Hint:" not in capsys.readouterr().out


@pytest.mark.slow
def test_many_shards_in_two_processes_are_the_same_corpus(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    rows = [f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(COUNT)]
    table.write_text("".join(rows) + "gone.wav\thello\n")
    whole = prepare(table, tmp_path / "whole")
    parts = prepare(table, tmp_path / "parts", "--shard-size", "3", "--num-jobs", "2")
    assert left_out(parts) == left_out(whole)
    assert whole.splits() == parts.splits() == ["dev", "test", "train"]
    for split in whole.splits():
        ours, theirs = whole.cuts(split), parts.cuts(split)
        assert [cut.id for cut in ours] == [cut.id for cut in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert np.array_equal(one.load_features(), other.load_features())
    assert whole.tokenizer().symbols == parts.tokenizer().symbols


def test_speeds_and_waveforms_train(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{path_of(audio, i)}\tgo {TEXTS[1]}\n" for i in range(COUNT)))
    faster = prepare(table, tmp_path / "out", "--speeds", "0.9,1.23")
    assert len(faster.cuts("train")) == 3 * (COUNT - 2)
    assert len(faster.cuts("dev")) == 1
    report = faster.report()["splits"]["train"]
    assert report["utterances"] == COUNT - 2
    waves = prepare(table, tmp_path / "waves", "--features", "waveform")
    for folder, features in ((faster, "stored"), (waves, "waveform")):
        # The voices are noise: any text may be said in any time.
        filters = FilterConfig(subsampling_factor=1)
        data = DataModule(
            DataConfig(path=str(folder.path), features=features, num_workers=0, filters=filters)
        )
        batches = list(data.train_loader())
        assert sum(len(batch) for batch in batches) == len(folder.cuts("train"))
        assert len(batches) > 0
        assert all(batch.features_NTF.isfinite().all() for batch in batches)


@pytest.mark.parametrize("speeds", ["0.9,0.9", "0.955", "1.004"])
def test_speeds_that_would_be_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], speeds: str
) -> None:
    assert pruned_rnnt(["prepare", "own", str(tmp_path), "--speeds", speeds]) == 1
    assert "differ from each other and have at most two decimals" in capsys.readouterr().err


def test_texts_for_a_language_model_are_not_those_of_copies(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(COUNT)))
    folder = prepare(table, tmp_path / "out", "--speeds", "0.9,1.1")
    assert len(folder.cuts("train")) == 30
    output = tmp_path / "lm"
    assert pruned_rnnt(["prepare", "lm", str(folder.path), "--output", str(output)]) == 0
    counts = json.loads((output / "prepare.json").read_text())["splits"]
    assert {split: count["texts"] for split, count in counts.items()} == {"train": 10, "dev": 1}
