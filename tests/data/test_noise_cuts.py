"""Noises to mix in: where their files are, and of which kind they must be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from own_corpus import prepare
from recorded_speech import text_of, write_audio

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.augmentation import AugmentationConfig
from pruned_rnnt.data.datamodule import DataConfig, DataModule
from pruned_rnnt.data.filters import FilterConfig


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speech and noises, both with stored features and as waveforms; all paths were relative."""
    root = tmp_path_factory.mktemp("root")
    names = [write_audio(root / f"u{index}.wav", 1.0).name for index in range(6)]
    rows = [f"{name}\t{text_of(index)}\n" for index, name in enumerate(names)]
    (root / "table.tsv").write_text("".join(rows))
    for index in range(2):
        write_audio(root / f"sounds/noise/n{index}.wav", 2.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for kind in ("stored", "waveform"):
            prepare(Path("table.tsv"), Path("speech") / kind, "--features", kind)
            options = ["--parts", "noise", "--features", kind, "--output", f"noise/{kind}"]
            assert pruned_rnnt(["prepare", "musan", "--source", "sounds", *options]) == 0
    return root


def data_of(root: Path, kind: str, noise_cuts: Path) -> DataModule:
    config = DataConfig(
        path=str(root / "speech" / kind),
        features=kind,
        num_workers=0,
        filters=FilterConfig(subsampling_factor=1),
        augmentation=AugmentationConfig(noise_cuts=str(noise_cuts), noise_cuts_probability=1.0),
    )
    return DataModule(config)


@pytest.mark.parametrize("kind", ["stored", "waveform"])
def test_noises_are_found_from_anywhere(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(root, kind, root / "noise" / kind / "noise_cuts.jsonl.gz")
    with caplog.at_level(logging.WARNING, logger="pruned_rnnt"):
        assert sum(len(batch) for batch in data.train_loader()) == 4
    assert not caplog.messages


def test_noises_without_features_are_refused(root: Path) -> None:
    path = root / "noise/waveform/noise_cuts.jsonl.gz"
    with pytest.raises(ValueError, match=r"noise_cuts=.* has cuts without features, which data"):
        data_of(root, "stored", path).train_loader()


def test_a_file_that_is_no_manifest_is_named(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "noise.jsonl"
    for content in ("junk\n", ""):
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"noise_cuts={path} is no manifest of cuts: "):
            data_of(root, "stored", path).train_loader()
