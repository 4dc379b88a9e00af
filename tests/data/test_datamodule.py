"""Batches: what is in them, and that workers, ranks and resuming do not change them."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lhotse import CutSet, NumpyFilesWriter, Recording, SupervisionSegment
from lhotse.utils import fastcopy

from pruned_rnnt.data.audio.features import frame_count
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig, SpecAugmentConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig, cut_text, encoder_frames
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from tests import tiny_corpus
from tests.data.recorded_speech import write_audio
from tests.data.spoken_corpus import TEXTS, make_corpus

TRAIN = 40
PLAIN = AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "corpus", TRAIN)


def config(corpus: Path, **changes: Any) -> DataConfig:
    values: dict[str, Any] = {
        "path": str(corpus),
        "max_duration": 12.0,
        "num_workers": 0,
        "filters": FilterConfig(max_duration=5.0),
        "augmentation": AugmentationConfig(tempo=0.1, frequency_warp=0.1, volume_db=3.0),
        "seed": 7,
    }
    return DataConfig(**{**values, **changes})


def fingerprint(batch: Batch) -> tuple[Any, ...]:
    return (
        batch.ids,
        batch.features_NTF.double().sum().item(),
        batch.feature_lengths_N.tolist(),
        batch.targets_NU.tolist(),
    )


def epoch_of(data: DataModule, epoch: int = 0) -> list[tuple[Any, ...]]:
    loader = data.train_loader()
    loader.set_epoch(epoch)
    return [fingerprint(batch) for batch in loader]


def test_batch_contents(corpus: Path) -> None:
    data = DataModule(config(corpus, augmentation=PLAIN))
    cuts = {cut.id: cut for cut in PreparedFolder(corpus).cuts("train")}
    seen = []
    for batch in data.train_loader():
        seen += batch.ids
        assert batch.features_NTF.dtype == torch.float32
        assert batch.targets_NU.dtype == batch.target_lengths_N.dtype == torch.int32
        assert batch.feature_lengths_N.dtype == torch.int64
        assert batch.feature_lengths_N.tolist() == sorted(batch.feature_lengths_N, reverse=True)
        assert batch.features_NTF.shape[1] == batch.feature_lengths_N.max()
        assert sum(batch.durations) <= 12.0
        for n, name in enumerate(batch.ids):
            cut, frames = cuts[name], int(batch.feature_lengths_N[n])
            stored = torch.from_numpy(cut.load_features())
            assert torch.equal(batch.features_NTF[n, :frames], stored)
            assert (batch.features_NTF[n, frames:] < -20).all()
            symbols = int(batch.target_lengths_N[n])
            ids = batch.targets_NU[n, :symbols].tolist()
            assert data.tokenizer.decode(ids) == batch.texts[n] == cut.supervisions[0].text
            assert (batch.targets_NU[n, symbols:] == 0).all()
            assert [word.word for word in batch.words[n]] == batch.texts[n].split()
            assert batch.words[n][1].start == pytest.approx(0.1)
    assert sorted(seen) == sorted(f"train-{i}" for i in range(TRAIN))


def test_filters_log_counts_and_ids(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("pruned_rnnt")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, logger="pruned_rnnt"):
        DataModule(config(corpus)).train_loader()
    logger.propagate = propagate
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert "40 cuts, 3 left out" in line
    for part in ("empty text (no-text)", "too short for its symbols (too-short)"):
        assert f"1 {part}" in line
    assert "longer than 5.0 s (too-long)" in line


def test_no_cuts_left_is_an_error(corpus: Path) -> None:
    strict = config(corpus, filters=FilterConfig(max_symbols=1, max_duration=5.0))
    with pytest.raises(
        ValueError, match=r"the filters leave no training utterances.*more than 1 symbols"
    ):
        DataModule(strict).train_loader()


@pytest.mark.parametrize("lazy", [False, True])
def test_an_empty_split_is_an_error(tmp_path: Path, lazy: bool) -> None:
    empty = config(tiny_corpus.make_corpus(tmp_path / "empty", train=0, dev=1), lazy=lazy)
    with pytest.raises(ValueError, match=r"split 'train' of .*empty has no utter.*data\.train"):
        DataModule(empty).train_loader()


def test_something_bounds_the_batches(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.max_duration is inf.*data\.max_cuts"):
        DataModule(config(corpus, max_duration=math.inf)).train_loader()
    bounded = DataModule(config(corpus, max_duration=math.inf, max_cuts=4)).train_loader()
    assert max(map(len, bounded)) == 4


@pytest.mark.parametrize("factor", [4])
def test_encoder_frames_is_a_lower_bound(factor: int) -> None:
    for frames in range(200):
        unpadded = max(0, ((frames - 7) // 2 + 1) // 2)
        assert encoder_frames(frames, factor) <= unpadded


@pytest.mark.parametrize("features", ["stored", "waveform"])
def test_same_batches_for_any_number_of_workers(corpus: Path, features: str) -> None:
    expected = epoch_of(DataModule(config(corpus, features=features)))
    assert len(expected) > 3
    for workers in (1, 2):
        again = DataModule(config(corpus, features=features, num_workers=workers))
        assert epoch_of(again) == expected


def test_epochs_and_seeds_differ(corpus: Path) -> None:
    data = DataModule(config(corpus))
    first = epoch_of(data)
    assert epoch_of(data, epoch=1) != first
    assert epoch_of(DataModule(config(corpus, seed=8))) != first
    assert epoch_of(data) == first


@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lazy", [False, True])
def test_resume_is_exact(corpus: Path, workers: int, lazy: bool) -> None:
    data = DataModule(config(corpus, num_workers=workers, lazy=lazy))
    whole = epoch_of(data, epoch=3)
    loader = data.train_loader()
    loader.set_epoch(3)
    batches = iter(loader)
    for stop in range(3):
        assert fingerprint(next(batches)) == whole[stop]
    state = loader.state_dict(3)
    del batches
    kept = copy.deepcopy(state)
    resumed = data.train_loader()
    resumed.load_state_dict(state)
    assert state == kept
    resumed.set_epoch(3)
    assert [fingerprint(batch) for batch in resumed] == whole[3:]
    resumed.set_epoch(4)
    assert [fingerprint(batch) for batch in resumed] == epoch_of(data, epoch=4)


def test_resume_at_the_end_of_an_epoch(corpus: Path) -> None:
    data = DataModule(config(corpus))
    count = len(epoch_of(data))
    loader = data.train_loader()
    loader.load_state_dict(data.train_loader().state_dict(count))
    assert list(loader) == []


@pytest.mark.parametrize(
    ("key", "change", "advice"),
    [
        ("seed", {"seed": 8}, "keep data.seed="),
        ("world_size", {}, "keep the number of processes at 1"),
    ],
)
def test_resume_with_other_settings_is_refused(
    corpus: Path, key: str, change: dict, advice: str
) -> None:
    state = DataModule(config(corpus)).train_loader().state_dict(1)
    world_size = 2 if key == "world_size" else 1
    other = DataModule(config(corpus, **change), world_size=world_size).train_loader()
    with pytest.raises(ValueError, match=f"cannot resume the data with {key}.*{advice}"):
        other.load_state_dict(state)


def test_ranks_share_an_epoch(corpus: Path) -> None:
    def ids(rank: int) -> list[tuple[str, ...]]:
        data = DataModule(config(corpus), rank=rank, world_size=2)
        return [batch.ids for batch in data.train_loader()]

    first, second = ids(0), ids(1)
    assert len(first) == len(second)
    all_ids = [name for batch in first + second for name in batch]
    assert {name.partition("_dup")[0] for name in all_ids} == {f"train-{i}" for i in range(TRAIN)}
    assert len(set(all_ids)) == len(all_ids)


def test_validation_has_every_utterance_unchanged(corpus: Path) -> None:
    data = DataModule(config(corpus))
    (batch,) = data.valid_loader()
    assert sorted(batch.ids) == sorted(f"dev-{i}" for i in range(7))
    stored = {cut.id: cut.load_features() for cut in PreparedFolder(corpus).cuts("dev")}
    assert torch.equal(
        batch.features_NTF[-1, : batch.feature_lengths_N[-1]],
        torch.from_numpy(stored[batch.ids[-1]]),
    )


@pytest.mark.parametrize("lazy", [False, True], ids=["in memory", "streamed"])
def test_waveform_features_and_speeds(
    corpus: Path, lazy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"features": "waveform", "speed_factors": (0.9, 1.1), "lazy": lazy}
    data = DataModule(config(corpus, augmentation=PLAIN, **settings))
    batches = list(data.train_loader())
    assert sum(len(batch) for batch in batches) == 3 * TRAIN
    lengths = {
        name: int(n) for b in batches for name, n in zip(b.ids, b.feature_lengths_N, strict=True)
    }
    plain, slow, fast = (lengths[f"train-3{end}"] for end in ("", "_sp0.9", "_sp1.1"))
    assert slow == pytest.approx(plain / 0.9, abs=1)
    assert fast == pytest.approx(plain / 1.1, abs=1)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{corpus} has stored features, which are not used" in warning.message
    with pytest.raises(ValueError, match="features=waveform"):
        config(corpus, speed_factors=(0.9,))


def test_speeds_need_recordings(tmp_path: Path) -> None:
    folder = tiny_corpus.make_corpus(tmp_path / "corpus")
    data = DataModule(config(folder, features="waveform", speed_factors=(0.9,)))
    with pytest.raises(ValueError, match=r"was not prepared for data\.features=waveform"):
        data.train_loader()


def test_noise_cuts_are_mixed_in(corpus: Path, tmp_path: Path) -> None:
    cuts = PreparedFolder(corpus).cuts("dev")
    noise_path = tmp_path / "noise.jsonl.gz"
    CutSet.from_cuts(cuts).to_file(noise_path)
    mixing = AugmentationConfig(
        spec_augment=SpecAugmentConfig(enabled=False),
        noise_cuts=str(noise_path),
        noise_cuts_probability=1.0,
        noise_cuts_snr_db=(0.0, 0.0),
    )
    plain = {row[0]: row for row in epoch_of(DataModule(config(corpus, augmentation=PLAIN)))}
    mixed = epoch_of(DataModule(config(corpus, augmentation=mixing)))
    assert mixed == epoch_of(DataModule(config(corpus, augmentation=mixing, num_workers=1)))
    for row in mixed:
        assert row[2:] == plain[row[0]][2:]
        assert row[1] > plain[row[0]][1]

    def energy(augmentation: AugmentationConfig) -> float:
        loader = DataModule(config(corpus, augmentation=augmentation)).train_loader()
        return sum(
            features_TF[:frames].double().exp().sum().item()
            for batch in loader
            for features_TF, frames in zip(
                batch.features_NTF, batch.feature_lengths_N.tolist(), strict=True
            )
        )

    fainter = replace(mixing, noise_cuts_snr_db=(30.0, 30.0))
    added, fainter_added = (energy(each) - energy(PLAIN) for each in (mixing, fainter))
    assert 10 * math.log10(added / fainter_added) == pytest.approx(30, abs=1)


def test_noise_is_mixed_in_with_its_probability(corpus: Path, tmp_path: Path) -> None:
    noise_path = tmp_path / "noise.jsonl.gz"
    CutSet.from_cuts(PreparedFolder(corpus).cuts("dev")).to_file(noise_path)
    quiet = AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False))
    mixing = replace(quiet, noise_cuts=str(noise_path), noise_cuts_probability=0.3)

    def sums(augmentation: AugmentationConfig, epoch: int) -> dict[str, float]:
        loader = DataModule(config(corpus, augmentation=augmentation)).train_loader()
        loader.set_epoch(epoch)
        return {
            name: features_TF[:frames].double().sum().item()
            for batch in loader
            for name, features_TF, frames in zip(
                batch.ids, batch.features_NTF, batch.feature_lengths_N.tolist(), strict=True
            )
        }

    plain = sums(quiet, 0)
    noisy = [{n for n, value in sums(mixing, e).items() if value > plain[n] + 1} for e in (0, 1)]
    for names in noisy:
        assert 4 <= len(names) <= 22
    assert noisy[0] != noisy[1]


def test_batch_moves_and_pickles(corpus: Path) -> None:
    (batch,) = DataModule(config(corpus)).test_loader("test")
    moved = batch.to("meta")
    assert moved.features_NTF.is_meta
    assert moved.targets_NU.is_meta
    assert not moved.feature_lengths_N.is_meta
    assert len(moved) == 7
    assert all(text in TEXTS for text in moved.texts)


def test_filter_allows_for_shorter_features_after_tempo_change(corpus: Path) -> None:
    tempo = 0.95
    data = DataModule(config(corpus, augmentation=replace(PLAIN, tempo=tempo)))
    needed = {
        cut.id: len(data.tokenizer.encode(cut_text(cut))) + 1
        for cut in PreparedFolder(corpus).cuts("train")
    }
    fastest = {
        cut.id: encoder_frames(int(cut.num_frames / (1 + tempo)), 4)
        for cut in PreparedFolder(corpus).cuts("train")
        if cut.duration <= 5.0 and cut_text(cut)
    }
    kept = {name for batch in data.train_loader() for name in batch.ids}
    assert kept == {name for name, frames in fastest.items() if frames >= needed[name]}
    assert kept != set(fastest)


def test_ids_that_look_like_repeated_ones(tmp_path: Path) -> None:
    """lhotse marks utterances that it repeats by the end of their ids; a user's id may end so."""
    folder = PreparedFolder(make_corpus(tmp_path / "corpus", train=2))
    cuts = CutSet.from_cuts(
        fastcopy(cut, id=f"u{n}_dup{n}") for n, cut in enumerate(islice(folder.cuts("test"), 3))
    )
    cuts.to_file(folder.cuts_path("odd"))
    names: list[str] = []
    repeats: set[str] = set()
    config = DataConfig(path=str(folder.path), num_workers=0)
    for rank in range(4):
        for batch in DataModule(config, rank=rank, world_size=4).test_loader("odd"):
            names += [name for name in batch.ids if name not in batch.repeats]
            repeats |= batch.repeats
    assert sorted(names) == sorted(cut.id for cut in cuts)
    assert len(repeats) == 1
    (batch,) = DataModule(config).test_loader("odd")
    assert not batch.repeats


