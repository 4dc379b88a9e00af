"""The speechocean762 recipe on tiny corpora: both layouts, held-out speakers, ages, bad files."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
from pruned_rnnt.recipes.speechocean762 import corpus as corpus_module
from pruned_rnnt.recipes.speechocean762.speakers import hold_out_speakers

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.config.load import load_config
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.recipes import corpus_layouts

ROOT = Path(__file__).parents[2]
HELD_OUT = ["--test-speakers", "2", "--dev-speakers", "2", "--tokens", "char"]


RECIPE = Path(__file__).parents[2] / "recipes" / "speechocean762"


def run(where: list[str], output: Path, *options: str) -> PreparedFolder:
    command = ["prepare", "speechocean762", *where, "--output", str(output), "--num-jobs", "1"]
    assert pruned_rnnt([*command, *HELD_OUT, *options]) == 0
    return PreparedFolder(output)


def fails(source: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    output = source.parent / "refused"
    command = ["prepare", "speechocean762", "--source", str(source), "--output", str(output)]
    assert pruned_rnnt([*command, *HELD_OUT, *options]) == 1
    assert not output.exists()
    return capsys.readouterr().err


def speakers(folder: PreparedFolder, split: str) -> set[str]:
    return {cut.supervisions[0].speaker for cut in folder.cuts(split)}


@pytest.fixture(scope="module")
def own_layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "speechocean762"
    return corpus_layouts.make_speechocean762(folder, {"train": 8, "test": 2})


@pytest.fixture(scope="module")
def whole(own_layout: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedFolder:
    return run(["--source", str(own_layout)], tmp_path_factory.mktemp("out") / "all")


def test_own_layout_has_four_splits_of_disjoint_speakers(whole: PreparedFolder) -> None:
    counts = {split: len(whole.cuts(split)) for split in whole.splits()}
    assert counts == {"train": 16, "dev": 8, "test": 8, "corpus-test": 8}
    found = [speakers(whole, split) for split in counts]
    assert len(set().union(*found)) == sum(len(names) for names in found) == 10
    assert speakers(whole, "corpus-test") == {"0009", "0010"}
    assert {cut_text(cut) for cut in whole.cuts("test")} >= {"hello to", "hello to the world again"}


def test_kaldi_directory_gives_the_same_splits(whole: PreparedFolder, tmp_path: Path) -> None:
    corpus_layouts.make_speechocean762(tmp_path / "kaldi", {"train": 8}, kaldi=True)
    folder = run(["--source", str(tmp_path / "kaldi" / "train")], tmp_path / "out")
    assert set(folder.splits()) == {"train", "dev", "test"}
    for split in folder.splits():
        assert speakers(folder, split) == speakers(whole, split)


def test_groups_keep_the_held_out_speakers(
    own_layout: Path, whole: PreparedFolder, tmp_path: Path
) -> None:
    for group, remainder in (("adults", 0), ("children", 1)):
        # The folder above the corpus is accepted too.
        where = ["--source", str(own_layout.parent)]
        folder = run(where, tmp_path / group, "--speakers", group)
        for split in whole.splits():
            chosen = {name for name in speakers(whole, split) if int(name) % 2 == remainder}
            assert speakers(folder, split) == chosen
            assert chosen


def test_prepare_suggests_the_configuration_of_the_readme(
    own_layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["--source", str(own_layout)], tmp_path / "out")
    (suggested,) = re.findall(r"train --config (\w+)", capsys.readouterr().out)
    readme = (RECIPE / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"train --config (\w+)", readme) == [suggested]


def test_draw_follows_the_seed_and_keeps_the_proportion() -> None:
    names = [f"{number:03d}" for number in range(40)]
    ages = {name: 30 if index % 4 == 0 else 9 for index, name in enumerate(names)}
    counts = {"test": 8, "dev": 4}
    drawn = hold_out_speakers(names, ages, counts, seed=1)
    assert drawn == hold_out_speakers(reversed(names), ages, counts, seed=1)
    assert drawn != hold_out_speakers(names, ages, counts, seed=2)
    for split, adults in (("test", 2), ("dev", 1)):
        chosen = [name for name, where in drawn.items() if where == split]
        assert len(chosen) == counts[split]
        assert sum(ages[name] == 30 for name in chosen) == adults


def test_error_for_too_few_speakers(own_layout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(own_layout, capsys, "--test-speakers", "7")
    assert "there are 8 speakers, too few to hold out 7 for test and 2 for dev" in error
    assert "--dev-speakers must be at least 0, got -1" in fails(
        own_layout, capsys, "--dev-speakers", "-1"
    )


def test_errors_of_ages_name_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = corpus_layouts.make_speechocean762(tmp_path, {"train": 6}, kaldi=True) / "train"
    ages = source / "spk2age"
    lines = ages.read_text().splitlines()
    ages.write_text("\n".join([*lines[:2], "0003 six", *lines[3:]]) + "\n")
    assert f"{ages}:3 needs a speaker and an age in whole years" in fails(source, capsys)
    ages.write_text("\n".join(lines[:-1]) + "\n")
    error = fails(source, capsys, "--speakers", "adults")
    assert f"{ages} has no age for speaker 0006, who reads the utterance of" in error
    assert f"{source / 'text'}:21" in error
    ages.unlink()
    assert f"--speakers children needs {ages}" in fails(source, capsys, "--speakers", "children")
    run(["--source", str(source)], tmp_path / "out")


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = corpus_layouts.make_speechocean762(tmp_path / "corpus", {"train": 6, "test": 1})
    (corpus / "WAVE" / "SPEAKER0001" / "00010002.WAV").unlink()
    (corpus / "train" / "utt2spk").write_text(
        (corpus / "train" / "utt2spk").read_text().replace("00020001\t0002\n", "")
    )
    folder = run(["--source", str(corpus)], tmp_path / "out")
    left_out = (folder.path / "left_out.jsonl").read_text()
    assert f"{corpus / 'train' / 'text'}:3" in left_out
    assert "not in utt2spk" in left_out
    assert f"{corpus / 'train' / 'text'}:6" in left_out
    (corpus / "test" / "utt2spk").unlink()
    assert f"{corpus / 'test' / 'utt2spk'} is missing" in fails(corpus, capsys)


def test_download_unpacks_once(
    own_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(address: str, path: Path) -> None:
        fetched.append(address)
        with tarfile.open(path, "w:gz") as tar:
            tar.add(own_layout, "speechocean762")

    monkeypatch.setattr(corpus_module, "resumable_download", fetch)
    for output in ("first", "second"):
        folder = run(["--download", str(tmp_path / "download")], tmp_path / output)
        assert len(folder.cuts("corpus-test")) == 8
    assert fetched == [corpus_module.ARCHIVE]


def test_damaged_download_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(address: str, path: Path) -> None:
        path.write_bytes(b"not an archive")

    monkeypatch.setattr(corpus_module, "resumable_download", fetch)
    command = ["prepare", "speechocean762", "--download", str(tmp_path / "download")]
    assert pruned_rnnt([*command, "--output", str(tmp_path / "out")]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "download" / "speechocean762.tar.gz").exists()


@pytest.mark.parametrize("name", ["speechocean762", "speechocean762_small"])
def test_configurations_name_their_folders(name: str) -> None:
    config = load_config(ExperimentConfig, ROOT / "configs" / f"{name}.yaml")
    assert config.data.path == "data/speechocean762"
    assert config.train.folder == f"exp/{name}"
