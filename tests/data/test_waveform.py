"""Waveform changes against what they promise: length, pitch, level."""

from __future__ import annotations

import numpy as np
import pytest

from pruned_rnnt.data.audio import waveform
from pruned_rnnt.data.audio.waveform import (
    add_white_noise,
    perturb_speed,
    perturb_tempo,
    resample,
    scale_to_level,
)

RATE = 8000


def tone(pitch: float = 500.0, seconds: float = 1.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * pitch * np.arange(int(RATE * seconds)) / RATE)).astype(
        np.float32
    )


def pitch_of(samples_S: np.ndarray, rate: int = RATE) -> float:
    spectrum = np.abs(np.fft.rfft(samples_S * np.hanning(samples_S.size)))
    return float(spectrum.argmax() * rate / samples_S.size)


@pytest.mark.parametrize("speed", [0.8, 0.9, 1.0, 1.13, 1.25])
def test_speed_moves_pitch_and_length(speed: float) -> None:
    out = perturb_speed(tone(), speed)
    assert out.dtype == np.float32
    assert out.size == pytest.approx(RATE / speed, abs=2)
    assert pitch_of(out) == pytest.approx(500 * speed, rel=0.01)


@pytest.mark.parametrize("tempo", [0.8, 0.93, 1.0, 1.1, 1.25])
def test_tempo_keeps_pitch_and_level(tempo: float) -> None:
    out = perturb_tempo(tone(), tempo, RATE)
    assert out.dtype == np.float32
    assert out.size == pytest.approx(RATE / tempo, rel=0.05)
    assert pitch_of(out) == pytest.approx(500, rel=0.02)
    middle = out[RATE // 4 : RATE // 2]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.3 / np.sqrt(2), rel=0.1)


def test_tempo_leaves_very_short_audio_unchanged() -> None:
    short = tone(seconds=0.03)
    assert perturb_tempo(short, 1.2, RATE) is short


def test_resample_22050_to_16000() -> None:
    time = np.arange(22050) / 22050
    out = resample(np.sin(2 * np.pi * 440 * time).astype(np.float32), 22050, 16000)
    assert out.size == 16000
    assert pitch_of(out, 16000) == pytest.approx(440, abs=2)


def test_level() -> None:
    out = scale_to_level(tone(), -20.0)
    assert np.sqrt(np.mean(out**2)) == pytest.approx(0.1, rel=1e-3)
    assert np.abs(scale_to_level(tone(), 0.0)).max() <= 1.0
    silent = np.zeros(100, dtype=np.float32)
    assert scale_to_level(silent, -20.0) is silent


def test_noise_level() -> None:
    out = add_white_noise(np.zeros(50000, dtype=np.float32), -40.0, np.random.default_rng(0))
    assert out.dtype == np.float32
    assert np.sqrt(np.mean(out**2)) == pytest.approx(0.01, rel=0.02)


def test_few_filters_are_kept() -> None:
    for rate in range(16001, 16021):
        resample(tone(seconds=0.01), rate, 16000)
    assert waveform._low_pass.cache_info().currsize <= 8