def test_several_splits_are_validated_as_one(corpus: Path) -> None:
    dev, test = ([cut.id for cut in PreparedFolder(corpus).cuts(x)] for x in ("dev", "test"))
    for value in ("dev, test", ["dev", "test", "dev"]):
        both = config(corpus, valid=value)
        assert both.valid == "dev,test"
        found = [name for batch in DataModule(both).valid_loader() for name in batch.ids]
        assert sorted(found) == sorted(dev + test)
    with pytest.raises(FileNotFoundError, match=r"no split 'odd'.*splits found: dev, test, train"):
        DataModule(config(corpus, valid="dev,odd")).valid_loader()
    for empty in ([], "dev,", ""):
        with pytest.raises(ValueError, match=r"data.valid is .*needs names of splits"):
            config(corpus, valid=empty)
    with pytest.raises(ValueError, match=r"data.train is 'train,dev', needs the name of one"):
        config(corpus, train="train,dev")


def test_a_sample_of_nothing(corpus: Path) -> None:
    assert list(DataModule(config(corpus)).test_loader("dev", sample=0)) == []


def test_stored_features_of_half_precision(tmp_path: Path) -> None:
    """Their sum overflows in half precision, which would look like an infinite feature."""
    folder = PreparedFolder(make_corpus(tmp_path / "corpus", train=2))
    cut = next(iter(folder.cuts("train")))
    features_TF = np.full((2000, 80), -15.5, dtype=np.float16)
    with NumpyFilesWriter(tmp_path / "half") as writer:
        manifest = fastcopy(
            cut.features,
            num_frames=2000,
            duration=20.0,
            storage_type=writer.name,
            storage_path=str(writer.storage_path),
            storage_key=writer.write("half", features_TF),
        )
    long = fastcopy(cut, duration=20.0, features=manifest)
    dataset = SpeechDataset(folder.tokenizer(), stored=True, augmenter=None)
    batch = dataset[(0, CutSet.from_cuts([long]))]
    assert not batch.left_out
    assert batch.features_NTF.dtype == torch.float32
    assert batch.features_NTF.shape == (1, 2000, 80)


