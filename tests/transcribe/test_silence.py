"""Silence is steady and far below speech; windows skip it and contain all speech."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.transcribe.silence import SilenceFinder, frame_energies
from pruned_rnnt.transcribe.windows import WindowEncoder
from tests.transcribe.test_windows import make_model


def speech(seconds: float, level: float = 0.0, seed: int = 0) -> torch.Tensor:
    """(T, 80) features that go up and down by 4, four times a second."""
    time_T = torch.arange(round(100 * seconds)) / 100
    noise_TF = torch.randn(len(time_T), 80, generator=torch.Generator().manual_seed(seed))
    return level + 2 * torch.sin(2 * torch.pi * 4 * time_T)[:, None] + noise_TF


def silence(seconds: float, level: float = -10.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return level + torch.randn(round(100 * seconds), 80, generator=generator)


def test_speech_between_silence() -> None:
    features = torch.cat([silence(2.0), speech(3.0), silence(2.0), speech(1.0)])
    begin, end = SilenceFinder().find(frame_energies(features))
    assert begin == pytest.approx(50 - 7, abs=3)
    assert end == pytest.approx(125 + 7, abs=3)


@pytest.mark.parametrize("gap", [silence(0.7), silence(2.0, level=-0.5), speech(2.0, level=-6.0)])
def test_these_are_not_silence(gap: torch.Tensor) -> None:
    """A short pause; a noisy room; someone who speaks far from the microphone."""
    features = torch.cat([speech(3.0), gap, speech(1.0)])
    assert SilenceFinder().find(frame_energies(features)) == (0, None)


def test_silence_is_relative_to_earlier_speech() -> None:
    energies = frame_energies(silence(4.0))
    finder = SilenceFinder()
    assert finder.find(energies) == (0, None)
    finder.advance(frame_energies(speech(3.0)))
    assert finder.find(energies).begin == len(energies)


@pytest.mark.parametrize("piece", [33, 5000])
def test_windows_contain_all_speech_and_little_silence(piece: int) -> None:
    parts = [silence(3.0), speech(2.5), silence(4.0), speech(1.0), silence(9.0), speech(5.0)]
    features = torch.cat([*parts, silence(6.0)])
    encoder = WindowEncoder(make_model(), 75, 10, skip_silence=True)
    windows = list(encoder(features.split(piece)))
    assert [window.is_start for window in windows][:3] == [True, True, True]
    covered = torch.zeros(len(features), dtype=torch.bool)
    for window in windows:
        begin, frames = window.begin, window.encoded_NTE.size(1)
        assert not covered[4 * begin : 4 * (begin + frames)].any()
        covered[4 * begin : 4 * (begin + frames)] = True
    times = torch.cat([torch.full((len(part),), float(part.mean() > -5)) for part in parts])
    is_speech = torch.cat([times, torch.zeros(600)]).bool()
    assert covered[is_speech].all()
    assert covered[~is_speech].sum() < 6 * 40


def test_silence_of_a_single_window_is_kept() -> None:
    features = torch.cat([speech(1.0), silence(1.5)])
    encoder = WindowEncoder(make_model(), 75, 10, skip_silence=True)
    ((encoded, is_start, begin),) = encoder(features.split(50))
    assert encoded.size(1) == (250 - 7) // 4 + 1
    assert is_start
    assert begin == 0


def test_digital_silence_gives_no_window() -> None:
    encoder = WindowEncoder(make_model(), 75, 10, skip_silence=True)
    assert list(encoder(torch.full((2000, 80), -15.94).split(300))) == []
