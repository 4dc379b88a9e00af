"""The network of silero-vad, if it is installed, and the message if it is not."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


# Speech begins above 0.5 and ends below 0.35.
PROBABILITIES = (0.4, 0.6, 0.4, 0.3, 0.4, 0.9, 0.36, 0.2)
IS_SPEECH = torch.tensor([False, True, True, False, False, True, True, False])


class Network:
    """The probability of each chunk is the next of the table: its state counts them."""

    def __init__(self) -> None:
        self.chunks: list[np.ndarray] = []

    def run(self, _: None, values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        self.chunks.append(values["input"])
        state = values["state"]
        return np.array([[PROBABILITIES[int(state[0, 0, 0])]]]), state + 1


@pytest.mark.parametrize("size", [300, 160000])
def test_frames_have_the_decision_of_their_chunk(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime: Any = ModuleType("onnxruntime")
    networks: list[Network] = []

    def session(path: str, *_: object, **__: object) -> Network:
        assert Path(path).is_file()
        networks.append(Network())
        return networks[-1]

    runtime.SessionOptions, runtime.InferenceSession = SimpleNamespace, session
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    network = tmp_path / "silero_vad/data/silero_vad.onnx"
    network.parent.mkdir(parents=True)
    network.touch()
    (tmp_path / "silero_vad/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    samples = np.arange(1, 8 * 512 - 100, dtype=np.float32)
    detector = SileroDetector()
    found = [
        detector.accept(samples[begin : begin + size], torch.zeros(0, 80))
        for begin in range(0, len(samples), size)
    ]
    flags = torch.cat([*found, detector.finish()])
    centres = torch.arange(len(flags)) * 160 + 80
    assert len(flags) == 26
    assert torch.equal(flags, IS_SPEECH[centres // 512])
    # Each chunk has the 64 samples before it.
    padded = np.pad(samples, (64, 101))
    for number, chunk in enumerate(networks[0].chunks):
        assert np.array_equal(chunk[0], padded[number * 512 : number * 512 + 576])


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