def test_features_of_a_very_short_recording(corpus: Path, tmp_path: Path) -> None:
    cut = Recording.from_file(write_audio(tmp_path / "a.wav", 0.01)).to_cut()
    cut.supervisions = [SupervisionSegment("a", "a", 0, 0.01, text="a")]
    dataset = SpeechDataset(PreparedFolder(corpus).tokenizer(), stored=False, augmenter=None)
    batch = dataset[(0, CutSet.from_cuts([cut]))]
    assert not batch.left_out
    assert batch.feature_lengths_N.tolist() == [frame_count(160)]


@pytest.mark.parametrize("factors", [(math.inf,), (0.9, 0.0), (-1.0,), (math.nan,)])
def test_speeds_that_cannot_be_used_are_named(factors: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"data\.speed_factors is \[.*needs finite speeds"):
        DataConfig(features="waveform", speed_factors=factors)


@pytest.mark.parametrize("factors", [(0.9, 0.9, 1.1), (0.9375, 1.0625), (0.937,), (0.9123, 0.9)])
def test_slow_speeds_are_named(
    factors: tuple[float, ...], corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DataModule(config(corpus, features="waveform", speed_factors=factors)).train_loader()
    slow = [message for message in caplog.messages if "half a second" in message]
    assert len(slow) == (0.9123 in factors)
    assert all("data.speed_factors has [0.9123], which" in message for message in slow)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_snr_db", (30.0, 10.0)),
        ("noise_snr_db", (math.inf, 10.0)),
        ("band_limit_hz", (4000.0, 3000.0)),
        ("band_limit_hz", (math.nan, 3000.0)),
    ],
)
def test_ranges_of_augmentation_are_checked(name: str, value: tuple[float, float]) -> None:
    used = {name.rsplit("_", 1)[0].replace("_snr", "") + "_probability": 0.5}
    with pytest.raises(ValueError, match=rf"data\.augmentation\.{name} is \[.*lower one first"):
        AugmentationConfig(**used, **{name: value})
    AugmentationConfig(**{name: value})  # earlier runs that did not use it


def test_ranges_of_earlier_runs_are_read() -> None:
    AugmentationConfig(noise_snr_db=(-10.0, -10.0), noise_probability=0.5)
    AugmentationConfig(noise_cuts_snr_db=(20.0, 10.0), noise_cuts="noise.jsonl.gz")
    AugmentationConfig(band_limit_hz=(0.0, 4000.0), band_limit_probability=0.5)
