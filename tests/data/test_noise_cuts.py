"""Noises to mix in: where their files are, and of which kind they must be."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest
from lhotse import CutSet

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig
from pruned_rnnt.data.input.prepared_folder import PreparedFolder, read_cuts
from tests.data.own_corpus import prepare
from tests.data.recorded_speech import text_of, truncate, write_audio


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
def test_noise_paths_do_not_depend_on_working_directory(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(root, kind, root / "noise" / kind / "noise_cuts.jsonl.gz")
    with caplog.at_level(logging.WARNING, logger="pruned_rnnt"):
        assert sum(len(batch) for batch in data.train_loader()) == 4
    assert not caplog.messages


def test_noises_without_features_are_refused(root: Path, tmp_path: Path) -> None:
    plain = read_cuts(root / "noise/waveform/noise_cuts.jsonl.gz")
    some = read_cuts(root / "noise/stored/noise_cuts.jsonl.gz")
    path = tmp_path / "some.jsonl"
    for cuts, name in ((list(plain), "n0"), ([*some, *plain], "n0")):
        CutSet.from_cuts(cuts).to_file(path)
        with pytest.raises(ValueError, match=rf"{name}-0 is not a cut with features, which data"):
            data_of(root, "stored", path).train_loader()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("noise.jsonl", b"junk\n", "noise.jsonl:1 is not a valid line of a lhotse manifest"),
        ("noise.jsonl", b"", "has no cuts"),
        ("noise.jsonl.gz", gzip.compress(b"\n", mtime=0), "has no cuts"),
        ("noise.jsonl.gz", b"junk\n", "is damaged after line 0"),
        ("noise.jsonl.gz", None, "no manifest of cuts at .*prepare musan` makes noises"),
    ],
)
def test_error_names_file_without_noises(
    root: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        data_of(root, "stored", path).train_loader()
    assert str(error.value).startswith(f"data.augmentation.noise_cuts={path}")


@pytest.mark.parametrize("kind", ["stored", "waveform"])
def test_noise_with_shards_speeds_and_mixed_rates(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything at once: speech and noises in tar files, of several rates, sped up and masked."""
    for name, count in (("speech", 10), ("noise", 4)):
        rows = []
        for index in range(count):
            file = write_audio(tmp_path / name / f"{index}.wav", 1.5, (8000, 16000)[index % 2])
            rows.append(f"{file.name}\t{text_of(index)}\n")
        (tmp_path / name / "table.tsv").write_text("".join(rows))
        options = ["--shar", "--features", kind, "--shard-size", "3"]
        options += ["--dev-share", "0", "--test-share", "0"]
        prepare(tmp_path / name / "table.tsv", tmp_path / f"{name}-out", *options)
    folder = PreparedFolder(tmp_path / "noise-out")
    noises = CutSet.from_cuts(c for path in folder.manifests("train") for c in read_cuts(path))
    noises.to_file(tmp_path / "noises.jsonl.gz")
    config = DataConfig(
        path=str(tmp_path / "speech-out"),
        features=kind,
        speed_factors=(0.9, 1.1) if kind == "waveform" else (),
        num_workers=0,
        filters=FilterConfig(subsampling_factor=1),
        augmentation=AugmentationConfig(
            noise_cuts=str(tmp_path / "noises.jsonl.gz"), noise_cuts_probability=1.0, tempo=0.1
        ),
    )
    with caplog.at_level(logging.WARNING, logger="pruned_rnnt"):
        loaded = sum(len(batch) for batch in DataModule(config).train_loader())
    assert loaded == (30 if kind == "waveform" else 10)
    assert not caplog.messages


def test_damaged_tar_files_are_skipped_with_noise(tmp_path: Path) -> None:
    for name, count in (("speech", 6), ("noise", 3)):
        rows = []
        for index in range(count):
            file = write_audio(tmp_path / name / f"{index}.wav", 1.5)
            rows.append(f"{file.name}\t{text_of(index)}\n")
        (tmp_path / name / "table.tsv").write_text("".join(rows))
        options = ["--features", "waveform", "--dev-share", "0", "--test-share", "0", "--shar"]
        prepare(tmp_path / name / "table.tsv", tmp_path / f"{name}-out", *options)
    (noises,) = PreparedFolder(tmp_path / "noise-out").manifests("train")
    truncate(tmp_path / "speech-out/train/recording.000000.tar")
    config = DataConfig(
        path=str(tmp_path / "speech-out"),
        features="waveform",
        num_workers=0,
        filters=FilterConfig(subsampling_factor=1),
        augmentation=AugmentationConfig(noise_cuts=str(noises), noise_cuts_probability=1.0),
    )
    loader = DataModule(config).train_loader()
    loaded = sum(len(batch) for batch in loader)
    assert 0 < loaded < 6
    assert loader.left_out == 6 - loaded
