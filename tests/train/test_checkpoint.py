"""Checkpoints: atomic writes, refusal of unusable files, retention by number and score."""

from __future__ import annotations

import errno
import math
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pruned_rnnt.train.engine.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from pruned_rnnt.train.engine.counters import Counters
from pruned_rnnt.train.run import read_checkpoint


def values(step: int, score: float | None = None) -> dict[str, object]:
    return {
        "config": {},
        "vocab_size": 3,
        "model": {"w": torch.full((300,), float(step))},
        "average": None,
        "counters": {"step": step},
        "score": score,
    }


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("not a checkpoint at all\n" * 50)


def foreign(path: Path) -> None:
    torch.save({"model": {}}, path)


def change(path: Path, **changes: object) -> None:
    """Rewrite a checkpoint with changed values; `...` removes a value."""
    values = {**torch.load(path, weights_only=True), **changes}
    torch.save({key: value for key, value in values.items() if value is not ...}, path)


def without_version(path: Path) -> None:
    change(path, version=...)


def without_config(path: Path) -> None:
    change(path, config=...)


def with_nan(path: Path) -> None:
    change(path, model={"w": torch.tensor([1.0, float("nan")])})


def with_infinite_average(path: Path) -> None:
    change(path, average={"w": torch.tensor([1.0, float("inf")])})


def with_absurd_values(path: Path) -> None:
    change(path, model={"w": torch.tensor([1.0, 1e29])})


def newer(path: Path) -> None:
    change(path, version=99)


class Code:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code from a checkpoint was run",))


def with_code(path: Path) -> None:
    change(path, model=Code())


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Code(), protocol=2))


def flipped(path: Path) -> None:
    """Flip one bit of a tensor."""
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((4,), 3.0).numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)


def compressed(path: Path) -> None:
    """Flip a bit of the compression method, so that zlib fails."""
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 10] ^= 8
    path.write_bytes(content)


SPOIL = {
    truncated: "is truncated or damaged",
    empty: "is empty",
    text: "is damaged or not a checkpoint",
    foreign: "is not a pruned_rnnt checkpoint",
    newer: "has version 99",
    without_version: "is damaged: it has no 'version'",
    without_config: "is damaged: it has no 'config'",
    with_code: r"is refused: it holds an object of (builtins\.)?print, which can run code",
    bare_pickle: "is damaged or not a checkpoint",
    flipped: "is damaged: the checksum",
    compressed: "is truncated or damaged",
    with_nan: r"parameter w has NaN values \(1 of 2\)",
    with_infinite_average: r"parameter w has infinite values \(1 of 2\)",
    with_absurd_values: r"parameter w has values up to 1\.0e\+29",
}


