"""`pruned-rnnt transcribe`: audio formats, long and broken files, settings, microphone."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt import load
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.audio import audio_stream
from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.decode.search.greedy import greedy_search
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.pretrained import load as load_module
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.transcribe import transcribe_command
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.live import microphone, standard_input
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import AudioPiece, SegmentConfig, Segmenter
from pruned_rnnt.transcribe.speech_energy import EnergyDetector
from pruned_rnnt.transcribe.windows import encode_features
from tests.transcribe.random_model import babble, save_random_model, sound, transcribe_stdin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def test_audio_formats_and_unreadable_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"a.{suffix}" for suffix in ("wav", "flac", "ogg", "mp3")]
    for path in paths:
        soundfile.write(path, sound(2.0), 16000)
    broken = tmp_path / "broken.wav"
    broken.write_text("no sound")
    paths[2:2] = [broken, tmp_path / "absent.wav"]
    code = main(["transcribe", str(model), "--format", "jsonl", *map(str, paths)])
    assert code == EXIT_FAILED
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [line["file"] for line in lines] == [str(p) for p in paths if p.name.startswith("a.")]
    assert f"{broken} cannot be read as audio" in shown.err
    assert "audio file not found" in shown.err
    assert lines[0]["text"] == lines[1]["text"] == load(model).transcribe(paths[0]).text
    assert len(lines[0]["words"]) > 2
    for line in lines:
        assert all(0 < word["confidence"] <= 1 for word in line["words"])
        starts = [word["start"] for word in line["words"]]
        assert starts == sorted(starts)
        assert line["seconds"] == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize(("kind", "suffix"), [("srt", "srt"), ("text", "txt"), ("ctm", "ctm")])
def test_output_folder_has_a_file_for_each_audio_file(
    kind: str, suffix: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for path in paths:
        soundfile.write(path, sound(1.0), 16000)
    output = tmp_path / "out"
    arguments = ["--format", kind, "--output", str(output), *map(str, paths)]
    assert main(["transcribe", str(model), *arguments]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {output}/{name}.{suffix}" for name in "ab"
    ]
    assert all((output / f"{name}.{suffix}").stat().st_size > 20 for name in "ab")


def test_segments_are_transcribed_alone(model: Path) -> None:
    network, tokenizer, *_ = load_model(model)
    with torch.no_grad():  # Make earlier symbols matter.
        network.joiner.decoder_proj.weight *= 10
    samples = np.concatenate([sound(1.6), 1e-4 * sound(0.8)] * 6)
    config = SegmentConfig(window=2.5)
    result = Recogniser(network, tokenizer, segments=config).transcribe(samples)
    features = audio_features(samples)
    segmenter = Segmenter(config.lengths(None), EnergyDetector())
    segments = list(segmenter([AudioPiece(samples, features)]))
    assert len(segments) == 6
    encoded = [encode_features(network, segment.features_TF) for segment in segments]

    def texts(frames: list[torch.Tensor]) -> list[str]:
        found = [
            greedy_search(network, part, torch.tensor([part.size(1)]), silent_symbols=[UNKNOWN_ID])
            for part in frames
        ]
        return [tokenizer.decode(hypothesis.symbols) for (hypothesis,) in found]

    assert result.text == " ".join(texts(encoded))
    assert result.text != " ".join(texts([torch.cat(encoded, dim=1)]))
    assert result.words[-1].end > 12
    starts = [word.start for word in result.words]
    assert starts == sorted(starts)
    for text, segment in zip(texts(encoded), segments, strict=True):
        begin, end = segment.begin / 100, (segment.begin + len(segment.features_TF)) / 100
        assert len([w for w in result.words if begin <= w.start < w.end <= end]) == len(
            text.split()
        )


def test_decode_settings_are_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, phrases = tmp_path / "a.wav", tmp_path / "phrases.txt"
    soundfile.write(path, sound(6.0), 16000)
    phrases.write_text("five two four :30\n")
    command = ["transcribe", str(model), str(path), "--window", "2"]
    assert main(command) == 0
    assert "five two four" not in capsys.readouterr().out
    beam = "decode.method=modified_beam"
    assert main([*command, beam, f"decode.fusion.hotwords={phrases}"]) == 0
    assert "five two four" in capsys.readouterr().out
    assert main([*command, "decode.chunk=2", "decode.left=2"]) == 0
    assert main(["transcribe", str(tmp_path / "absent"), str(path)]) == EXIT_USAGE
    assert "neither a run nor an exported model at" in capsys.readouterr().err
    for settings, message in (
        (["decode.methd=greedy"], "did you mean 'decode.method'"),
        ([beam, "decode.fusion.lm=nowhere"], "no run of a language model at nowhere"),
    ):
        assert main([*command, *settings]) == EXIT_USAGE
        assert message in capsys.readouterr().err


def test_overlapping_windows_are_joined(model: Path) -> None:
    network, tokenizer, *_ = load_model(model)
    samples = babble(12.0)
    whole = Recogniser(network, tokenizer, segments=SegmentConfig(window=60.0)).transcribe(samples)
    recogniser = Recogniser(network, tokenizer, segments=SegmentConfig(window=5.0))
    lengths, search = [], recogniser._search

    def spy(encoded_NTE: torch.Tensor, lengths_N: torch.Tensor) -> list:
        lengths.append(encoded_NTE.size(1))
        return search(encoded_NTE, lengths_N)

    recogniser._search = spy
    parts = recogniser.transcribe(samples)
    # Windows of 5 s, of which 1.67 s overlap.
    assert lengths[:3] == [124, 124, 124]
    assert len(lengths) == 4
    assert parts.seconds == whole.seconds
    starts = [word.start for word in parts.words]
    assert starts == sorted(starts)
    assert abs(len(parts.words) - len(whole.words)) < 0.1 * len(whole.words)
    assert parts.text == " ".join(word.word for word in parts.words)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.flac"
    part = sound(10.0)
    with soundfile.SoundFile(path, "w", samplerate=16000, channels=1) as file:
        for _ in range(8):
            file.write(part)
    recogniser = Recogniser(*load_model(model)[:4], segments=SegmentConfig(window=4.0))
    blocks, windows = [], []
    features = audio_stream.audio_features

    def spy(samples: np.ndarray) -> torch.Tensor:
        blocks.append(len(samples))
        return features(samples)

    monkeypatch.setattr(audio_stream, "audio_features", spy)
    recogniser.model.encoder.register_forward_pre_hook(
        lambda _, inputs: windows.append(inputs[0].size(1))
    )
    result = recogniser.transcribe(path)
    assert result.seconds == 80.0
    assert len(blocks) == 9
    assert max(blocks) <= 16000 * 10.1
    assert len(windows) >= 18
    assert max(windows) <= 400
    # Times cover the whole file, and its repetitions give the same text.
    assert result.words[-1].end > 78
    half = recogniser.transcribe(np.concatenate([part] * 4))
    early = [(word.word, word.start) for word in half.words if word.end < 34]
    assert len(early) > 10
    assert early == [(word.word, word.start) for word in result.words[: len(early)]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to transcribe: pass audio files"),
        (["--microphone", "a.wav"], "--microphone cannot be combined with audio files"),
        (["-", "a.wav"], "- (standard input) cannot be combined with audio files"),
        (["-", "--times"], "--format, --output and --times need audio files"),
        (["--microphone", "--format", "srt"], "need audio files"),
        (["a.wav", "--chunk", "4"], "--chunk and --left need live audio"),
        (["-", "--chunk", "8", "decode.chunk=4"], "--chunk 8 contradicts decode.chunk=4"),
        (["a.wav", "--endpoint-pause", "1"], "--endpoint-longest need live audio"),
        (["-", "--endpoint-pause", "nan"], "endpoints.pause is nan; it must be at least 0 seconds"),
        (["a.wav", "--window", "0"], "--window is 0; it must be 0.5 to 3600 seconds"),
        (["a.wav", "--pause", "9"], "--pause is 9; it must be 0.1 to 1 seconds"),
        (["a.wav", "--format", "srt", "--times"], "--times needs --format text"),
        (["a.wav", "b.wav", "--format", "srt"], "needs --output"),
        (["a.wav", "x/a.mp3", "--output", "out"], "2 audio files are called a"),
        (["a b.wav", "x/a_b.mp3", "--format", "ctm"], "2 audio files are called a_b in CTM"),
        (["-", "--window", "3"], "--window, --shortest, --pause, --padding and --detector need"),
        (["-", "--detector", "silero"], "need audio files: live audio ends lines by"),
        (["a.wav", "train.device=cpu"], "train.device=cpu: `transcribe` takes settings of the sea"),
        (["a.wav", "decode.num_best=4"], "is for n-best lists, which `decode` writes"),
        (["a.wav", "decode.split=dev"], "decode.split=dev is for prepared sets, which `decode`"),
        (["-", "decode.metric=cer"], "is for error rates, which `decode` prints; leave it out"),
        (["a.wav", "decode.method", "greedy"], "write decode.method=VALUE, without spaces"),
        (["a.wav", "--output", __file__], "is a file, not a folder"),
        (["a.wav", "--output", f"{__file__}/x"], "is a file, not a folder"),
    ],
)
def test_wrong_options_are_usage_errors(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", str(model), *arguments]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_files_with_a_transcript_are_skipped_on_request(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        soundfile.write(tmp_path / f"{name}.wav", sound(1.0), 16000)
    texts = tmp_path / "texts"
    command = ["transcribe", str(model), str(tmp_path), "--output", str(texts)]
    assert main(command) == 0
    (texts / "b.txt").unlink()
    (texts / "c.txt").write_text("")
    kept = (texts / "a.txt").stat().st_mtime_ns
    capsys.readouterr()
    assert main([*command, "--skip-existing"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"1 of 3 files have transcripts in {texts}\n")
    assert printed.out.splitlines() == [f"wrote {texts / name}.txt" for name in "bc"]
    assert (texts / "a.txt").stat().st_mtime_ns == kept
    assert main([*command, "--skip-existing"]) == 0
    printed = capsys.readouterr()
    assert printed == ("", f"3 of 3 files have transcripts in {texts}\n")
    assert main([*command[:3], "--skip-existing"]) == EXIT_USAGE
    assert "--skip-existing needs --output" in capsys.readouterr().err


@pytest.mark.parametrize("folder", [False, True])
def test_texts_beside_the_audio_are_kept(
    folder: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "a.wav", sound(1.0), 16000)
    (tmp_path / "a.txt").write_text("by hand\n")
    audio = tmp_path if folder else tmp_path / "a.wav"
    command = ["transcribe", str(model), str(audio), "--output", str(tmp_path)]
    assert main(command) == EXIT_USAGE
    assert "a.txt beside its audio: choose another folder" in capsys.readouterr().err
    assert (tmp_path / "a.txt").read_text() == "by hand\n"
    # Results of an earlier command, elsewhere, are replaced.
    command[-1] = str(tmp_path / "texts")
    assert main(command) == main(command) == 0
    (tmp_path / "texts/a.txt").write_text("by hand\n")
    assert main(command) == EXIT_USAGE
    assert "texts/a.txt, which is no earlier transcript: choose" in capsys.readouterr().err
    assert (tmp_path / "texts/a.txt").read_text() == "by hand\n"


def test_folders_have_all_formats_and_dead_links(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.wav").mkdir()
    soundfile.write(tmp_path / "folder.wav/a.AIFF", sound(1.0), 16000)
    (tmp_path / "dead.wav").symlink_to(tmp_path / "gone.wav")
    assert main(["transcribe", str(model), str(tmp_path)]) == EXIT_FAILED
    shown = capsys.readouterr()
    assert [line.partition("\t")[0] for line in shown.out.splitlines()] == [
        str(tmp_path / "folder.wav/a.AIFF")
    ]
    assert "dead.wav, a link to a file that does not exist" in shown.err


def test_a_channel_can_be_chosen(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voices = np.stack([sound(2.0), babble(2.0)], axis=1)
    path = tmp_path / "call.wav"
    soundfile.write(path, voices, 16000)
    recogniser = load(model)
    for channel in (0, 1):
        soundfile.write(tmp_path / f"{channel}.wav", voices[:, channel], 16000)
        alone = recogniser.transcribe(tmp_path / f"{channel}.wav")
        assert recogniser.transcribe(path, channel=channel) == alone
        assert main(["transcribe", str(model), str(path), "--channel", str(channel)]) == 0
        assert capsys.readouterr().out == f"{path}\t{alone.text}\n"
    for file, has in ((path, "its channels are 0 to 1"), (tmp_path / "0.wav", "channel 0 only")):
        assert main(["transcribe", str(model), str(file), "--channel", "2"]) == EXIT_FAILED
        assert f"has no channel 2: {'it has ' * ('only' in has)}{has}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="channel=1 is for files: samples have channel 0 only"):
        recogniser.transcribe(voices[:, 0], channel=1)
    assert main(["transcribe", str(model), str(path), "--channel", "-1"]) == EXIT_USAGE


def fake_sounddevice(source: io.BytesIO, error: type[Exception] | None = None) -> ModuleType:
    """The part of sounddevice that is used; at the end of `source` the user presses Ctrl-C."""
    module = ModuleType("sounddevice")

    class Stream:
        def __init__(self, rate: int, *, channels: int, dtype: str) -> None:
            assert (rate, channels, dtype) == (16000, 1, "int16")
            if error is not None:
                raise error("Error querying device -1")

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None:
            source.close()

        def read(self, frames: int) -> tuple[memoryview, bool]:
            data = source.read(2 * frames)
            if source.tell() == len(source.getbuffer()):
                signal.raise_signal(signal.SIGINT)
            return memoryview(data), True

    module.RawInputStream = Stream  # type: ignore[attr-defined]
    module.PortAudioError = error or RuntimeError  # type: ignore[attr-defined]
    return module


def text_of_stdin(
    model: Path,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What is printed of samples in standard input, up to its end."""
    assert transcribe_stdin(model, data, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert len(shown) > 5
    return shown


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Tests that a shell runs in the background have inherited that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_microphone_gives_the_text_of_standard_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C, all that was said before is transcribed."""
    data = (sound(2.0) * 32767).astype(np.int16).tobytes()
    expected = text_of_stdin(model, data, monkeypatch, capsys)
    source = io.BytesIO(data)
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(source))
    assert main(["transcribe", str(model), "--microphone", "--chunk", "8", "--left", "8"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    assert shown.err.count("samples were lost") == 1
    assert source.closed
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_pipe_after_what_was_sent(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its writer got Ctrl-C too, or goes on without a word."""
    samples = (sound(2.0) * 32767).astype(np.int16).tobytes()
    expected = text_of_stdin(model, samples, monkeypatch, capsys)
    # Its header says 9 s.
    header = io.BytesIO()
    soundfile.write(header, sound(9.0), 16000, format="WAV", subtype="PCM_16")
    data = header.getvalue()[:44] + samples

    def press_first(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        print_live(*arguments)

    print_live = transcribe_command.print_live
    monkeypatch.setattr(transcribe_command, "print_live", press_first)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stdin, os.fdopen(writer, "wb", buffering=0) as pipe:
        assert pipe.write(data) == len(data)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["transcribe", str(model), "-", "--chunk", "8", "--left", "8"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    assert "before its wav header says" not in shown.err


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_pipe_that_is_always_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/zero").open("rb") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with standard_input() as samples:
            signal.raise_signal(signal.SIGINT)
            assert sum(map(len, iter(lambda: samples.read(3200), b""))) < 100_000
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_background_jobs_ignore_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("set"))
    with Path("/dev/zero").open("rb") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with standard_input() as samples:
            assert samples.read(10) == bytes(10)


def test_closed_standard_streams(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python has None for them."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["transcribe", str(model), "-"]) == EXIT_USAGE
    assert "- is standard input, which is closed: pipe samples" in capsys.readouterr().err
    soundfile.write(tmp_path / "a.wav", sound(1.0), 16000)
    monkeypatch.setattr(sys, "stdout", None)
    command = ["transcribe", str(model), str(tmp_path / "a.wav"), "--output", str(tmp_path / "o")]
    assert main(command) == 0
    assert (tmp_path / "o/a.txt").exists()
    for source in (str(tmp_path / "a.wav"), "--microphone"):
        assert main(["transcribe", str(model), source]) == EXIT_USAGE
        assert "printed to standard output, which is closed" in capsys.readouterr().err


def test_a_full_standard_output_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "a.wav", sound(1.0), 16000)
    command = ["transcribe", str(model), str(tmp_path / "a.wav")]
    expected = "pruned-rnnt transcribe: [Errno 28] No space left on device: 'standard output'\n"
    for options in ([], ["--output", str(tmp_path / "o")]):
        code = 0
        # Closing it fails, too.
        with suppress(OSError), Path("/dev/full").open("w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            code = main([*command, *options])
        assert code == EXIT_FAILED
        assert capsys.readouterr().err == expected


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_twice_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(io.BytesIO(bytes(100))))
    with microphone() as source:
        signal.raise_signal(signal.SIGINT)
        assert source.read(10) == b""
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_microphone_opens_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(io.BytesIO(bytes(100))))

    def read() -> bytes:
        with microphone() as source:
            return source.read(10)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == bytes(10)


def test_handlers_that_python_cannot_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(io.BytesIO(bytes(100))))
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("set"))
    with microphone() as source:
        assert source.read(10) == bytes(10)


