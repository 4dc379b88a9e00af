"""A run keeps its tokens; training it on data with other tokens is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from tests.tiny_corpus import tiny_overrides


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exp") / "run"
    assert main(["train", *tiny_overrides(corpus, folder, "train.steps=1")]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, which the test may change."""
    return shutil.copytree(trained, tmp_path / "run")


def copy_with_tokens(corpus: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    """The prepared data with another tokenizer."""
    shutil.copytree(corpus, folder)
    tokenizer.save(folder / "tokens")
    return folder


@pytest.mark.parametrize(
    "text", ["black white grey", "red green"], ids=["as many tokens", "fewer tokens"]
)
@pytest.mark.parametrize(
    "allow",
    [
        pytest.param([], id=""),
        pytest.param(["--allow-changes"], id="changes allowed", marks=pytest.mark.slow),
    ],
)
def test_data_with_other_tokens_are_refused(
    corpus: Path,
    run: Path,
    text: str,
    allow: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = train_tokenizer([text], TokenizerConfig(kind="word"))
    other = copy_with_tokens(corpus, tmp_path / "other", tokenizer)
    before = {path.name: path.read_bytes() for path in (run / "tokens").iterdir()}
    capsys.readouterr()
    settings = tiny_overrides(other, run, "train.steps=2")
    assert main(["train", *settings, *allow]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the tokens of data.path={other} ({len(tokenizer)} symbols) differ" in line
    assert f"of the run {run}" in line
    assert {path.name: path.read_bytes() for path in (run / "tokens").iterdir()} == before
    assert main(["decode", str(run)]) == 0


def test_damaged_tokens_of_a_run_are_reported(
    corpus: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "tokens/tokens.model"
    path.write_bytes(path.read_bytes()[:50])
    settings = tiny_overrides(corpus, run, "train.steps=2", "--allow-changes")
    for command in (["train", *settings], ["decode", str(run)], ["transcribe", str(run), "a.wav"]):
        capsys.readouterr()
        assert main(command) == EXIT_FAILED
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} is damaged" in line


def test_run_of_another_model_is_not_continued(
    corpus: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_overrides(corpus, run, "model.joiner_dim=16", "--allow-changes")
    capsys.readouterr()
    assert main(["train", *settings]) == EXIT_USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{run} holds a run of another model" in line
    shutil.rmtree(run / "tokens")
    other = train_tokenizer(["red"], TokenizerConfig(kind="char"))
    data = copy_with_tokens(corpus, run.parent / "other", other)
    assert main(["train", *tiny_overrides(data, run, "train.steps=1")]) == EXIT_USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"holds a run with 6 symbols, and the data have {len(other)}" in line
