"""Recipes over lhotse's functions, on tiny corpora in the layout of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig, cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.recipes import corpus_layouts


def prepare(name: str, source: Path, output: Path, *options: str) -> PreparedFolder:
    arguments = ["prepare", name, "--source", str(source), "--output", str(output)]
    assert pruned_rnnt([*arguments, "--num-jobs", "1", *options]) == 0
    return PreparedFolder(output)


def texts(folder: PreparedFolder, split: str) -> list[str]:
    return [cut_text(cut) for cut in folder.cuts(split)]


def assert_trains(folder: PreparedFolder, **changes: object) -> None:
    filters = FilterConfig(subsampling_factor=1)
    config = DataConfig(path=str(folder.path), num_workers=0, filters=filters, **changes)
    data = DataModule(config)
    seen = sum(len(batch) for batch in data.train_loader())
    assert seen == len(folder.cuts("train"))


def test_yesno(tmp_path: Path) -> None:
    source = corpus_layouts.make_yesno(tmp_path / "waves_yesno")
    folder = prepare("yesno", source, tmp_path / "out")
    counts = {split: len(folder.cuts(split)) for split in folder.splits()}
    assert counts["test"] == 30
    assert counts["train"] + counts["dev"] == 30
    assert 2 <= counts["dev"] <= 10
    assert set(" ".join(texts(folder, "train")).split()) == {"YES", "NO"}
    assert folder.tokenizer().symbols[3:] == ["\u2581NO", "\u2581YES"]
    assert_trains(folder)


def test_librispeech(tmp_path: Path) -> None:
    parts = {"train-clean-100": 3, "train-clean-360": 2, "train-other-500": 1}
    parts |= {"dev-clean": 1, "dev-other": 1, "test-clean": 2, "test-other": 3}
    source = corpus_layouts.make_librispeech(tmp_path, parts)
    options = ["--tokens", "char"]
    folder = prepare("librispeech", source, tmp_path / "out", *options)
    counts = {split: len(folder.cuts(split)) for split in folder.splits()}
    assert counts == {"train": 12, "dev": 4, "test": 4, "test-other": 6}
    speakers = folder.report()["splits"]["train"]["speakers"]
    assert speakers == ["100", "101", "102", "200", "201", "202"]
    small = prepare("librispeech", source, tmp_path / "100", *options, "--hours", "100")
    assert len(small.cuts("train")) == 6
    assert_trains(folder)


def test_missing_parts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"train-clean-100": 3, "dev-clean": 1, "test-clean": 2}
    source = corpus_layouts.make_librispeech(tmp_path, parts)
    options = ["--tokens", "char"]
    folder = prepare("librispeech", source, tmp_path / "out", *options, "--hours", "460")
    missing = f"parts that {source} does not have: dev-other, test-other, train-clean-360"
    assert f"hint: {missing}\n" in capsys.readouterr().out
    assert f"{missing}\n" in (folder.path / "report.txt").read_text()


def test_mini_librispeech(tmp_path: Path) -> None:
    source = corpus_layouts.make_librispeech(tmp_path, {"train-clean-5": 6, "dev-clean-2": 2}, 10)
    folder = prepare(
        "mini_librispeech", source, tmp_path / "out", "--tokens", "char", "--features", "waveform"
    )
    counts = {split: len(folder.cuts(split)) for split in folder.splits()}
    assert counts["train"] + counts["dev"] == 60
    assert counts["dev"] == 6
    assert counts["test"] == 20
    speakers = folder.report()["splits"]
    assert not set(speakers["dev"]["speakers"]) & set(speakers["train"]["speakers"])
    assert_trains(folder, features="waveform")


def test_aishell(tmp_path: Path) -> None:
    source = corpus_layouts.make_aishell(tmp_path / "aishell")
    folder = prepare("aishell", source, tmp_path / "out")
    assert set(texts(folder, "train")) == {"\u4f60\u597d\u4e16", "\u4f60\u597d\u4e16\u754c"}
    tokenizer = folder.tokenizer()
    assert tokenizer.decode(tokenizer.encode("\u4f60\u597d\u4e16\u754c")) == (
        "\u4f60\u597d\u4e16\u754c"
    )
    # A symbol a character, and one for the space that starts each text.
    assert len(tokenizer) == 3 + 4 + 1
    assert_trains(folder)


def test_commonvoice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # lhotse starts processes anew for every part: seconds each.
    monkeypatch.setattr(
        "lhotse.recipes.commonvoice.ProcessPoolExecutor",
        lambda max_workers, mp_context: ThreadPoolExecutor(max_workers),
    )
    source = corpus_layouts.make_commonvoice(tmp_path / "cv-corpus", "de")
    options = ["--language", "de", "--tokens", "char"]
    folder = prepare("commonvoice", source, tmp_path / "out", *options)
    assert texts(folder, "train") == [f"wie geht's nummer {i}" for i in range(4)]
    again = prepare("commonvoice", source / "de", tmp_path / "again", *options)
    assert texts(again, "test") == texts(folder, "test")
    assert_trains(folder)


def test_a_language_that_commonvoice_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "cv-corpus"
    for language in ("de", "tr"):
        corpus_layouts.make_commonvoice(source, language, 1)
    assert pruned_rnnt(["prepare", "commonvoice", "--source", str(source), "--language=xx"]) == 1
    error = capsys.readouterr().err
    assert f"{source} has no folder xx (--language); it has de, tr; recipes/" in error


def test_musan_is_mixed_into_yesno(tmp_path: Path) -> None:
    source = corpus_layouts.make_yesno(tmp_path / "waves_yesno")
    musan = corpus_layouts.make_musan(tmp_path / "musan")
    noises = prepare("musan", musan, tmp_path / "noises", "--window", "1")
    cuts = noises.cuts("noise")
    assert sorted({cut.id.partition("-")[0] for cut in cuts}) == ["music", "noise", "speech"]
    assert len(cuts) == 6
    folder = prepare("yesno", source, tmp_path / "out")
    mixing = AugmentationConfig(
        noise_cuts=str(noises.cuts_path("noise")), noise_cuts_probability=1.0
    )
    assert_trains(folder, augmentation=mixing)


@pytest.mark.parametrize("name", ["yesno", "librispeech", "aishell", "commonvoice"])
def test_error_names_folder_with_another_layout(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    arguments = ["prepare", name, "--source", str(tmp_path / "elsewhere")]
    assert pruned_rnnt([*arguments, "--output", str(tmp_path / "out")]) == 1
    assert "elsewhere" in capsys.readouterr().err
    assert pruned_rnnt(["prepare", name, "--source", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a folder" in capsys.readouterr().err


def _recipes() -> Iterator[CorpusRecipe]:
    from pruned_rnnt.recipes.aishell.prepare import RECIPE as AISHELL
    from pruned_rnnt.recipes.commonvoice.prepare import RECIPE as COMMONVOICE
    from pruned_rnnt.recipes.librispeech.prepare import RECIPE as LIBRISPEECH
    from pruned_rnnt.recipes.mini_librispeech.prepare import RECIPE as MINI
    from pruned_rnnt.recipes.yesno.prepare import RECIPE as YESNO

    yield from (AISHELL, COMMONVOICE, LIBRISPEECH, MINI, YESNO)


@pytest.mark.parametrize("recipe", list(_recipes()), ids=lambda recipe: recipe.name)
def test_recipes_have_a_configuration_and_a_readme(recipe: CorpusRecipe) -> None:
    from pruned_rnnt.config.load import load_config

    root = Path(__file__).parent.parent.parent
    config = load_config(ExperimentConfig, root / "configs" / f"{recipe.name}.yaml")
    assert config.data.path == f"data/{recipe.name}"
    assert config.train.folder == f"exp/{recipe.name}"
    assert (root / "recipes" / recipe.name / "README.md").is_file()


def test_error_for_failed_download_suggests_source(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("lhotse.recipes.yesno.resumable_download", refuse)
    arguments = ["prepare", "yesno", "--download", str(tmp_path / "there")]
    assert pruned_rnnt([*arguments, "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "the download failed (no route to host)" in error
    assert "--source" in error
