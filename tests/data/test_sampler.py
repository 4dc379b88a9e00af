"""Bounds of batches: the padded lattice never exceeds what was asked for, and nothing is lost."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from lhotse import Recording

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig, SpecAugmentConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig
from pruned_rnnt.data.input.prepared_folder import building, write_report
from pruned_rnnt.data.input.sampler import at_speed, duration_bins, split_by_lattice
from pruned_rnnt.data.prepare.generated_corpus import Utterance, UtteranceWriter, write_cuts
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from tests.data.recorded_speech import write_audio
from tests.data.spoken_corpus import noise

BOUND = 2000


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty utterances of like duration, of which some have texts many times as long."""
    output = tmp_path_factory.mktemp("outliers") / "corpus"
    rng = random.Random(0)
    with building(output) as folder:
        with UtteranceWriter(folder, "train") as writer:
            for index in range(60):
                words = 40 if index % 10 == 0 else rng.randint(1, 4)
                if index == 33:
                    words = 90
                writer.add(
                    Utterance(
                        id=f"u{index}",
                        samples_S=noise(1.0 + 0.01 * index, index),
                        text=" ".join(["a"] * words),
                        speaker="s",
                    )
                )
            write_cuts(folder, "train", writer.cuts)
        train_tokenizer(["a a"], TokenizerConfig(kind="word")).save(folder / "tokens")
        write_report(folder, {})
    return output


def data_of(path: Path, rank: int = 0, world_size: int = 1, **changes: object) -> DataModule:
    values: dict[str, object] = {
        "path": str(path),
        "max_duration": 30.0,
        "max_lattice": BOUND,
        "num_workers": 0,
        # One encoder frame a feature frame less than symbols would be left out.
        "filters": FilterConfig(subsampling_factor=1),
        "augmentation": AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False)),
    }
    return DataModule(DataConfig(**{**values, **changes}), rank=rank, world_size=world_size)


@pytest.mark.parametrize("bound", [50, 400, 5000])
def test_split_groups_keep_the_bound_and_all_utterances(bound: int) -> None:
    rng = random.Random(1)
    for _ in range(50):
        sizes = [(rng.randint(1, 20), rng.randint(1, 9)) for _ in range(rng.randint(1, 40))]
        groups = split_by_lattice(sizes, bound)
        assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
        for group in groups:
            frames = max(sizes[index][0] for index in group)
            symbols = max(sizes[index][1] for index in group)
            assert len(group) == 1 or len(group) * frames * symbols <= bound
    assert split_by_lattice([(10, 5)] * 8, 400) == [list(range(7, -1, -1))]


@pytest.mark.parametrize("tempo", [0.0, 0.2])
def test_no_batch_exceeds_the_bound(outliers: Path, tempo: float) -> None:
    augmentation = AugmentationConfig(tempo=tempo, spec_augment=SpecAugmentConfig(enabled=False))
    bound = 20_000
    data = data_of(outliers, max_lattice=bound, augmentation=augmentation)
    seen: Counter[str] = Counter()
    for batch in data.train_loader():
        seen.update(batch.ids)
        symbols = int(batch.target_lengths_N.max()) + 1
        assert len(batch) * int(batch.feature_lengths_N.max()) * symbols <= bound
        assert sum(batch.durations) <= 30.0
    assert seen == Counter(f"u{index}" for index in range(60))
    unbound = data_of(outliers, max_lattice=0)
    largest = max(
        len(b) * int(b.feature_lengths_N.max()) * (int(b.target_lengths_N.max()) + 1)
        for b in unbound.train_loader()
    )
    assert largest > 3 * bound


def test_utterance_exceeding_the_bound_is_left_out(outliers: Path) -> None:
    data = data_of(outliers, max_lattice=10_000)
    ids = [name for batch in data.train_loader() for name in batch.ids]
    assert sorted(ids) == sorted(f"u{index}" for index in range(60) if index != 33)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lazy", [False, True])
def test_resume_between_the_parts_of_a_batch(outliers: Path, workers: int, lazy: bool) -> None:
    data = data_of(outliers, max_lattice=20_000, num_workers=workers, lazy=lazy)
    loader = data.train_loader()
    loader.set_epoch(2)
    whole = [batch.ids for batch in loader]
    assert len(whole) > 6
    for stop in (1, 2, 3, len(whole)):
        resumed = data.train_loader()
        resumed.load_state_dict({**loader.state_dict(stop), "epoch": 2})
        resumed.set_epoch(2)
        assert [batch.ids for batch in resumed] == whole[stop:]


def small_batches(batches: list[Batch], most: float) -> int:
    return sum(len(batch) * max(batch.durations) < 0.8 * most for batch in batches)


