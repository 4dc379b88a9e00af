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

from pruned_rnnt.data.audio.audio_file import read_audio
from tests.data.test_mp3_length import encoded, write_without_header
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


@pytest.fixture
def recognise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with a recogniser that needs no model, and a folder for it."""
    sherpa = ModuleType("sherpa_onnx")
    sherpa.OfflineRecognizer = Recogniser  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sherpa_onnx", sherpa)
    script = importlib.import_module("pruned_rnnt.export.sherpa_script")
    # Another test may have imported it with the real package.
    monkeypatch.setattr(script, "sherpa_onnx", sherpa)
    settings = {
        "kind": "transducer",
        "streaming": False,
        "sample_rate": 16000,
        "feature_dim": 80,
        "model_type": "",
    }
    settings |= {"shortest_seconds": 0.1, "tail_seconds": 0.5}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    for name in ("encoder", "decoder", "joiner"):
        (tmp_path / f"{name}.onnx").touch()
    return script


@pytest.mark.parametrize(("usual", "has"), [(4.0, True), (40.0, False), (None, True)])
def test_audio_beyond_the_lengths_of_training_has_a_warning(
    recognise: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    usual: float | None,
    has: bool,
) -> None:
    settings = json.loads((tmp_path / "settings.json").read_text()) | {"p99_duration": usual}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    soundfile.write(tmp_path / "a.wav", sound(45.0), 16000)
    soundfile.write(tmp_path / "b.wav", sound(9.0), 16000)
    paths = [str(tmp_path / name) for name in ("a.wav", "b.wav")]
    monkeypatch.setattr(sys, "argv", ["recognise.py", "--folder", str(tmp_path), *paths])
    assert recognise.main() == 0
    expected = [f"warning: {paths[0]} has 45 s and is decoded as a whole"] * has
    assert [line[: len(expected[0])] for line in capfd.readouterr().err.splitlines()] == expected


def test_other_files_are_transcribed_if_one_cannot_be_read(
    recognise: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
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


def test_missing_files_of_a_precision_are_named(
    recognise: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = json.loads((tmp_path / "settings.json").read_text())
    streaming = {"streaming": True, "chunk_frames": 16, "left_frames": 64}
    (tmp_path / "encoder.int8.onnx").touch()
    for changed, precision, missing, options in (
        ({}, "int8", "decoder.int8.onnx", "--precision int8"),
        ({"precisions": ["fp32", "int4"]}, "int8", "decoder.int8.onnx", "--precision int8 int4"),
        ({"kind": "nemo_ctc"}, "int4", "model.int4.onnx", "--precision int4"),
        (streaming, "fp16", "encoder.fp16.onnx", "--streaming --chunk 16 --left 64 --fp16"),
    ):
        (tmp_path / "settings.json").write_text(json.dumps(settings | changed))
        arguments = ["recognise.py", "a.wav", "--folder", str(tmp_path), "--precision", precision]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            recognise.main()
        assert ended.value.code == 2
        assert (
            f"--precision {precision} needs {tmp_path / missing}, which does not exist; export the "
            f"model again: pruned-rnnt export RUN --output {tmp_path} {options}\n"
        ) in capsys.readouterr().err


@pytest.mark.parametrize("tag", [0, 5000])
@pytest.mark.parametrize("channels", [1, 2])
def test_an_mp3_file_without_its_length_is_read_to_the_end(
    recognise: ModuleType, tmp_path: Path, channels: int, tag: int
) -> None:
    path = tmp_path / "a.mp3"
    samples = write_without_header(path, channels=channels, tag=tag)
    found, rate = recognise._read(str(path))
    assert samples <= len(found) <= samples + 3 * 1152
    assert found.ndim == 1
    assert rate == 16000
    soundfile.write(path, sound(2.0), 16000)
    assert len(recognise._read(str(path))[0]) == 32000


def test_joined_mp3_files_are_read_to_the_end(recognise: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(encoded(2) + encoded(3))
    found, _ = recognise._read(str(path))
    assert 80000 <= len(found) <= 80000 + 3 * 1152
    np.testing.assert_allclose(found[:16000], read_audio(path)[:16000], atol=1e-6)


def test_flac_of_unknown_length_is_read(recognise: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, sound(4.0), 16000)
    data = bytearray(path.read_bytes())
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])
    path.write_bytes(data)
    assert len(recognise._read(str(path))[0]) == 64000
