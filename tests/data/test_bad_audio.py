"""Files that break after they were prepared: named, counted, left out or a reason to stop."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import MonoCut, Recording

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.audio.recordings import UnusableUtterance, read_samples
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig
from pruned_rnnt.data.input.loader import BatchLoader
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from tests.data.recorded_speech import text_of, truncate, write_audio

COUNT = 12


def make(folder: Path, features: str) -> PreparedFolder:
    """A prepared folder in folder/data of the audio files in folder/audio."""
    rows = []
    for index in range(COUNT):
        write_audio(folder / "audio" / f"u{index}.wav", 1.0 + 0.1 * index)
        rows.append(f"audio/u{index}.wav\t{text_of(index)}\n")
    (folder / "table.tsv").write_text("".join(rows))
    arguments = ["prepare", "own", str(folder / "table.tsv"), "--output", str(folder / "data")]
    splits = ["--dev-share", "0", "--test-share", "0", "--num-jobs", "1", "--tokens", "char"]
    assert pruned_rnnt([*arguments, *splits, "--features", features]) == 0
    return PreparedFolder(folder / "data")


@pytest.fixture
def waves(tmp_path: Path) -> PreparedFolder:
    return make(tmp_path, "waveform")


def data_of(folder: PreparedFolder, features: str = "waveform", **changes: object) -> DataModule:
    values: dict[str, object] = {
        "path": str(folder.path),
        "features": features,
        "num_workers": 0,
        "max_duration": 6.0,
        "filters": FilterConfig(subsampling_factor=1),
    }
    return DataModule(DataConfig(**{**values, **changes}))


def audio(folder: PreparedFolder, index: int) -> Path:
    return folder.path.parent / "audio" / f"u{index}.wav"


def spoil(folder: PreparedFolder) -> dict[int, Path]:
    """Truncates, replaces, empties and removes four files."""
    truncate(audio(folder, 3))
    audio(folder, 5).write_text("no audio")
    audio(folder, 7).write_bytes(b"")
    audio(folder, 9).unlink()
    return {index: audio(folder, index) for index in (3, 5, 7, 9)}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("pruned_rnnt")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING, logger="pruned_rnnt"):
        yield caplog
    logger.propagate = propagate


def indices(batches: list[Batch]) -> list[int]:
    """Of the utterances read, spares excepted."""
    names = [name for batch in batches for name in batch.ids if not name.endswith("_dup0")]
    return sorted(int(name.rpartition("-u")[2]) for name in names)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_skipped_logged_and_counted(
    waves: PreparedFolder, workers: int, log: pytest.LogCaptureFixture
) -> None:
    bad = spoil(waves)
    loader = data_of(waves, num_workers=workers).train_loader()
    batches = list(loader)
    assert indices(batches) == [index for index in range(COUNT) if index not in bad]
    assert loader.left_out == len(bad)
    lines = [line for line in log.messages if "bad audio" in line]
    for path in bad.values():
        (line,) = [line for line in lines if str(path) in line]
        assert len(line) < 600
        assert "extra info" not in line


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_names_the_file(waves: PreparedFolder, workers: int) -> None:
    truncate(audio(waves, 4))
    # The message alone, also where torch would wrap it into the traceback of a worker.
    with pytest.raises(ValueError, match=r"^\S+ \(.*u4\.wav\).*data\.bad_audio=skip.*$"):
        list(data_of(waves, bad_audio="stop", num_workers=workers).train_loader())


@pytest.mark.slow
def test_unreadable_batch_gets_a_substitute(waves: PreparedFolder) -> None:
    for index in range(1, COUNT):
        audio(waves, index).unlink()
    loader: BatchLoader = data_of(waves, max_duration=2.5).train_loader()
    batches = list(loader)
    assert loader.left_out == COUNT - 1
    names = [name for batch in batches for name in batch.ids]
    assert names.count("00000001-u0") == 1
    assert set(names) == {"00000001-u0", "00000001-u0_dup0"}
    assert all(len(batch) == 1 for batch in batches)
    audio(waves, 0).unlink()
    with pytest.raises(ValueError, match="no utterance of a batch can be read"):
        list(data_of(waves).train_loader())


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_among_bad_files(waves: PreparedFolder, workers: int) -> None:
    spoil(waves)
    data = data_of(waves, num_workers=workers, max_duration=3.0)
    loader = data.train_loader()
    whole = [(batch.ids, batch.features_NTF.sum().item()) for batch in loader]
    assert len(whole) > 4
    for stop in (1, 3):
        resumed = data.train_loader()
        resumed.load_state_dict(loader.state_dict(stop))
        rest = [(batch.ids, batch.features_NTF.sum().item()) for batch in resumed]
        assert rest == whole[stop:]


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_stored_features(tmp_path: Path, damage: str) -> None:
    folder = make(tmp_path, "stored")
    (archive,) = (folder.path / "features").iterdir()
    if damage == "truncated":
        truncate(archive, 0.7)
    else:
        shutil.move(archive, tmp_path / "elsewhere")
    data = data_of(folder, "stored")
    if damage == "missing":
        with pytest.raises(ValueError, match=rf"no utterance of a batch.*{archive.name}"):
            list(data.train_loader())
        return
    loader = data.train_loader()
    read = indices(list(loader))
    assert 0 < len(read) < COUNT
    assert loader.left_out == COUNT - len(read)


def test_validation_skips_bad_files(waves: PreparedFolder) -> None:
    bad = spoil(waves)
    loader = data_of(waves).test_loader("train")
    assert indices(list(loader)) == [index for index in range(COUNT) if index not in bad]
    assert loader.left_out == len(bad)
    for index in range(2, COUNT):
        audio(waves, index).unlink(missing_ok=True)
    loader = data_of(waves, valid_max_duration=2.5).test_loader("train")
    batches = list(loader)
    assert [batch.ids for batch in batches] == [("00000002-u1",), ("00000001-u0",)]
    assert loader.left_out == COUNT - 2


def test_speech_is_kept_if_its_noise_is_bad(
    waves: PreparedFolder, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    noises = make(tmp_path / "noise", "waveform")
    for path in (tmp_path / "noise" / "audio").iterdir():
        truncate(path, 0.1)
    mixing = AugmentationConfig(
        noise_cuts=str(noises.cuts_path("train")), noise_cuts_probability=1.0
    )
    loader = data_of(waves, augmentation=mixing).train_loader()
    assert indices(list(loader)) == list(range(COUNT))
    assert loader.left_out >= COUNT
    assert "noise/audio" in log.messages[0]


@pytest.mark.parametrize("split", ["train", "dev"])
def test_missing_stored_features_are_an_error(waves: PreparedFolder, split: str) -> None:
    data = data_of(waves, "stored")
    shutil.copy(waves.cuts_path("train"), waves.cuts_path("dev"))
    with pytest.raises(ValueError, match=r"set data\.features=waveform"):
        data.train_loader() if split == "train" else data.valid_loader()


@pytest.mark.parametrize(("channels", "details"), [(1, ""), (8, "channel 0 of 8: see --channel")])
def test_error_names_silent_channel(tmp_path: Path, channels: int, details: str) -> None:
    samples = np.zeros((16000, channels), dtype=np.float32)
    samples[:, 1:] = 0.1
    soundfile.write(tmp_path / "a.wav", samples, 16000)
    cut = Recording.from_file(tmp_path / "a.wav").to_cut()
    if channels > 1:
        cut = MonoCut(id="a", start=0.0, duration=1.0, channel=0, recording=cut.recording)
    with pytest.raises(UnusableUtterance, match="silent") as error:
        read_samples(cut)
    assert error.value.details == details
