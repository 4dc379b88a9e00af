"""Recipes of public corpora, given a folder that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt

RECIPES = [
    "aishell",
    "commonvoice",
    "librispeech",
    "mini_librispeech",
    "musan",
    "speechocean762",
    "yesno",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_error_for_another_folder_names_the_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    (tmp_path / "other.txt").write_text("hello")
    arguments = ["--source", str(tmp_path), "--output", str(tmp_path / "out")]
    assert pruned_rnnt(["prepare", recipe, *arguments]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert f"recipes/{recipe}/README.md describes the folder that --source needs" in error
    assert "AssertionError: AssertionError" not in error
    assert "--source" in (Path(__file__).parents[2] / "recipes" / recipe / "README.md").read_text()
    assert not (tmp_path / "out").exists()
