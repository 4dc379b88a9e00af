"""The network of silero-vad, if it is installed, and the message if it is not."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from pruned_rnnt.system.optional_packages import MissingPackageError
from pruned_rnnt.transcribe.speech_silero import SileroDetector

needs_silero = pytest.mark.skipif(find_spec("silero_vad") is None, reason="needs silero-vad")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "silero_vad", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'pruned_rnnt\[vad\]'"):
        SileroDetector()


@needs_silero
@pytest.mark.parametrize("size", [1000, 160000])
def test_noise_is_no_speech_and_every_frame_is_decided(size: int) -> None:
    samples = (1e-3 * np.random.default_rng(0).standard_normal(48100)).astype(np.float32)
    detector = SileroDetector()
    found = [
        detector.accept(samples[begin : begin + size], torch.zeros(0, 80))
        for begin in range(0, len(samples), size)
    ]
    flags = torch.cat([*found, detector.finish()])
    assert len(flags) == pytest.approx(301, abs=3)
    assert not flags.any()
