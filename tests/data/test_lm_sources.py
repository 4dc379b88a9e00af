"""`prepare lm`: text files as people have them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.lm_texts import TextFiles
from tests.data.own_corpus import prepare
from tests.data.recorded_speech import text_of, write_audio

# The time of the call would be in the name of the test.
_COMPRESSED = gzip.compress(b"go\n" * 99, mtime=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    wav = write_audio(root / "a.wav")
    (root / "table.tsv").write_text("".join(f"{wav}\t{text_of(i)}\n" for i in range(6)))
    return prepare(root / "table.tsv", root / "own data").path


def prepare_lm(data: Path, text: Path) -> int:
    output = str(text.parent / "the lm")
    return pruned_rnnt(["prepare", "lm", str(data), "--text", str(text), "--output", output])


def test_text_with_bom_is_read_and_printed_command_is_quoted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xef\xbb\xbf" + b"go\r\n\r\nstop go\r\n")
    assert prepare_lm(data, text) == 0
    shown = capsys.readouterr().out
    assert "train: 6 texts" in shown
    assert "(0 unknown)" in shown
    assert f"--config lm 'data.path={tmp_path}/the lm'" in shown
    assert len(TextFiles(tmp_path / "the lm", "train")) == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.txt", "go\ncaf\u00e9\n".encode("latin-1"), "text.txt:2 is not UTF-8"),
        ("text.txt.gz", _COMPRESSED[:-9], "text.txt.gz is damaged after line "),
        ("text.txt.gz", b"go\n", "text.txt.gz is damaged after line 0"),
    ],
)
def test_error_names_damaged_text(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    message: str,
) -> None:
    (tmp_path / name).write_bytes(content)
    assert prepare_lm(data, tmp_path / name) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "the lm").exists()
