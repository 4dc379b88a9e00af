"""The fsdd recipe on recordings made by the test: splits, bad files, held-out speakers."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from pruned_rnnt.recipes.fsdd import recordings as recordings_module
from pruned_rnnt.recipes.fsdd.connected import DigitPool, Variation, draw_utterance
from pruned_rnnt.recipes.fsdd.recordings import (
    DIGITS,
    Recording,
    download,
    missing_recordings,
    read_recordings,
)
from pruned_rnnt.recipes.fsdd.splits import split_recordings

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder

SPEAKERS = ("ann", "bob", "cid")
INDICES = (0, 4, 5, 7, 8, 9)
SMALL = ["--train", "12", "--dev", "3", "--test", "6", "--num-jobs", "1"]


def tone(digit: int, speaker: int, index: int) -> np.ndarray:
    """A pitch that tells digit and speaker; some noise that tells the take."""
    time = np.arange(800 + 40 * digit) / 8000
    rng = np.random.default_rng(index)
    sound = 0.3 * np.sin(2 * np.pi * (300 + 200 * digit + 50 * speaker) * time)
    return (sound + 0.003 * rng.standard_normal(time.size)).astype(np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdd") / "recordings"
    folder.mkdir()
    for number, speaker in enumerate(SPEAKERS):
        for digit in range(10):
            for index in INDICES:
                path = folder / f"{digit}_{speaker}_{index}.wav"
                soundfile.write(path, tone(digit, number, index), 8000, subtype="PCM_16")
    return folder.parent


def run(source: Path, output: Path, *options: str) -> PreparedFolder:
    command = ["prepare", "fsdd", "--source", str(source), "--output", str(output)]
    assert pruned_rnnt([*command, *SMALL, *options]) == 0
    return PreparedFolder(output)


def speakers(folder: PreparedFolder, split: str) -> set[str]:
    return {cut.supervisions[0].speaker for cut in folder.cuts(split)}


def test_prepare(source: Path, tmp_path: Path) -> None:
    folder = run(source, tmp_path / "data")
    for split, count in (("train", 12), ("dev", 3), ("test", 6)):
        cuts = folder.cuts(split)
        assert len(cuts) == count
        assert speakers(folder, split) == set(SPEAKERS)
        for cut in cuts:
            words = cut_text(cut).split()
            assert 3 <= len(words) <= 7
            assert set(words) <= set(DIGITS)
            assert cut.sampling_rate == 16000
            aligned = cut.supervisions[0].alignment["word"]
            assert [word.symbol for word in aligned] == words
    tokenizer = folder.tokenizer()
    assert len(tokenizer) == 13
    assert all(len(tokenizer.encode(digit)) == 1 for digit in DIGITS)


def test_word_times_match_the_tones(source: Path) -> None:
    recordings, _ = read_recordings(source)
    pool = DigitPool([r for r in recordings if r.speaker == "ann"])
    utterance = draw_utterance(pool, split="x", index=0, seed=1, variation=Variation())
    for word in utterance.words:
        begin = int((word.start + 0.02) * 16000)
        piece = utterance.samples_S[begin : begin + 1200]
        pitch = np.abs(np.fft.rfft(piece * np.hanning(1200), 16000)).argmax()
        assert abs(pitch - (300 + 200 * DIGITS.index(word.word))) < 15


def test_splits_share_no_recording(source: Path) -> None:
    recordings, _ = read_recordings(source)
    splits = split_recordings(recordings, ())
    keys = {s: {(r.speaker, r.digit, r.index) for r in rs} for s, rs in splits.items()}
    assert sum(map(len, keys.values())) == len(set.union(*keys.values())) == len(recordings)
    assert {index for *_, index in keys["test"]} == {0, 4}
    assert {index for *_, index in keys["dev"]} == {5, 7}
    assert {index for *_, index in keys["train"]} == {8, 9}


def test_held_out_speakers(source: Path, tmp_path: Path) -> None:
    folder = run(source, tmp_path / "data", "--test-speakers", "bob,cid")
    assert speakers(folder, "train") == speakers(folder, "dev") == {"ann"}
    assert speakers(folder, "test") == {"bob", "cid"}
    recordings, _ = read_recordings(source)
    test = split_recordings(recordings, ("bob", "cid"))["test"]
    assert len(test) == 2 * 10 * len(INDICES)


@pytest.mark.slow
def test_same_seed_same_corpus(source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path / "a", "--synthetic", "0.25", "--synthetic-speakers", "3")
    again = run(
        source,
        tmp_path / "b",
        *("--synthetic", "0.25", "--synthetic-speakers", "3", "--num-jobs", "2"),
    )
    other = run(source, tmp_path / "c", "--seed", "43")
    for split in ("train", "dev", "test"):
        pairs = zip(first.cuts(split), again.cuts(split), strict=True)
        for one, two in pairs:
            assert one.supervisions == two.supervisions
            assert np.array_equal(one.load_audio(), two.load_audio())
        assert [cut_text(c) for c in first.cuts(split)] != [cut_text(c) for c in other.cuts(split)]


@pytest.mark.slow
def test_synthetic_speakers_are_for_training_alone(source: Path, tmp_path: Path) -> None:
    options = ("--synthetic", "0.5", "--synthetic-speakers", "4", "--natural", "0.5")
    folder = run(source, tmp_path / "data", *options)
    names = [cut.supervisions[0].speaker for cut in folder.cuts("train")]
    assert len(names) == 12
    assert sum(name.startswith("espeak-") for name in names) == 6
    for split in ("dev", "test"):
        assert speakers(folder, split) <= set(SPEAKERS)


def test_only_test(source: Path, tmp_path: Path) -> None:
    base = run(source, tmp_path / "base", "--tokens", "char")
    folder = run(
        source, tmp_path / "other", "--only-test", "--tokenizer-from", str(tmp_path / "base")
    )
    assert folder.splits() == ["test"]
    assert folder.tokenizer().symbols == base.tokenizer().symbols
    assert speakers(folder, "test") == set(SPEAKERS)
    narrow = run(source, tmp_path / "narrow", "--only-test", "--indices", "0-4")
    assert narrow.report()["options"]["indices"] == "0-4"


BAD_FILES = {
    "hello.wav": "name is not",
    "12_ann_0.wav": "name is not",
    "3_ann_90.wav": "empty file",
    "3_ann_91.wav": "not a readable PCM wav file",
    "3_ann_92.wav": "sampling rate 16000 Hz, needs 8000 Hz",
    "3_ann_93.wav": "2 channels, needs one",
    "3_ann_94.wav": "shorter than 0.05 s",
    "3_ann_95.wav": "truncated",
    "3_ann_96.wav": "silent",
    "3_ann_97.wav": "not a readable PCM wav file",
}


def write_bad_files(folder: Path) -> None:
    good = tone(3, 0, 1)
    soundfile.write(folder / "hello.wav", good, 8000)
    soundfile.write(folder / "12_ann_0.wav", good, 8000)
    (folder / "3_ann_90.wav").touch()
    (folder / "3_ann_91.wav").write_text("this is no sound")
    soundfile.write(folder / "3_ann_92.wav", good, 16000)
    soundfile.write(folder / "3_ann_93.wav", np.stack([good, good], axis=1), 8000)
    soundfile.write(folder / "3_ann_94.wav", good[:100], 8000)
    soundfile.write(folder / "3_ann_95.wav", good, 8000)
    whole = (folder / "3_ann_95.wav").read_bytes()
    (folder / "3_ann_95.wav").write_bytes(whole[: len(whole) // 2])
    soundfile.write(folder / "3_ann_96.wav", np.zeros(1000), 8000)
    # The header alone, cut off.
    (folder / "3_ann_97.wav").write_bytes(whole[:20])
    (folder / "notes.txt").write_text("not a recording, and not meant to be one")


def test_bad_files_are_skipped_and_reported(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    for path in (source / "recordings").iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / "7_bob_8.wav").unlink()
    write_bad_files(folder)
    report = run(folder, tmp_path / "data").report()
    skipped = {Path(file["path"]).name: file["reason"] for file in report["skipped"]}
    assert skipped.keys() == BAD_FILES.keys()
    for name, reason in BAD_FILES.items():
        assert reason in skipped[name]
    assert sum(report["skipped_counts"].values()) == len(BAD_FILES)
    assert report["recordings"] == 10 * len(SPEAKERS) * len(INDICES) - 1
    assert report["missing"] == ["7_bob_8.wav"]
    shown = capsys.readouterr().out
    assert f"{len(BAD_FILES)} files skipped" in shown
    assert "12_ann_0.wav" in shown
    assert "pruned-rnnt train --config fsdd " in shown


@pytest.mark.parametrize(("tokens", "config"), [("word", "fsdd"), ("char", "fsdd_letters")])
def test_prepare_suggests_the_configuration_of_its_tokens(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: str, config: str
) -> None:
    run(source, tmp_path / "data", "--tokens", tokens)
    assert f"pruned-rnnt train --config {config} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "{empty}"], "no wav files in"),
        (["--source", "{source}", "--test-speakers", "zoe"], "no recordings of 'zoe'"),
        (["--source", "{source}", "--test-speakers", "ann,bob,cid"], "left for the train split"),
        (["--source", "{source}", "--train", "0"], "--train must be at least 1"),
        (["--source", "{source}", "--synthetic", "1.5"], "--synthetic must lie in [0, 1]"),
        (["--source", "{source}", "--indices", "0-4"], "needs --only-test"),
        (["--source", "{source}", "--only-test", "--test-speakers", "ann"], "--test-speakers"),
        (["--source", "{source}", "--only-test", "--indices", "50-60"], "no recordings with"),
    ],
)
def test_errors(
    options: list[str],
    message: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [option.format(empty=tmp_path, source=source) for option in options]
    assert pruned_rnnt(["prepare", "fsdd", *filled, "--output", str(tmp_path / "data")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_only_bad_files_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bad_files(tmp_path)
    output = str(tmp_path / "data")
    assert pruned_rnnt(["prepare", "fsdd", "--source", str(tmp_path), "--output", output]) == 1
    assert "none of the 10 wav files" in capsys.readouterr().err


def test_missing_recordings() -> None:
    some = [
        Recording(digit=d, speaker="a", index=3, samples_S=np.zeros(1, np.float32))
        for d in range(10)
        if d != 4
    ]
    assert missing_recordings(some) == ["4_a_3.wav"]


def test_download(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "master.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source / "recordings", "free-spoken-digit-dataset-master/recordings")
    monkeypatch.setattr(recordings_module, "ARCHIVE", archive.as_uri())
    folder = download(tmp_path / "fsdd")
    names = {path.name for path in (source / "recordings").iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    archive.unlink()
    assert download(tmp_path / "fsdd") == folder


def test_download_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "ARCHIVE", (tmp_path / "absent.tar.gz").as_uri())
    with pytest.raises(ValueError, match=r"could not download .*absent.*--source"):
        download(tmp_path / "a")
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(b"half a download")
    monkeypatch.setattr(recordings_module, "ARCHIVE", broken.as_uri())
    with pytest.raises(ValueError, match=r"damaged.*run again"):
        download(tmp_path / "b")


def test_report_has_the_options(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "data", "--speed", "0.9,1.1")
    report = json.loads((tmp_path / "data" / "prepare.json").read_text())
    assert report["options"]["speed"] == [0.9, 1.1]
    assert report["options"]["source"] == str(source)
