"""Shell commands that data bring along: none runs unless the user allows it."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lhotse import Recording, SupervisionSegment

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.manifest_items import manifest_items
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from tests.data.recorded_speech import write_audio

COUNT = 6


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """A file that the commands of these tests make."""
    return tmp_path / "ran"


def cut_line(wav: Path, name: str, **source: Any) -> str:
    """A line of a manifest, its source of audio changed."""
    recording = Recording.from_file(wav)
    cut = recording.to_cut()
    cut.id = name
    cut.supervisions = [SupervisionSegment(name, recording.id, 0, recording.duration, text="go")]
    values = cut.to_dict()
    values["recording"]["sources"][0].update(source)
    return json.dumps(values) + "\n"


def by_command(wav: Path, name: str, witness: Path) -> str:
    command = f"echo {name} >> {witness}; cat {wav}"
    return cut_line(wav, name, type="command", source=command)


def prepare(source: Path, output: Path, *options: str) -> int:
    arguments = ["prepare", "own", str(source), "--output", str(output), "--num-jobs", "1"]
    return pruned_rnnt([*arguments, "--tokens", "char", *options])


def kaldi(folder: Path, wav: Path, witness: Path) -> Path:
    source = folder / "kaldi"
    source.mkdir()
    commands = [f"u{i} echo {i} >> {witness}; cat {wav} |\n" for i in range(COUNT)]
    (source / "wav.scp").write_text(f"plain {wav}\n" + "".join(commands))
    (source / "text").write_text("plain go\n" + "".join(f"u{i} go\n" for i in range(COUNT)))
    return source


def manifest(folder: Path, wav: Path, witness: Path) -> Path:
    source = folder / "cuts.jsonl"
    lines = [by_command(wav, f"u{i}", witness) for i in range(COUNT)]
    source.write_text("".join([cut_line(wav, "plain"), *lines, lines[0].replace("u0", "v0", 1)]))
    return source


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (kaldi, "wav.scp has 6 commands that a shell would run, the first in line 2"),
        (manifest, "cuts.jsonl:2: reading this recording would run a shell command"),
    ],
)
def test_prepare_runs_no_command_that_is_not_allowed(
    make: Callable[[Path, Path, Path], Path],
    place: str,
    tmp_path: Path,
    witness: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = make(tmp_path, write_audio(tmp_path / "a.wav"), witness)
    assert prepare(source, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert place in error
    assert "6" in error
    assert "--allow-commands" in error
    assert len(error.splitlines()) == 1 + error.count("counting utterances")
    assert not witness.exists()
    assert prepare(source, tmp_path / "out", "--allow-commands", "--speeds", "0.9") == 0
    witness.unlink()
    # Features that are stored need no command.
    config = DataConfig(path=str(tmp_path / "out"), num_workers=0)
    assert list(DataModule(config).train_loader())
    assert not witness.exists()
    assert (
        prepare(source, tmp_path / "out", "--allow-commands", "--replace", "--features", "waveform")
        == 0
    )
    assert len(witness.read_text().splitlines()) >= COUNT
    assert "data.allow_commands=true" in capsys.readouterr().out


def test_prepared_data_run_no_command_that_is_not_allowed(tmp_path: Path, witness: Path) -> None:
    source = manifest(tmp_path, write_audio(tmp_path / "a.wav", 1.0), witness)
    out = tmp_path / "out"
    assert prepare(source, out, "--allow-commands", "--replace", "--features", "waveform") == 0
    witness.unlink()

    def loader(**changes: Any) -> Any:
        config = DataConfig(path=str(out), features="waveform", num_workers=0, **changes)
        return DataModule(config).train_loader()

    message = r"_cuts\.jsonl\.gz:\d: reading .* \(the manifest has \d\).*data\.allow_commands=true"
    for lazy in (False, True):
        with pytest.raises(ValueError, match=message):
            list(loader(lazy=lazy))
    with pytest.raises(ValueError, match=message):
        PreparedFolder(out).cuts("train")
    noises = AugmentationConfig(noise_cuts=str(source), noise_cuts_probability=1.0)
    plain = tmp_path / "plain"
    table = tmp_path / "table.tsv"
    table.write_text(f"{tmp_path}/a.wav\tgo\n" * 4)
    assert prepare(table, plain, "--features", "waveform") == 0
    config = DataConfig(path=str(plain), features="waveform", num_workers=0, augmentation=noises)
    with pytest.raises(ValueError, match=r"noise_cuts=.*data\.allow_commands=true"):
        DataModule(config).train_loader()
    assert not witness.exists()
    for lazy in (False, True):
        assert list(loader(allow_commands=True, lazy=lazy))
    assert witness.exists()


@pytest.mark.parametrize(
    "source",
    [
        {"type": "url", "source": "pipe:touch RAN"},
        {"type": "file", "source": "/x/a;touch RAN;.sph"},
        {"type": "command", "source": "touch RAN"},
    ],
)
def test_commands_are_found_wherever_lhotse_runs_them(
    tmp_path: Path, source: dict[str, str]
) -> None:
    path = tmp_path / "cuts.jsonl.gz"
    wav = write_audio(tmp_path / "a.wav")
    inner = json.loads(cut_line(wav, "a", **source))
    track = {"type": "MonoCut", "offset": 0.0, "cut": inner}
    stored = json.loads(cut_line(wav, "b"))
    stored["features"] = {"storage_type": "kaldiio", "storage_path": "", "storage_key": "ls |"}
    for item in (inner, {"id": "m", "tracks": [track], "type": "MixedCut"}, stored):
        with gzip.open(path, "wt") as file:
            file.write(json.dumps(item) + "\n")
        with pytest.raises(ValueError, match=r"cuts\.jsonl\.gz:1: reading .* has 1\)"):
            list(manifest_items(path))


def test_file_names_are_never_run_as_commands(tmp_path: Path, witness: Path) -> None:
    write_audio(tmp_path / "a.wav")
    (tmp_path / "x;touch ran;.sph").write_text("no audio")
    rows = [f"{tmp_path}/a.wav\tgo", f"x;touch {witness};|\tgo", "x;touch ran;.sph\tgo"]
    (tmp_path / "table.tsv").write_text("\n".join(rows) + "\n")
    options = ("--dev-share", "0", "--test-share", "0")
    assert prepare(tmp_path / "table.tsv", tmp_path / "out", *options, "--allow-commands") == 0
    left_out = (tmp_path / "out/left_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in left_out] == [
        "audio file not found",
        "name of a .sph file has characters that a shell interprets",
    ]
    assert not witness.exists()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("recording", {"sampling_rate": 0}, "sampling_rate must be a whole number .* 1, got 0"),
        ("recording", {"sampling_rate": 16000.5}, "sampling_rate must be a whole .*, got 16000.5"),
        ("supervision", {"text": 5}, "text must be a text, got 5"),
        ("supervision", {"text": ["a", "b"]}, "text must be a text, got \\['a', 'b'\\]"),
        ("recording", {"sampling_rate": "16k"}, "sampling_rate must be .* at least 1, got '16k'"),
        ("recording", {"duration": float("nan")}, "duration must be a number of seconds, got nan"),
        ("cut", {"duration": "x"}, "duration must be a number of seconds, got 'x'"),
        ("cut", {"duration": -1}, "duration must not be negative, got -1"),
        ("cut", {"start": float("inf")}, "start must be a number of seconds, got inf"),
    ],
)
def test_error_names_line_and_impossible_value(
    tmp_path: Path, place: str, value: dict[str, Any], message: str
) -> None:
    wav = write_audio(tmp_path / "a.wav")
    bad = json.loads(cut_line(wav, "b"))
    parts = {"cut": bad, "recording": bad["recording"], "supervision": bad["supervisions"][0]}
    parts[place].update(value)
    path = tmp_path / "cuts.jsonl"
    path.write_text(cut_line(wav, "a") + json.dumps(bad) + "\n")
    with pytest.raises(ValueError, match=rf"cuts\.jsonl:2 is not .* manifest: {message}"):
        list(manifest_items(path))


@pytest.mark.parametrize(
    ("value", "text"),
    [(17, "17"), (17.0, "17.0"), (math.nan, None), (None, None), (["a"], "['a']")],
)
@pytest.mark.parametrize("key", ["speaker", "language"])
def test_speakers_and_languages_are_texts(
    key: str, value: Any, text: str | None, tmp_path: Path
) -> None:
    line = json.loads(cut_line(write_audio(tmp_path / "a.wav"), "a"))
    line["supervisions"][0][key] = value
    (tmp_path / "cuts.jsonl").write_text(json.dumps(line) + "\n")
    ((_, cut),) = manifest_items(tmp_path / "cuts.jsonl")
    assert getattr(cut.supervisions[0], key) == text


def test_numbers_of_other_programs_are_read(tmp_path: Path) -> None:
    bad = json.loads(cut_line(write_audio(tmp_path / "a.wav", 0.5, 44100), "a"))
    bad["recording"]["sampling_rate"] = 44100.0
    bad["supervisions"][0]["speaker"] = 17
    path = tmp_path / "cuts.jsonl"
    path.write_text(json.dumps(bad) + "\n")
    ((_, cut),) = manifest_items(path)
    assert repr(cut.sampling_rate) == "44100"
    assert cut.supervisions[0].speaker == "17"
    assert prepare(path, tmp_path / "out", "--dev-share", "0", "--test-share", "0") == 0
