"""A finished folder is kept from commands of other sources, options or recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from tests.data.own_corpus import COUNT, all_texts, path_of, prepare, write_mixed_audio
from tests.data.recorded_speech import text_of


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_audio(tmp_path_factory.mktemp("audio"))


def write_table(path: Path, audio: Path, count: int) -> Path:
    path.write_text("".join(f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(count)))
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert pruned_rnnt(["prepare", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_other_options_and_sources_need_replace(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "table.tsv", audio, COUNT)
    other = write_table(tmp_path / "other.tsv", audio, 6)
    out = prepare(table, tmp_path / "out").path
    made = (out / "prepare.json").read_bytes()
    common = ["--output", str(out), "--tokens", "char"]
    error = refusal(capsys, "own", str(table), *common, "--case", "upper", "--speeds", "0.9")
    assert f"output {out} contains data prepared differently (" in error
    assert "speeds [], now [0.9]; case keep, now upper)" in error
    assert "choose another --output, or add --replace" in error
    error = refusal(capsys, "own", str(other), *common)
    assert f"source {table}, now {other}" in error
    assert (out / "prepare.json").read_bytes() == made
    assert len(all_texts(prepare(other, out, "--replace"))) == 6


def test_the_same_command_replaces_without_an_option(
    audio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, with another number of processes, and with --replace before."""
    table = write_table(tmp_path / "table.tsv", audio, 6)
    prepare(table, tmp_path / "out", "--replace", "--speeds", "0.9,1.1")
    write_table(table, audio, COUNT)
    monkeypatch.chdir(tmp_path)
    again = prepare(Path("table.tsv"), Path("out"), "--num-jobs", "2", "--speeds", "0.9,1.1")
    assert len(again.cuts("train")) == 3 * (COUNT - 2)


@pytest.mark.parametrize("name", ["${x}", "a\x7f"])
def test_a_folder_that_no_setting_can_name_is_refused_before_the_work(
    name: str, audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "table.tsv", audio, 6)
    for arguments in (["own", str(table)], ["lm", str(tmp_path)]):
        error = refusal(capsys, *arguments, "--output", str(tmp_path / name))
        assert "choose another --output: override 'data.path=" in error
    assert list(tmp_path.iterdir()) == [table]


def test_other_recipes_need_replace(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prepare(write_table(tmp_path / "table.tsv", audio, 6), tmp_path / "out").path
    for arguments in (["synthetic"], ["lm", str(out)], ["yesno", "--source", str(tmp_path)]):
        error = refusal(capsys, *arguments, "--output", str(out))
        assert f"(recipe own, now {arguments[0]})" in error
    assert json.loads((out / "prepare.json").read_text())["recipe"] == "own"


def test_an_unreadable_report_needs_replace(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "table.tsv", audio, 6)
    out = prepare(table, tmp_path / "out").path
    (out / "prepare.json").write_text("{")
    assert "(prepare.json cannot be read)" in refusal(
        capsys, "own", str(table), "--output", str(out)
    )
    assert len(all_texts(prepare(table, out, "--replace"))) == 6