def test_options_reach_the_recogniser_and_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """All away from the defaults."""
    seen: dict[str, Any] = {}

    def stream(**options: Any) -> None:
        seen.update(options)
        raise UsageError("seen")

    def load(model: str, **options: Any) -> SimpleNamespace:
        seen.update(options)
        if model == "of files":
            raise UsageError("seen")
        return SimpleNamespace(model=None, stream=stream)

    monkeypatch.setattr(load_module, "load", load)
    lengths = ["--window", "7", "--shortest", "2", "--pause", "0.7", "--padding", "0.4"]
    speech = ["--detector", "silero", "--lost-speech", "mark"]
    assert main(["transcribe", "of files", "a.wav", *lengths, *speech]) == EXIT_USAGE
    assert seen["segments"] == SegmentConfig(
        window=7, shortest=2, pause=0.7, padding=0.4, detector="silero", lost_speech="mark"
    )
    live = ["--chunk", "8", "--left", "16", "--endpoint-pause", "0.9", "--endpoint-longest", "11"]
    assert main(["transcribe", "live", "-", *live]) == EXIT_USAGE
    assert (seen["chunk"], seen["left"]) == (8, 16)
    assert seen["endpoints"] == EndpointConfig(pause=0.9, longest=11)


@pytest.mark.parametrize("option", ["--chunk", "--left"])
def test_wrong_sizes_name_the_option(
    model: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", str(model), "-", option, "-3"]) == EXIT_FAILED
    assert f"{option} is -3, needs a whole number of frames" in capsys.readouterr().err


def test_missing_microphone_is_one_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PortAudioError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["transcribe", str(model), "--microphone"]) == EXIT_FAILED
    assert "pip install 'pruned_rnnt[microphone]'" in capsys.readouterr().err
    fake = fake_sounddevice(io.BytesIO(), PortAudioError)
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    assert main(["transcribe", str(model), "--microphone"]) == EXIT_FAILED
    assert "cannot open the microphone: Error querying device -1" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_matches_cpu(model: Path) -> None:
    samples = np.concatenate([sound(1.4), 1e-4 * sound(1.2)] * 3)
    one = load(model, segments=SegmentConfig(window=2.5)).transcribe(samples)
    settings = ["decode.precision=float32"]
    on_gpu = load(model, "cuda", segments=SegmentConfig(window=2.5), settings=settings)
    other = on_gpu.transcribe(samples)
    assert other.text == one.text
    assert [word.start for word in other.words] == [word.start for word in one.words]
