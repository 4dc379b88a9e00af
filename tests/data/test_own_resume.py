"""`prepare own` goes on where a kill or a full disk stopped it."""

from __future__ import annotations

import errno
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.shard_writer import Shard, ShardResult, write_shard
from pruned_rnnt.data.prepare.splits import SplitPlan
from tests.data.own_corpus import COUNT, all_texts, left_out, path_of, prepare, write_mixed_audio
from tests.data.recorded_speech import text_of

# Of thirteen rows by threes: eleven for training, and one each for dev and test.
SHARDS = 6


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_audio(tmp_path_factory.mktemp("audio"))


def write_table(audio: Path, folder: Path) -> Path:
    """A table of all audio files and their texts."""
    table = folder / "table.tsv"
    table.write_text("".join(f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(COUNT)))
    return table


@pytest.mark.parametrize("shar", [False, True])
def test_prepare_resumes_after_a_kill(
    audio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shar: bool
) -> None:
    table = write_table(audio, tmp_path)
    table.write_text(table.read_text() + "gone.wav\thello\n")
    options = ["--shard-size", "3", *(["--shar"] if shar else [])]
    whole = prepare(table, tmp_path / "whole", *options)
    made: list[int] = []

    def stop_at_the_third(shard: Shard) -> ShardResult:
        made.append(shard.number)
        if len(made) == 3:
            raise KeyboardInterrupt
        return write_shard(shard)

    monkeypatch.setattr("pruned_rnnt.data.prepare.shard_writer.write_shard", stop_at_the_third)
    arguments = ["prepare", "own", str(table), "--output", str(tmp_path / "out"), "--num-jobs", "1"]
    # A run with another shard size leaves files that the last run has to remove.
    assert pruned_rnnt([*arguments, "--tokens", "char", *options, "--shard-size", "2"]) == 130
    made.clear()
    assert pruned_rnnt([*arguments, "--tokens", "char", *options]) == 130
    assert len(made) == 3
    done = made[:2]
    made[:] = [0] * 5
    resumed = prepare(table, tmp_path / "out", *options)
    assert len(made) - 5 == SHARDS - len(done)
    assert left_out(resumed) == left_out(whole)
    for split in whole.splits():
        ours, theirs = list(whole.cuts(split)), list(resumed.cuts(split))
        assert [cut.id for cut in ours] == [cut.id for cut in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert np.array_equal(one.load_features(), other.load_features())
    for name in ("report.txt", "tokens/tokens.txt"):
        assert (resumed.path / name).read_text() == (whole.path / name).read_text()
    assert sorted(_files(resumed, "*")) == sorted(_files(whole, "*"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            ["{out} cannot be written (No space left on device)"],
        ),
        (
            BrokenProcessPool("A process in the process pool was terminated abruptly"),
            [
                "a process was killed, perhaps because memory ran out. Run the same command",
                "a smaller --shard-size, with which it starts anew",
            ],
        ),
    ],
    ids=["full disk", "killed worker"],
)
def test_prepare_resumes_after_an_interruption(
    error: Exception,
    said: list[str],
    audio: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = write_table(audio, tmp_path)
    made: list[int] = []

    def fails_at_the_third(shard: Shard) -> ShardResult:
        made.append(shard.number)
        if len(made) == 3:
            raise error
        return write_shard(shard)

    monkeypatch.setattr("pruned_rnnt.data.prepare.shard_writer.write_shard", fails_at_the_third)
    options = ["--tokens", "char", "--num-jobs", "1", "--shard-size", "3"]
    out = tmp_path / "out"
    assert pruned_rnnt(["prepare", "own", str(table), "--output", str(out), *options]) == 1
    shown = capsys.readouterr().err
    assert all(part.format(out=out) in shown for part in said)
    assert "Traceback" not in shown
    assert len(all_texts(prepare(table, out, "--shard-size", "3"))) == COUNT
    assert len(made) == 1 + SHARDS


def test_joined_manifests_of_an_interrupted_run_are_removed(audio: Path, tmp_path: Path) -> None:
    table = write_table(audio, tmp_path)
    unfinished = tmp_path / "out.unfinished"
    (unfinished / ".shards").mkdir(parents=True)
    (unfinished / "train_cuts.jsonl.gz").write_bytes(b"stale")
    folder = prepare(table, tmp_path / "out", "--shar")
    assert len(all_texts(folder)) == COUNT


def test_a_source_that_cannot_be_read_is_named(
    audio: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = write_table(audio, tmp_path)

    def unreadable(self: SplitPlan, entry: CorpusEntry) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(table))

    monkeypatch.setattr(SplitPlan, "split_of", unreadable)
    assert pruned_rnnt(["prepare", "own", str(table), "--output", str(tmp_path / "out")]) == 1
    assert f"{table} cannot be opened (Permission denied)" in capsys.readouterr().err


def _files(folder: PreparedFolder, pattern: str) -> list[str]:
    return [str(path.relative_to(folder.path)) for path in folder.path.rglob(pattern)]
