"""recognise.py of an exported folder, on files of all kinds."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import soundfile

from tests.transcribe.random_model import sound


class Recogniser:
    """The part of sherpa-onnx's recogniser that the script uses; every result is one word."""

    @classmethod
    def from_transducer(cls, **_: object) -> Recogniser:
        return cls()

    def create_stream(self) -> SimpleNamespace:
        return SimpleNamespace(accept_waveform=lambda rate, samples: None)

    def decode_stream(self, stream: SimpleNamespace) -> None:
        stream.result = SimpleNamespace(text=" one", tokens=["one"], timestamps=[0.04])


def test_other_files_are_transcribed_if_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sherpa = ModuleType("sherpa_onnx")
    sherpa.OfflineRecognizer = Recogniser  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sherpa_onnx", sherpa)
    recognise = importlib.import_module("pruned_rnnt.export.sherpa_script")
    # Another test may have imported it with the real package.
    monkeypatch.setattr(recognise, "sherpa_onnx", sherpa)
    settings = {
        "kind": "transducer",
        "streaming": False,
        "sample_rate": 16000,
        "feature_dim": 80,
        "model_type": "",
    }
    settings |= {"shortest_seconds": 0.1, "tail_seconds": 0.5}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    wav, silent, text, empty, odd, mp3 = (
        tmp_path / name
        for name in ("a.wav", "silent.wav", "text.wav", "empty.wav", "odd.wav", "a.mp3")
    )
    soundfile.write(wav, sound(1.0), 16000)
    soundfile.write(silent, np.zeros(32000), 16000)
    text.write_text("no audio")
    soundfile.write(empty, np.zeros(0), 16000)
    soundfile.write(odd, np.zeros(10), 15_999_989)
    soundfile.write(mp3, sound(4.0), 16000)
    mp3.write_bytes(mp3.read_bytes()[: mp3.stat().st_size // 2])
    paths = [text, wav, empty, odd, silent, tmp_path / "absent.wav", mp3]
    arguments = ["recognise.py", "--folder", str(tmp_path), *map(str, paths)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert recognise.main() == 1
    shown = capfd.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    texts = {line["file"]: line["text"] for line in lines}
    assert texts == {str(wav): "one", str(silent): "", str(mp3): "one"}
    problems = shown.err.splitlines()
    assert len(problems) == 4
    for path, reason in (
        (text, "Format not recognised"),
        (empty, "no samples"),
        (odd, "sampling rate is 15,999,989 Hz, needs 1,000 to 768,000 Hz"),
        (tmp_path / "absent.wav", "System error"),
    ):
        (line,) = [line for line in problems if line.startswith(f"cannot read {path}: ")]
        assert reason in line