@pytest.mark.parametrize("spoil", SPOIL, ids=lambda f: f.__name__)
def test_unusable_file_is_refused_and_named(
    tmp_path: Path, spoil: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step-00000003.pt"
    save_checkpoint(path, values(3))
    spoil(path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"step-00000003\.pt.*{SPOIL[spoil]}") as caught:
        load_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1
    assert "weights_only" not in str(caught.value)
    assert "code from a checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("spoil", [s for s in SPOIL if s is not newer], ids=lambda f: f.__name__)
def test_previous_checkpoint_is_used(
    tmp_path: Path, spoil: object, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, values(1))
    spoil(folder.save(3, values(3)))  # type: ignore[operator]
    loaded = folder.load_newest()
    assert loaded is not None
    assert loaded["model"]["w"][0] == 1.0
    assert "step-00000003.pt" in caplog.text


@pytest.mark.parametrize("later", [[], [4]])
def test_a_checkpoint_of_a_later_version_is_not_passed_over(
    tmp_path: Path, later: list[int]
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, values(1))
    newer(folder.save(3, values(3)))
    for step in later:
        empty(folder.save(step, values(step)))
    message = r"step-00000003\.pt has version 99, .*: update pruned_rnnt, or move the file away to"
    with pytest.raises(CheckpointError, match=message):
        folder.load_newest()


def test_any_flipped_bit_is_detected_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "step-00000003.pt"
    save_checkpoint(path, values(3))
    content = path.read_bytes()
    draw = random.Random(0)
    # Damage in the directory at the end of the archive has the most kinds of errors.
    directory = range(content.index(b"PK\x01\x02"), len(content))
    places = [*draw.sample(range(len(content)), 60), *draw.sample(directory, 120)]
    refused = 0
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            loaded = load_checkpoint(path)
        except CheckpointError:
            refused += 1
        else:
            assert torch.equal(loaded["model"]["w"], torch.full((300,), 3.0))
    assert refused > 50


@pytest.mark.parametrize("content", [b"", b'{"step-0', b"[1]", b'{"a": "b"}', b"\xff\x00"])
def test_damaged_scores_file_is_rebuilt(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    for step, score in [(1, 0.1), (2, 0.5)]:
        folder.save(step, values(step, score))
    (tmp_path / "scores.json").write_bytes(content)
    assert folder.best() == folder.path(1)
    assert f"{tmp_path}/scores.json is damaged" in caplog.text
    folder.save(3, values(3, 0.7))
    assert folder.paths() == [folder.path(1), folder.path(3)]
    caplog.clear()
    assert folder.best() == folder.path(1)
    assert not caplog.text


def test_unreadable_checkpoints_are_never_overwritten_by_a_new_run(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        empty(folder.save(step, values(step)))
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* move them away"):
        folder.load_newest()


def test_unreadable_later_files_do_not_displace_new_ones(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1)
    for step in (8, 9):
        path = folder.path(step)
        save_checkpoint(path, values(step))
        empty(path)
    for step in (5, 6):
        folder.save(step, values(step))
    loaded = folder.load_newest()
    assert loaded is not None
    assert loaded["model"]["w"][0] == 6.0
    folder.save(10, values(10))
    assert folder.paths() == [folder.path(10)]


@pytest.mark.parametrize("step", [1, 2])
def test_full_disk_raises_and_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, values(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        message = (
            rf"step-0000000{step}\.pt .*No space left .*earlier files are unchanged: make room"
        )
        with pytest.raises(CheckpointError, match=message):
            folder.save(step, values(7))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.json", "step-00000001.pt"]
    assert load_checkpoint(folder.path(1))["model"]["w"][0] == 1.0


def full_disk(file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_missing_file_and_empty_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pt", str(tmp_path / "absent.pt")):
        with pytest.raises(CheckpointError, match=r"not found: .*absent\.pt"):
            load_checkpoint(path)
    assert CheckpointFolder(tmp_path / "nothing").load_newest() is None


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.pt"
    save_checkpoint(path, values(1))
    with pytest.raises(CheckpointError, match=r"00000001\.pt was not written.* model is of type"):
        save_checkpoint(path, {"model": lambda: None})
    assert load_checkpoint(path)["model"]["w"][0] == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float64(0.1), r"optimiser\.0 is of type numpy\.float64"),
        (Path("run"), r"optimiser\.0 is of type pathlib\.\w*Path"),
        ({np.str_("a"): 1}, r"a key of optimiser\.0 is of type numpy\.str_"),
        ({("a", np.str_("b")): 1}, r"a key of optimiser\.0\.1 is of type numpy\.str_"),
        (torch.eye(2).to_sparse(), r"optimiser\.0 is not a dense tensor .*sparse_coo"),
        (torch.ones(1).expand(3), r"optimiser\.0 of shape \(3,\) repeats its 4 bytes"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, value: object, message: str
) -> None:
    path = tmp_path / "step-00000001.pt"
    with pytest.raises(CheckpointError, match=f"was not written.*{message}"):
        save_checkpoint(path, {**values(1), "optimiser": [value]})
    assert not path.exists()
    plain = [torch.nn.Parameter(torch.ones(1)), torch.Size([1]), torch.float16, (1, 2j), {3: None}]
    plain += [b"x", bytearray(b"y"), torch.strided, torch.per_tensor_affine]
    plain += [{("a", 1): b"x", torch.device("cpu"): 1}]
    save_checkpoint(path, {**values(1), "optimiser": plain})
    assert load_checkpoint(path)["optimiser"] == plain


def test_a_score_survives_a_kill_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint would else be removed later, although it is the best."""
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    folder.save(4, values(4, 0.5))
    folder.save(8, values(8))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "paths", killed)  # right after the checkpoint
        with pytest.raises(KeyboardInterrupt):
            folder.save(8, values(8, 0.1))
    folder.save(12, values(12, 0.3))
    assert folder.paths() == [folder.path(8), folder.path(12)]
    assert folder.best() == folder.path(8)


def killed(folder: CheckpointFolder) -> None:
    raise KeyboardInterrupt


def test_a_failed_write_keeps_the_scores(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    folder.save(1, values(1, 0.5))
    with pytest.raises(CheckpointError):
        folder.save(2, {**values(2, 0.1), "model": print})
    assert folder.best() == folder.path(1)


def test_copies_of_a_user_are_no_checkpoints(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1)
    path = folder.save(1, values(1))
    copies = [tmp_path / name for name in ("step-00000001-good.pt", "step-good.pt", "step-avg.pt")]
    for copy in copies:
        copy.write_bytes(path.read_bytes())
    folder.save(2, values(2))
    assert folder.paths() == [folder.path(2)]
    assert all(copy.exists() for copy in copies)


def test_unfinished_file_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, values(1))
    (tmp_path / ".step-00000002.pt.tmp").write_bytes(b"half")
    assert [path.name for path in folder.paths()] == ["step-00000001.pt"]
    folder.save(3, values(3))
    assert load_checkpoint(folder.path(3))["model"]["w"][0] == 3.0
    assert not list(tmp_path.glob(".*"))


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2, keep_best=1)
    for step, score in [(1, 0.5), (2, 0.1), (3, None), (4, 0.3), (5, 0.4)]:
        folder.save(step, values(step, score))
    names = [path.name for path in folder.paths()]
    assert names == ["step-00000002.pt", "step-00000004.pt", "step-00000005.pt"]
    assert folder.best() == folder.path(2)
    folder.path(2).unlink()
    assert folder.best() == folder.path(4)


def test_the_best_usable_one_is_kept(tmp_path: Path) -> None:
    """Although a better one is missing, or damaged and later than the step of the run."""
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    folder.save(1, values(1, 0.1))
    folder.path(1).unlink()
    truncated(folder.save(9, values(9, 0.2)))
    for step, score in [(3, 0.3), (4, 0.5), (5, 0.4)]:
        folder.save(step, values(step, score))
    assert folder.paths() == [folder.path(step) for step in (3, 5, 9)]
    assert folder.best() == folder.path(3)


def test_the_newest_of_equals_is_the_best(tmp_path: Path) -> None:
    """All validations of a young run can have an error rate of 100%."""
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    for step in (1, 2, 3):
        folder.save(step, values(step, 1.0))
    assert folder.best() == folder.path(3)
    folder.save(4, values(4, None))
    assert [path.name for path in folder.paths()] == ["step-00000003.pt", "step-00000004.pt"]


def test_reader_of_a_damaged_checkpoint_names_the_one_before(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    first, last = folder.save(1, values(1)), folder.save(2, values(2))
    assert read_checkpoint(last)["counters"]["step"] == 2
    truncated(last)
    with pytest.raises(
        CheckpointError, match=f"damaged.* pass decode.checkpoint={first} to a command"
    ):
        read_checkpoint(last)
    truncated(first)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        read_checkpoint(first)
    assert "decode.checkpoint" not in str(caught.value)


def test_best_without_scores_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, values(1))
    assert folder.best() is None
    with pytest.raises(CheckpointError, match="no validation has given a score yet"):
        load_checkpoint(folder.best())


def test_counters_keep_their_names_in_checkpoints() -> None:
    saved = {"step": 7, "epoch": 1, "batch": 2, "bad_in_row": 3, "bad_steps": 4}
    counters = Counters.from_state_dict(saved)
    assert counters.consecutive_bad_steps == 3
    newer = {"validation_due": False, "best_score": math.inf, "validations_since_best": 0}
    assert counters.state_dict() == {**saved, **newer, "validated_step": -1}
