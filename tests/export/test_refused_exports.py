"""An export that is refused leaves an earlier one, and files of the user, as they were; the next
one removes what a killed one has left.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_USAGE
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from tests.pretrained.saved_models import make_model, make_tokenizer, save_run

_CARD = "---\nlibrary_name: pruned_rnnt\n---\n\n# a\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    return save_run(tmp_path / "run", make_model(tokenizer), tokenizer)


@pytest.mark.parametrize("name", ["model.nemo", "other.nemo"])
def test_a_refused_export_to_nemo_keeps_the_earlier_archive(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / name).write_bytes(b"earlier")
    (folder / "README.md").write_text(_CARD)
    assert main(["export", str(run), "--format", "nemo", "--output", str(folder)]) != 0
    assert "NeMo and transformers need fastconformer" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == {name, "README.md"}
    assert (folder / name).read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]


@pytest.mark.usefixtures("without_programs")
def test_an_export_replaces_the_files_of_an_earlier_one_alone(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("silero_vad.onnx", "other.pt2"):
        (folder / name).write_text("mine")
    command = ["export", str(run), "--format", "torch", "--output", str(folder)]
    assert main(command) == 0
    for name in ("model.pt2", "encoder.pt2"):  # of a CTC model, and of this one
        (folder / name).write_text("earlier")
    assert main(command) == 0
    assert not (folder / "model.pt2").exists()
    assert (folder / "encoder.pt2").read_bytes() != b"earlier"
    assert (folder / "silero_vad.onnx").read_text() == (folder / "other.pt2").read_text() == "mine"


@pytest.mark.usefixtures("without_programs")
@pytest.mark.slow
def test_what_a_killed_export_left_is_removed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    left = tmp_path / ".exported.unfinished"
    killed = (
        "import os, sys, pathlib; from pruned_rnnt.system.whole_files import appearing_together\n"
        "with appearing_together(pathlib.Path(sys.argv[1])) as unfinished:\n"
        "    (unfinished / 'deeper').mkdir(); (unfinished / 'model.pt2').touch(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", killed, str(folder)], check=False)
    assert {path.name for path in left.iterdir()} == {"deeper", "model.pt2"}
    command = ["export", str(run), "--format", "torch", "--output", str(folder)]
    with exclusive_folder_lock(left):
        assert main(command) != 0
    assert f"{left} is being written by another process" in capsys.readouterr().err
    assert (left / "model.pt2").exists()
    assert main(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]
    assert not {"deeper", "model.pt2"} & {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": "mine"}, "has README.md and is not the folder of an earlier export"),
        ({"model.pt": "mine"}, "has model.pt and is not the folder of an earlier export"),
        ({"README.md": _CARD, "encoder.onnx": ""}, "another format than torch (encoder.onnx)"),
        ({"config.yaml": ""}, "the folder of a run"),
    ],
)
def test_folders_of_other_files_are_refused(
    files: dict[str, str],
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    command = ["export", str(run), "--format", "torch", "--output"]
    assert main([*command, str(folder)]) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    file = folder / next(iter(files))
    assert main([*command, str(file)]) == EXIT_USAGE
    assert f"--output is {file}, but {file} is a file" in capsys.readouterr().err
