"""Prepared folders: relative paths, safe replacement, errors which name the file, one program at a
time.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lhotse import AudioSource
from lhotse.utils import fastcopy

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.manifest_items import text_lines
from pruned_rnnt.data.input.prepared_folder import (
    PathPrefix,
    PreparedFolder,
    building,
    read_cuts,
    write_report,
)
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from tests.data.spoken_corpus import make_corpus

# Holds the lock and has a forked child that outlives it, as loader workers do. The child prints a
# line once `fork` has returned: only then has it closed its copy of the handle and left the lock.
HOLDER = """
import os, sys, time
from pathlib import Path
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
with exclusive_folder_lock(Path(sys.argv[1]), "is held"):
    if os.fork() == 0:
        print("held", flush=True)
        time.sleep(20)
        os._exit(0)
    time.sleep(20)
"""


def test_folder_can_be_moved(tmp_path: Path) -> None:
    make_corpus(tmp_path / "here", train=2).rename(tmp_path / "there")
    folder = PreparedFolder(tmp_path / "there")
    assert folder.splits() == ["dev", "test", "train"]
    for lazy in (False, True):
        cut = next(iter(folder.cuts("train", lazy=lazy)))
        assert cut.load_features().shape == (100, 80)
        assert cut.load_audio().shape == (1, 16000)
        assert cut.supervisions[0].alignment["word"][1].symbol == "on"


def test_paths_become_those_that_lhotse_gives(tmp_path: Path) -> None:
    make_corpus(tmp_path / "data", train=2)
    cut = next(iter(read_cuts(tmp_path / "data" / "train_cuts.jsonl.gz")))
    root = str(tmp_path / "data")
    relative = fastcopy(
        cut,
        features=fastcopy(cut.features, storage_path="features/a.lca"),
        recording=fastcopy(
            cut.recording,
            sources=[
                fastcopy(cut.recording.sources[0], source="audio/a.wav"),
                fastcopy(cut.recording.sources[0], source="/elsewhere/a.wav"),
                AudioSource(type="url", channels=[0], source="https://example.org/a.wav"),
            ],
        ),
    )
    for one in (relative, relative.drop_features(), relative.drop_recording(), cut):
        expected = one.with_features_path_prefix(root).with_recording_path_prefix(root)
        assert PathPrefix(root)(one) == expected
    mixed = relative.pad(duration=9.0)
    assert PathPrefix(root)(mixed).tracks[0].cut == PathPrefix(root)(relative)


def test_missing_split_names_those_that_exist(tmp_path: Path) -> None:
    make_corpus(tmp_path / "data", train=2)
    with pytest.raises(FileNotFoundError, match=r"'valid'.*dev, test, train"):
        PreparedFolder(tmp_path / "data").cuts("valid")


@pytest.mark.parametrize("lazy", [False, True])
def test_error_names_damaged_manifest(tmp_path: Path, lazy: bool) -> None:
    folder = make_corpus(tmp_path / "data", train=20)
    manifest = folder / "train_cuts.jsonl.gz"
    whole = manifest.read_bytes()
    lines = gzip.decompress(whole).splitlines(keepends=True)
    for content, message in (
        (whole[: len(whole) // 2], r"train_cuts\.jsonl\.gz is damaged after line \d+"),
        (gzip.compress(b"".join(lines[:3])[:-9]), r"train_cuts\.jsonl\.gz:3 is not a valid line"),
        # Beyond the first block that a decoder of text would read.
        (gzip.compress(b"\n" * 9000 + b"\xe9\n"), r"jsonl\.gz:9001 is not UTF-8: save the file"),
    ):
        manifest.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            list(PreparedFolder(folder).cuts("train", lazy=lazy))
        data = DataModule(DataConfig(path=str(folder), num_workers=0, lazy=lazy))
        with pytest.raises(ValueError, match=message):
            data.train_loader()


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("{}\n\n{}\n", encoding="utf-8-sig")
    assert list(text_lines(path)) == [(1, "{}\n"), (3, "{}\n")]


def test_a_failed_build_leaves_the_old_folder(tmp_path: Path) -> None:
    output = tmp_path / "data"
    with building(output) as folder:
        write_report(folder, {"version": 1})
    with pytest.raises(TypeError, match="serializable"), building(output) as folder:
        write_report(folder, {"version": object()})
    assert PreparedFolder(output).report() == {"version": 1}
    with building(output) as folder:
        assert list(folder.iterdir()) == []
        write_report(folder, {"version": 3})
    assert PreparedFolder(output).report() == {"version": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_kill_between_the_renames_leaves_the_old_folder(tmp_path: Path) -> None:
    with building(tmp_path / "data") as folder:
        write_report(folder, {"version": 1})
    (tmp_path / "data").rename(tmp_path / "data.replaced")
    with pytest.raises(KeyError), building(tmp_path / "data"):
        raise KeyError
    assert PreparedFolder(tmp_path / "data").report() == {"version": 1}


def test_what_is_left_of_a_deleted_folder_is_not_taken_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        raise OSError

    with building(tmp_path / "data") as folder:
        write_report(folder, {"version": 1})
        (folder / "left").touch()
    with monkeypatch.context() as patch:
        patch.setattr("pruned_rnnt.data.input.prepared_folder.shutil.rmtree", killed)
        with building(tmp_path / "data") as folder:
            write_report(folder, {"version": 2})
    assert (tmp_path / "data.replaced/left").is_file()
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(KeyError), building(tmp_path / "data"):
        raise KeyError
    assert not (tmp_path / "data").exists()


def test_foreign_folders_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("a")
    with pytest.raises(ValueError, match=r"has no prepare\.json"), building(tmp_path / "photos"):
        pytest.fail("must not start")
    (tmp_path / "file").write_text("a")
    with pytest.raises(ValueError, match="got the file"), building(tmp_path / "file"):
        pytest.fail("must not start")
    (tmp_path / "empty").mkdir()
    with building(tmp_path / "empty") as folder:
        write_report(folder, {})
    assert json.loads((tmp_path / "empty" / "prepare.json").read_text()) == {}


@pytest.mark.slow
def test_lock_is_free_after_its_process_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(ValueError, match=r"is held by another process: wait"),
            exclusive_folder_lock(tmp_path, "is held"),
        ):
            pass
        holder.kill()
        holder.wait()
        with exclusive_folder_lock(tmp_path, "is held"):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_two_builds_of_one_folder(tmp_path: Path) -> None:
    with building(tmp_path / "out") as folder:
        (folder / "half").mkdir()
        with (
            pytest.raises(ValueError, match="unfinished is being written by another"),
            building(tmp_path / "out"),
        ):
            pass
        assert (folder / "half").is_dir()
        write_report(folder, {})
    assert (tmp_path / "out/half").is_dir()
    with building(tmp_path / "out") as folder:
        write_report(folder, {})
    assert not (tmp_path / "out/half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_missing_shard_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PreparedFolder(tmp_path)
    write_report(tmp_path, {})
    for number in (0, 1, 2, 3):
        (tmp_path / f"train_cuts.{number:06d}.jsonl.gz").touch()
    assert folder.splits() == ["train"]
    assert [path.name[11:17] for path in folder.manifests("train")] == [
        f"{number:06d}" for number in range(4)
    ]
    assert not caplog.messages
    (tmp_path / "train_cuts.000002.jsonl.gz").unlink()
    for _ in range(2):
        assert len(folder.manifests("train")) == 3
    (message,) = caplog.messages
    assert f"{tmp_path}/train_cuts.000002.jsonl.gz is missing" in message
    (tmp_path / "train_cuts.000000.jsonl.gz").unlink()
    assert len(folder.manifests("train")) == 2
    assert f"{tmp_path}/train_cuts.000000.jsonl.gz is missing" in caplog.messages[1]


def test_shards_without_a_number_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("000000", "000001", "extra"):
        (tmp_path / f"train_cuts.{name}.jsonl.gz").touch()
    for _ in range(2):
        assert len(PreparedFolder(tmp_path).manifests("train")) == 2
    (message,) = caplog.messages
    assert "1 shards without a number in their names are not read (train_cuts.extra" in message
    assert "rename them to train_cuts.000002.jsonl.gz" in message


@pytest.mark.parametrize(
    "names",
    [[str(n) for n in range(1, 12)], ["89", "9000"], ["part1", "part2"], ["a_cuts"]],
)
def test_other_programs_name_shards_in_other_ways(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        (tmp_path / f"train_cuts.{name}.jsonl.gz").touch()
    found = PreparedFolder(tmp_path).manifests("train")
    assert [path.name.split(".")[1] for path in found] == sorted(names)
    assert not caplog.messages
