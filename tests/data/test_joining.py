"""Silence around training utterances, and joined utterances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lhotse import CutSet, Recording, SupervisionSegment

from pruned_rnnt.data.audio.features import FeatureKind, FeatureName
from pruned_rnnt.data.input.augmentation import LOG_ENERGY_PER_DB, FeatureAugmenter
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import (
    AugmentationConfig,
    DataConfig,
    JoiningConfig,
    SpecAugmentConfig,
)
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.joining import (
    JoinedFeatures,
    groups_to_join,
    joined_utterances,
    silences_around,
    with_silence,
)
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from tests.data.recorded_speech import write_audio
from tests.tiny_corpus import make_corpus

PLAIN = AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False))
# Log-mel energy of samples that are all zero.
DIGITAL_SILENCE = -15.9424
ALWAYS = JoiningConfig(silence_probability=1.0, probability=1.0, longest_seconds=4.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("joining") / "data")


def batches(corpus: Path, joining: JoiningConfig, epoch: int = 0, **changes: Any) -> list[Batch]:
    values = {"path": str(corpus), "max_duration": 8.0, "num_workers": 0, "augmentation": PLAIN}
    loader = DataModule(DataConfig(**{**values, "joining": joining, **changes})).train_loader()
    loader.set_epoch(epoch)
    return list(loader)


def test_groups_have_each_utterance_once_and_stay_short_enough() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        durations = rng.uniform(1.0, 2.0, size=7).tolist()
        config = JoiningConfig(probability=1.0, longest_seconds=9.0, pause_seconds=0.5)
        groups = groups_to_join(durations, 7, config, rng)
        assert sorted(place for group in groups for place in group) == list(range(7))
        assert len({len(group) for group in groups[:-1]}) == 1
        assert 2 <= len(groups[0]) <= 4
        assert max(sum(durations[place] for place in group) for group in groups) <= 9.0
    assert groups_to_join(durations, 1, config, rng) == [[place] for place in range(7)]
    assert groups_to_join([5.0, 5.0], 2, config, rng) == [[0], [1]]


def test_utterances_are_unchanged_between_the_silences() -> None:
    rng = np.random.default_rng(0)
    parts = [torch.randn(30, 80) - 6, torch.randn(50, 80) - 6]
    kinds, pauses = set(), []
    for _ in range(30):
        config = JoiningConfig(
            silence_probability=0.8, silence_seconds=1.0, pause_probability=0.8, pause_seconds=0.6
        )
        utterance = joined_utterances(parts, config, rng)
        ((before, after),) = silences_around([len(utterance.features_TF)], config, rng)
        joined, begins = with_silence(utterance, before, after, rng)
        for begin, part in zip(begins, parts, strict=True):
            assert torch.equal(joined[begin : begin + len(part)], part)
        pauses.append(begins[1] - begins[0] - len(parts[0]))
        silence = joined[: begins[0]]
        assert len(silence) < 100
        assert silence.isfinite().all()
        if len(silence):
            assert silence.min() >= DIGITAL_SILENCE
            level = silence.mean().item()
            digital = bool((silence == DIGITAL_SILENCE).all())
            kinds.add("digital" if digital else "faint" if level < -8 else "background")
    assert kinds == {"digital", "faint", "background"}
    assert min(pauses) == 0
    assert 30 < max(pauses) <= 60


def test_each_joined_utterance_has_its_gain() -> None:
    rng = np.random.default_rng(0)
    parts = [torch.randn(30, 80) - 6, torch.randn(50, 80) - 6]
    joined, begins = joined_utterances(parts, JoiningConfig(gain_db=6.0), rng)
    gains_db = []
    for begin, part in zip(begins, parts, strict=True):
        difference_TF = (joined[begin : begin + len(part)] - part) / LOG_ENERGY_PER_DB
        assert difference_TF.std() < 1e-4
        gains_db.append(float(difference_TF.mean()))
    assert all(0.01 < abs(gain_db) <= 6.0 for gain_db in gains_db)
    assert abs(gains_db[0] - gains_db[1]) > 0.01


def test_silence_fills_a_batch_to_one_length() -> None:
    config = JoiningConfig(silence_probability=0.5, silence_seconds=1.0)
    lengths = [250, 200, 60]
    sides = set()
    for seed in range(60):
        found = silences_around(lengths, config, np.random.default_rng(seed))
        totals = [length + sum(pair) for length, pair in zip(lengths, found, strict=True)]
        assert all(0 <= frames <= 100 for pair in found for frames in pair)
        if totals != lengths:
            assert 250 <= totals[0] == totals[1] < 350
            assert totals[2] == min(totals[0], 260)
            sides.add(tuple(frames > 0 for frames in found[1]))
    assert sides == {(True, False), (False, True), (True, True)}
    off = JoiningConfig()
    assert silences_around(lengths, off, np.random.default_rng(0)) == [(0, 0)] * 3


def test_texts_and_times_of_joined_utterances_follow_each_other(corpus: Path) -> None:
    apart = {
        name: (text, features[:length])
        for batch in batches(corpus, JoiningConfig())
        for name, text, features, length in zip(
            batch.ids, batch.texts, batch.features_NTF, batch.feature_lengths_N, strict=True
        )
    }
    joined = batches(corpus, ALWAYS)
    names = [name for batch in joined for ids in batch.ids for name in ids.split("+")]
    assert sorted(names) == sorted(apart)
    assert any("+" in name for batch in joined for name in batch.ids)
    for batch in joined:
        assert batch.feature_lengths_N.tolist() == sorted(batch.feature_lengths_N, reverse=True)
        assert batch.lengths_before == tuple(batch.feature_lengths_N.tolist())
        for n, name in enumerate(batch.ids):
            parts = name.split("+")
            assert batch.texts[n] == " ".join(apart[part][0] for part in parts)
            own = batch.features_NTF[n, : batch.feature_lengths_N[n]]
            # Every part is there as it was, in this order.
            position = 0
            for part in parts:
                wanted = apart[part][1]
                places = (own == wanted[0]).all(1).nonzero()[:, 0].tolist()
                position = next(
                    place
                    for place in places
                    if place >= position and torch.equal(own[place : place + len(wanted)], wanted)
                )
                position += len(wanted)


def test_draws_depend_on_seed_epoch_and_ids_only(corpus: Path) -> None:
    first = batches(corpus, ALWAYS, epoch=3)
    again = batches(corpus, ALWAYS, epoch=3, num_workers=1)
    other = batches(corpus, ALWAYS, epoch=4)
    for one, two in zip(first, again, strict=True):
        assert one.ids == two.ids
        assert torch.equal(one.features_NTF, two.features_NTF)
    assert [b.ids for b in first] != [b.ids for b in other]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pause_probability": 1.0, "pause_seconds": 1.0},
        {"silence_probability": 1.0, "silence_seconds": 1.0},
    ],
)
def test_joined_batches_stay_within_the_bound_on_the_lattice(
    corpus: Path, changes: dict[str, float]
) -> None:
    def nodes(batch: Batch) -> int:
        frames = -(-int(batch.feature_lengths_N.max()) // 4)
        return len(batch) * frames * (int(batch.target_lengths_N.max()) + 1)

    joining = JoiningConfig(
        **{"probability": 1.0, "longest_seconds": 8.0, "pause_probability": 0.0, **changes}
    )
    unbound = max(map(nodes, batches(corpus, joining)))
    apart = max(map(nodes, batches(corpus, JoiningConfig())))
    assert unbound > apart
    joined = 0
    for bound in np.linspace(apart, unbound, 8).astype(int).tolist():
        for batch in batches(corpus, joining, max_lattice=bound):
            # Silence around utterances that are not joined may exceed it.
            if any("+" in name for name in batch.ids):
                assert nodes(batch) <= bound
                joined += 1
    assert joined > 0


def test_the_longest_joined_utterance_is_a_usual_length(corpus: Path) -> None:
    module = DataModule(DataConfig(path=str(corpus), joining=ALWAYS))
    module.train_loader()
    assert module.p99_duration == 4.0


def test_validation_is_unchanged(corpus: Path) -> None:
    plain, joined = (
        [batch.features_NTF for batch in DataModule(config).valid_loader()]
        for config in (DataConfig(path=str(corpus)), DataConfig(path=str(corpus), joining=ALWAYS))
    )
    assert all(torch.equal(one, two) for one, two in zip(plain, joined, strict=True))


def test_pauses_count_for_the_longest_utterance() -> None:
    config = JoiningConfig(
        probability=1.0, longest_seconds=20.0, pause_probability=0.1, pause_seconds=5.0
    )
    part = torch.zeros(400, 80)
    longest = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        for group in groups_to_join([4.0] * 16, 16, config, rng):
            joined, _ = joined_utterances([part] * len(group), config, rng)
            longest = max(longest, len(joined))
    assert 800 <= longest <= 2000
    # Of n utterances there are n - 1 pauses.
    rng = np.random.default_rng(0)
    config = JoiningConfig(probability=1.0, longest_seconds=5.0, pause_seconds=1.0)
    assert len(groups_to_join([2.0, 2.0], 2, config, rng)) == 1


@pytest.mark.parametrize("kind", [FeatureKind(), FeatureKind("nemo"), FeatureKind("nemo", 128)])
def test_silence_has_the_energies_of_the_features(kind: FeatureKind) -> None:
    rng = np.random.default_rng(0)
    # -35 dB, the loudest noise that is inserted.
    noise_S = (rng.standard_normal(160_000) * 10 ** (-35 / 20)).astype(np.float32)
    loudest_F = kind.of_recording(noise_S).mean(0)
    digital = kind.of_recording(np.zeros(16_000, dtype=np.float32)).max().item()
    speech = JoinedFeatures(torch.full((50, kind.num_mel_bins), digital), (0,))
    drawn = []
    for _ in range(200):
        joined, _ = with_silence(speech, 100, 0, rng, kind.name)
        drawn.append(joined[:100])
    means = torch.stack([each.mean(0) for each in drawn])
    assert min(each.min().item() for each in drawn) == pytest.approx(digital, abs=1e-3)
    # Of colours up to white, which have less energy in the highest bins.
    over_db = ((means - loudest_F) / LOG_ENERGY_PER_DB).mean(1)
    assert -13 < over_db.max() < 0


@pytest.mark.parametrize("name", ["fbank", "nemo"])
def test_silence_in_a_batch_is_that_of_its_features(
    name: FeatureName, corpus: Path, tmp_path: Path
) -> None:
    kind = FeatureKind(name)
    cut = Recording.from_file(write_audio(tmp_path / "a.wav", 1.0)).to_cut()
    cut.supervisions = [SupervisionSegment("a", "a", 0, 1.0, text="a")]
    dataset = SpeechDataset(
        PreparedFolder(corpus).tokenizer(),
        stored=False,
        kind=kind,
        augmenter=FeatureAugmenter(PLAIN, seed=0),
        joining=JoiningConfig(silence_probability=1.0),
    )
    least = min(
        dataset[(epoch, CutSet.from_cuts([cut]))].features_NTF.min().item() for epoch in range(30)
    )
    digital = kind.of_recording(np.zeros(16_000, dtype=np.float32)).max().item()
    assert least == pytest.approx(digital, abs=1e-3)