@pytest.mark.filterwarnings("ignore:Your 'buffer_size'")
def test_utterances_are_read_as_far_as_the_buffer_reaches(outliers: Path) -> None:
    loader = data_of(outliers, lazy=True, buffer_size=5, max_cuts=1).train_loader()
    order = [cut.id for cut in loader.sampler.source]
    ids = [batch.ids[0] for batch in loader]
    assert sorted(ids) == sorted(order) != ids
    assert max(order.index(name) - place for place, name in enumerate(ids)) <= 5


@pytest.mark.parametrize("lazy", [False, True])
def test_an_epoch_ends_with_full_batches(outliers: Path, lazy: bool) -> None:
    """What is left in buckets, of which each would have made a batch, is joined."""
    data = data_of(outliers, max_duration=25.0, max_lattice=0, lazy=lazy)
    batches = list(data.train_loader())
    assert Counter(name for b in batches for name in b.ids) == Counter(f"u{i}" for i in range(60))
    assert all(len(batch) * max(batch.durations) <= 25.0 for batch in batches)
    assert small_batches(batches, 25.0) <= 1


def test_an_epoch_of_an_earlier_version_goes_on_with_its_batches(outliers: Path) -> None:
    data = data_of(outliers, max_duration=25.0, max_lattice=0)
    loader = data.train_loader()
    loader.sampler.small_batches_epoch = 0
    first = next(iter(loader)).ids
    state = loader.state_dict(1)
    del state["full_batches"]
    resumed = data.train_loader()
    resumed.load_state_dict(state)
    rest = list(resumed)
    left = [f"u{index}" for index in range(60) if f"u{index}" not in first]
    assert Counter(name for batch in rest for name in batch.ids) == Counter(left)
    assert small_batches(rest, 25.0) > 1
    resumed.set_epoch(1)
    assert small_batches(list(resumed), 25.0) <= 1


def test_epoch_restarts_between_the_parts_of_a_batch(outliers: Path) -> None:
    loader = data_of(outliers, max_lattice=20_000).train_loader()
    loader.set_epoch(1)
    whole = [batch.ids for batch in loader]
    for stop in range(1, len(whole)):
        batches = iter(loader)
        assert [next(batches).ids for _ in range(stop)] == whole[:stop]
    loader.set_epoch(2)
    loader.set_epoch(1)
    assert [batch.ids for batch in loader] == whole


def test_ranks_have_the_same_number_of_bounded_batches(outliers: Path) -> None:
    ranks = [
        [batch.ids for batch in data_of(outliers, rank, 2, max_lattice=20_000).train_loader()]
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1])
    all_ids = [name for batches in ranks for batch in batches for name in batch]
    assert {name.partition("_dup")[0] for name in all_ids} == {f"u{i}" for i in range(60)}


def test_resume_beyond_the_data_is_refused(outliers: Path) -> None:
    loader = data_of(outliers).train_loader()
    with pytest.raises(ValueError, match="the data now give only"):
        loader.load_state_dict(loader.state_dict(1000))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_utterances_train(outliers: Path, count: int, tmp_path: Path) -> None:
    with building(tmp_path / "few") as folder:
        with UtteranceWriter(folder, "train") as writer:
            for index in range(count):
                writer.add(
                    Utterance(id=f"u{index}", samples_S=noise(1.0, index), text="a", speaker="s")
                )
            write_cuts(folder, "train", writer.cuts)
        DataModule(DataConfig(path=str(outliers))).tokenizer.save(folder / "tokens")
        write_report(folder, {})
    batches = list(data_of(tmp_path / "few").train_loader())
    assert sum(len(batch) for batch in batches) == count


def test_duration_bins_are_sorted(outliers: Path) -> None:
    cuts = list(data_of(outliers).folder.cuts("train"))
    bins = duration_bins(cuts, 4)
    assert bins == sorted(bins)
    assert 2 <= len(bins) <= 4


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize("speed", [0.9, 0.93, 0.95, 1.07])
def test_copies_at_other_speeds_are_cheap_to_resample(
    tmp_path: Path, rate: int, speed: float
) -> None:
    """lhotse's filter has as many rows as the rate has phases: seconds for thousands of them."""
    cut = Recording.from_file(write_audio(tmp_path / "a.wav", 1.0, rate)).to_cut()
    cut = at_speed(cut.truncate(offset=0.2, duration=0.5), speed)
    phases = cut.sampling_rate // math.gcd(round(cut.sampling_rate * speed), cut.sampling_rate)
    assert phases <= 100
    assert cut.duration == pytest.approx(0.5 / speed, abs=1e-3)
    assert cut.load_audio().shape == (1, cut.num_samples)
