"""Feature augmentation: what each change does, and that only (seed, epoch, id) decides."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.audio.waveform import resample
from pruned_rnnt.data.input.augmentation import (
    LOG_ENERGY_PER_DB,
    AugmentationConfig,
    FeatureAugmenter,
    SpecAugmentConfig,
    add_noise,
    limit_band,
    stretch_time,
    warp_frequency,
)
from tests.data.spoken_corpus import noise

EVERYTHING = AugmentationConfig(
    tempo=0.2,
    frequency_warp=0.2,
    tilt_db=6.0,
    volume_db=6.0,
    noise_probability=0.7,
    band_limit_probability=0.7,
)
NO_SPEC_AUGMENT = SpecAugmentConfig(enabled=False)


@pytest.fixture
def features_TF() -> torch.Tensor:
    return audio_features(noise(2.0))


def test_draws_depend_on_seed_epoch_and_id_only(features_TF: torch.Tensor) -> None:
    def draw(seed: int = 1, epoch: int = 2, cut_id: str = "a") -> torch.Tensor:
        random.seed()
        torch.manual_seed(random.randrange(1000))
        augmenter = FeatureAugmenter(EVERYTHING, seed=seed)
        return augmenter(features_TF, epoch=epoch, cut_id=cut_id)

    first = draw()
    assert torch.equal(first, draw())
    for other in (draw(seed=2), draw(epoch=3), draw(cut_id="b")):
        assert first.shape != other.shape or not torch.equal(first, other)


def test_global_generators_keep_their_state(features_TF: torch.Tensor) -> None:
    before = (random.getstate()[1], torch.get_rng_state(), np.random.get_state()[1].copy())  # noqa: NPY002
    FeatureAugmenter(EVERYTHING, seed=1)(features_TF, epoch=0, cut_id="a")
    assert random.getstate()[1] == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (np.random.get_state()[1] == before[2]).all()  # noqa: NPY002


def test_disabled_augmentation_changes_nothing(features_TF: torch.Tensor) -> None:
    augmenter = FeatureAugmenter(AugmentationConfig(spec_augment=NO_SPEC_AUGMENT), seed=1)
    assert torch.equal(augmenter(features_TF, epoch=0, cut_id="a"), features_TF)


def test_spec_augment_masks_and_keeps_the_input(features_TF: torch.Tensor) -> None:
    config = AugmentationConfig(spec_augment=SpecAugmentConfig(probability=1.0))
    original = features_TF.clone()
    masked = FeatureAugmenter(config, seed=1)(features_TF, epoch=0, cut_id="a")
    assert masked.shape == features_TF.shape
    assert not torch.equal(masked, original)
    assert torch.equal(features_TF, original)


@pytest.mark.parametrize("frames", [1, 3, 6, 7, 20])
@pytest.mark.parametrize("masks", [0, 10])
def test_short_utterances_pass(frames: int, masks: int) -> None:
    spec = SpecAugmentConfig(probability=1.0, frame_masks=masks, feature_masks=masks)
    config = AugmentationConfig(
        tempo=0.2, frequency_warp=0.2, noise_probability=1.0, spec_augment=spec
    )
    out = FeatureAugmenter(config, seed=1)(torch.randn(frames, 80), epoch=0, cut_id="a")
    assert out.shape[1] == 80
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("off", "bins", "times"),
    [
        ({}, True, True),
        ({"frame_masks": 0}, True, False),
        ({"frame_mask_size": 0}, True, False),
        ({"max_masked_fraction": 0.0}, True, False),
        ({"feature_masks": 0}, False, True),
        ({"feature_mask_size": 0}, False, True),
    ],
)
def test_a_mask_of_no_size_turns_off_masks_of_its_axis_alone(
    off: dict[str, Any], bins: bool, times: bool
) -> None:
    spec = SpecAugmentConfig(probability=1.0, time_warp=0, **off)
    augmenter = FeatureAugmenter(AugmentationConfig(spec_augment=spec), seed=1, view_mask_factor=2)
    features_TF = torch.randn(500, 80)
    for masked_TF in (
        augmenter(features_TF, epoch=0, cut_id="a"),
        *augmenter.two_views(features_TF, epoch=0, cut_id="a"),
    ):
        changed_TF = masked_TF != features_TF
        assert bool(changed_TF.all(0).any()) == bins
        assert bool(changed_TF.all(1).any()) == times


@pytest.mark.parametrize("tempo", [0.5, 0.9, 1.0, 1.3])
def test_stretch_time(tempo: float) -> None:
    ramp_TF = torch.linspace(0, 1, 100)[:, None].expand(100, 4)
    out_TF = stretch_time(ramp_TF, tempo)
    assert out_TF.shape == (round(100 / tempo), 4)
    assert torch.allclose(out_TF[:, 0], torch.linspace(0, 1, out_TF.shape[0]), atol=0.02)


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.0, 1.15, 1.3])
def test_warp_frequency_moves_a_tone(factor: float) -> None:
    def tone_features(pitch: float) -> torch.Tensor:
        time = np.arange(16000) / 16000
        return audio_features((0.5 * np.sin(2 * np.pi * pitch * time)).astype(np.float32))

    warped = warp_frequency(tone_features(1500.0), factor)
    wanted = tone_features(1500.0 * factor)
    assert abs(int(warped[50].argmax()) - int(wanted[50].argmax())) <= 1


def test_warp_frequency_by_one_changes_nothing(features_TF: torch.Tensor) -> None:
    assert torch.allclose(warp_frequency(features_TF, 1.0), features_TF, atol=1e-3)


@pytest.mark.parametrize("snr_db", [0.0, 10.0, 30.0])
def test_noise_has_the_wanted_level(snr_db: float, features_TF: torch.Tensor) -> None:
    config = AugmentationConfig(
        noise_probability=1.0, noise_snr_db=(snr_db, snr_db), spec_augment=NO_SPEC_AUGMENT
    )
    for noisy in (
        add_noise(features_TF, snr_db, np.random.default_rng(1)),
        FeatureAugmenter(config, seed=1)(features_TF, epoch=0, cut_id="a"),
    ):
        added = (noisy.double().exp() - features_TF.double().exp()).sum()
        ratio_db = (features_TF.double().exp().sum() / added).log() / LOG_ENERGY_PER_DB
        assert ratio_db.item() == pytest.approx(snr_db, abs=0.2)


def test_limit_band_is_like_a_recording_at_a_lower_rate() -> None:
    samples_S = noise(2.0)
    narrow_S = resample(resample(samples_S, 16000, 8000), 8000, 16000)
    narrow_S = (np.round(narrow_S * 32768) / 32768).astype(np.float32)
    wanted_F = audio_features(narrow_S).mean(0)
    wide_TF = audio_features(samples_S)
    limited_F = limit_band(wide_TF, 4000.0, np.random.default_rng(1)).mean(0)
    # The flank of the resampling filter is wider than a bin, and it lets a little pass.
    assert (limited_F - wanted_F)[:58].abs().max() < 0.2
    assert limited_F[66:].max() < wanted_F[66:].max() < wide_TF.mean(0)[66:].min() - 5


def test_band_limit_is_drawn_per_utterance(features_TF: torch.Tensor) -> None:
    config = AugmentationConfig(band_limit_probability=0.5, spec_augment=NO_SPEC_AUGMENT)
    augment = FeatureAugmenter(config, seed=3)
    changed = [
        not torch.equal(augment(features_TF, epoch=0, cut_id=str(cut)), features_TF)
        for cut in range(40)
    ]
    assert 10 < sum(changed) < 30


def test_band_limit_has_the_frequency_of_the_settings(features_TF: torch.Tensor) -> None:
    config = AugmentationConfig(
        band_limit_probability=1.0, band_limit_hz=(2500.0, 2500.0), spec_augment=NO_SPEC_AUGMENT
    )
    expected_F, found_F = (
        (features_TF - limited_TF).mean(0) > 1.0
        for limited_TF in (
            limit_band(features_TF, 2500.0, np.random.default_rng(1)),
            FeatureAugmenter(config, seed=1)(features_TF, epoch=0, cut_id="a"),
        )
    )
    assert torch.equal(found_F, expected_F)
    assert 10 < int(found_F.sum()) < 70


def test_tilt_is_a_line_over_the_bins(features_TF: torch.Tensor) -> None:
    config = AugmentationConfig(tilt_db=12.0, spec_augment=NO_SPEC_AUGMENT)
    tilts_db = []
    for cut in range(10):
        out_TF = FeatureAugmenter(config, seed=3)(features_TF, epoch=0, cut_id=str(cut))
        difference_F = (out_TF - features_TF).mean(0) / LOG_ENERGY_PER_DB
        tilts_db.append(float(difference_F[-1] - difference_F[0]))
        line_F = torch.linspace(-0.5, 0.5, 80) * tilts_db[-1]
        torch.testing.assert_close(difference_F, line_F, rtol=0, atol=1e-4)
    assert -12.0 <= min(tilts_db) < -4.0
    assert 4.0 < max(tilts_db) <= 12.0


def test_volume_is_a_gain(features_TF: torch.Tensor) -> None:
    config = AugmentationConfig(volume_db=12.0, spec_augment=NO_SPEC_AUGMENT)
    difference = FeatureAugmenter(config, seed=3)(features_TF, epoch=0, cut_id="a") - features_TF
    assert difference.std() < 1e-5
    assert 0.01 < abs(difference.mean().item()) <= 12.0 * LOG_ENERGY_PER_DB


def test_two_views_differ_in_their_masks_alone(features_TF: torch.Tensor) -> None:
    spec = SpecAugmentConfig(probability=1.0, time_warp=40, feature_masks=0, frame_mask_size=10)
    sound = AugmentationConfig(
        frequency_warp=0.2, noise_probability=1.0, volume_db=6.0, spec_augment=spec
    )
    augmenter = FeatureAugmenter(sound, seed=1, view_mask_factor=2.5)
    views = augmenter.two_views(features_TF, epoch=0, cut_id="a")
    again = FeatureAugmenter(sound, seed=1, view_mask_factor=2.5)
    for view, same in zip(views, again.two_views(features_TF, epoch=0, cut_id="a"), strict=True):
        assert torch.equal(view, same)
    # A masked frame has one value in all bins.
    masked = [view.std(dim=1) < 1e-6 for view in views]
    assert all(mask.any() for mask in masked)
    assert not torch.equal(*masked)
    kept = ~(masked[0] | masked[1])
    assert kept.any()
    assert torch.equal(views[0][kept], views[1][kept])
    assert not torch.equal(views[0][kept], features_TF[kept])
    other = augmenter.two_views(features_TF, epoch=1, cut_id="a")
    assert not torch.equal(other[0], views[0])


def test_view_mask_factor_scales_the_masked_share() -> None:
    """Without overlaps, masks cover half of the largest share in the mean."""
    spec = SpecAugmentConfig(
        probability=1.0, time_warp=0, feature_masks=0, frame_masks=20, frame_mask_size=10
    )
    config = AugmentationConfig(spec_augment=spec)
    shares = {}
    for factor in (1.0, 2.5):
        augmenter = FeatureAugmenter(config, seed=1, view_mask_factor=factor)
        masked = [
            (view.std(dim=1) < 1e-6).float().mean()
            for name in range(100)
            for view in augmenter.two_views(torch.randn(400, 80), epoch=0, cut_id=str(name))
        ]
        shares[factor] = float(torch.stack(masked).mean())
    assert 0.05 < shares[1.0] < 0.09
    assert 1.9 < shares[2.5] / shares[1.0] < 2.6


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 20])
def test_two_views_of_short_utterances(frames: int) -> None:
    spec = SpecAugmentConfig(probability=1.0)
    augmenter = FeatureAugmenter(
        AugmentationConfig(spec_augment=spec), seed=1, view_mask_factor=2.5
    )
    for view in augmenter.two_views(torch.randn(frames, 80), epoch=0, cut_id="a"):
        assert view.shape == (frames, 80)
        assert view.isfinite().all()
