"""The commands and `pruned_rnnt.load` with models of NeMo and transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.config.load import ConfigError, load_config
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.interop.nemo.imported_model import import_model, read_run
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.segments import SegmentConfig
from tests.interop.parakeet_corpus import make_recordings, prepared, wave
from tests.interop.parakeet_models import audio
from tests.interop.test_parakeet import written
from tests.transcribe.random_model import sound


@pytest.mark.parametrize("name", ["nemo_tdt", "nemo_window", "nemo_ctc", "transformers_rnnt"])
def test_loaded_models_have_the_texts_of_imported_ones(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    expected = import_model(path).texts(audio())
    recogniser = pruned_rnnt.load(path, segments=SegmentConfig(lost_speech="ignore"))
    assert [found.text for found in recogniser.transcribe(audio())] == expected
    assert any(expected)
    (alone,) = recogniser.transcribe([audio()[0]])
    # Frames last 80 ms: an encoder that took 40 would end its words in the middle.
    assert alone.words[-1].end > 0.9
    with pytest.raises(ValueError, match="pass samples"):
        recogniser.transcribe_features(torch.zeros(50, 80))


def test_segments_have_their_own_samples(tmp_path: Path) -> None:
    """Speech, a long pause, and speech: each segment is transcribed as if it were alone."""
    path = written("nemo_window", tmp_path)
    recogniser = pruned_rnnt.load(
        path, segments=SegmentConfig(window=1.5, padding=0.1, lost_speech="ignore")
    )
    speech = wave("one two", 1)
    quiet = (0.003 * np.random.default_rng(2).standard_normal(24000)).astype(np.float32)
    samples = np.concatenate((speech, quiet, speech))
    seen: list[np.ndarray] = []
    best_paths = recogniser._best_paths

    def spy(batch, with_heads):  # type: ignore[no-untyped-def]
        seen.extend(batch.samples)
        return best_paths(batch, with_heads)

    recogniser._best_paths = spy  # type: ignore[method-assign]
    found = recogniser.transcribe(samples)
    parts = list(seen)
    assert len(parts) == 2
    for part in parts:
        places = [n for n in range(0, len(samples), 160) if samples[n] == part[0]]
        assert any(np.array_equal(samples[n : n + len(part)], part) for n in places)
    alone = [recogniser.transcribe(part).text for part in parts]
    # A symbol that begins no word is joined to the one before.
    assert found.text.replace(" ", "") == "".join(alone).replace(" ", "")
    assert all(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemo_tdt", "nemo_window"])
def test_commands_on_an_imported_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, run = written(name, tmp_path), tmp_path / "run"
    assert main(["import", str(archive), str(run)]) == 0
    out = capsys.readouterr().out
    assert ("CTC head is kept" in out) == (name == "nemo_window")
    config = run_config(run)
    assert config.data.features == "waveform"
    assert config.data.filters.subsampling_factor == (8 if name == "nemo_window" else 4)
    source = make_recordings(tmp_path / "audio")
    data = prepared(
        source, tmp_path / "data", "--features", "waveform", "--tokenizer-from", str(run)
    )
    settings = [f"data.path={data}", "data.num_workers=0", "train.device=cpu"]
    assert main(["decode", str(run), *settings]) == 0
    assert main(["align", str(run), "--split", "test", "--format", "ctm", *settings]) == 0
    (ctm,) = run.glob("alignments/*/test-tokens.ctm")
    ends = [
        float(line.split()[2]) + float(line.split()[3]) for line in ctm.read_text().split("\n")[:-1]
    ]
    assert max(ends) > 0.5
    recording = source.parent / "u0.wav"
    assert main(["align", str(run), str(recording), "--text", "one two"]) == 0
    assert main(["transcribe", str(run), str(recording)]) == 0
    assert main(["transcribe", str(archive), str(recording)]) == 0
    assert main(["report", str(run)]) == 0
    assert main(["inspect", str(run)]) == 0
    transcript = capsys.readouterr().out
    (text,) = import_model(archive).texts([wave_of(recording)])
    assert text
    assert transcript.count(text) >= 2
    assert main(["import", str(archive), str(run)]) == EXIT_FAILED
    assert "already holds a run" in capsys.readouterr().err


def wave_of(path: Path) -> np.ndarray:
    import soundfile

    samples, _ = soundfile.read(path, dtype="float32")
    return samples


def test_the_ctc_head_is_kept_or_left_out(tmp_path: Path) -> None:
    archive = written("nemo_window", tmp_path)
    kept = read_run(archive, tmp_path / "run")
    assert kept.model.ctc_head is not None
    assert kept.config.loss.ctc_scale > 0
    without = read_run(archive, tmp_path / "run", ["loss.ctc_scale=0"])
    assert without.model.ctc_head is None
    assert "left out" in without.notes[0]
    run = tmp_path / "run"
    assert main(["import", str(archive), str(run), "loss.ctc_scale=0"]) == 0
    assert load_model(run_config(run)).model.ctc_head is None


def test_a_ctc_head_cannot_be_added(tmp_path: Path) -> None:
    archive = written("nemo_tdt", tmp_path)
    with pytest.raises(ConfigError, match=r"loss\.ctc_scale is 0\.3, but .* has no CTC head"):
        read_run(archive, tmp_path / "run", ["loss.ctc_scale=0.3"])
    assert read_run(archive, tmp_path / "run", ["loss.ctc_scale=0"]).model.ctc_head is None


def test_settings_that_the_model_fixes_are_refused(tmp_path: Path) -> None:
    archive = written("nemo_tdt", tmp_path)
    for setting in ("model.encoder.dim=64", "model.encoder.features=fbank", "loss.durations=[0,1]"):
        with pytest.raises(ConfigError, match=setting.partition("=")[0].replace(".", r"\.")):
            read_run(archive, tmp_path / "run", [setting])
    changed = read_run(archive, tmp_path / "run", ["loss.sigma=0.05", "model.encoder.dropout=0"])
    assert changed.config.loss.sigma == 0.05


def test_sigma_and_omega_come_from_the_archive(tmp_path: Path) -> None:
    kwargs = {"durations": [0, 1, 2, 3, 4], "sigma": 0.02, "omega": 0.1}
    changes = {"loss": {"loss_name": "tdt", "tdt_kwargs": kwargs}}
    loss = import_model(written("nemo_tdt", tmp_path, **changes)).model.loss_config
    assert (loss.sigma, loss.omega) == (0.02, 0.1)


def test_wrong_use_of_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, run = written("nemo_rnnt", tmp_path), tmp_path / "run"
    for arguments, message in (
        ([str(archive), str(run), "--trust"], "are for checkpoints of icefall"),
        ([str(tmp_path / "none.nemo"), str(run)], "does not exist"),
        ([str(archive), str(run), "model.encoder.dim=64"], "cannot be changed"),
        ([str(archive), str(run), "train.folder=other"], "train.folder is other, but"),
        ([str(archive), str(run), "loss.ctc_scale=0.3"], "has no CTC head"),
    ):
        assert main(["import", *arguments]) == EXIT_USAGE
        assert message in capsys.readouterr().err
        assert not run.exists()
    (tmp_path / "bad.nemo").write_text("text")
    assert main(["import", str(tmp_path / "bad.nemo"), str(run)]) == EXIT_FAILED
    assert "not a .nemo archive" in capsys.readouterr().err
    assert main(["import", str(archive), str(run)]) == 0
    assert main(["import", str(run), str(tmp_path / "again")]) == EXIT_USAGE
    assert "a model of this package" in capsys.readouterr().err


def test_features_of_nemo_need_recordings() -> None:
    with pytest.raises(ValueError, match=r"set data\.features=waveform"):
        load_config(ExperimentConfig, None, ["model.encoder.kind=fastconformer"])
    config = load_config(
        ExperimentConfig, None, ["model.encoder.kind=fastconformer", "model.encoder.features=fbank"]
    )
    assert not config.feature_kind.needs_samples
    changed = dataclasses.replace(config.model.encoder, features="nemo", num_mel_bins=128)
    model = dataclasses.replace(config.model, encoder=changed)
    data = dataclasses.replace(config.data, features="waveform")
    kind = dataclasses.replace(config, model=model, data=data).feature_kind
    assert kind.of_recording(audio()[0]).shape == (100, 128)


def test_live_streams_have_the_texts_of_files(tmp_path: Path) -> None:
    recogniser = pruned_rnnt.load(written("nemo_causal", tmp_path))
    joiner = recogniser.model.joiner  # type: ignore[union-attr]
    with torch.no_grad():
        # Its symbols differ from frame to frame, and are no longer always ten.
        joiner.encoder_proj.weight.mul_(50)  # type: ignore[operator, union-attr]
        joiner.output_linear.bias[0] += 2  # type: ignore[index, operator, union-attr]
    samples = sound(3.0)
    stream = recogniser.stream(endpoints=EndpointConfig(pause=0, silence=0, longest=0))
    for begin in range(0, len(samples), 1001):
        stream.accept_waveform(samples[begin : begin + 1001])
        recogniser.step([stream])
    stream.finish()
    while recogniser.step([stream]):
        pass
    (final,) = stream.take_finals()
    assert final.text == recogniser.transcribe(samples).text
    assert len(final.text) > 100
    assert len(set(final.text)) > 4


def test_live_streams_of_normalised_features_are_refused(tmp_path: Path) -> None:
    recogniser = pruned_rnnt.load(written("nemo_rnnt", tmp_path))
    with pytest.raises(ValueError, match="deviation in the whole utterance, which a stream does"):
        recogniser.stream()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemo_tdt", "nemo_window"])
def test_finetune_to_new_symbols(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive learns other symbols; the result is exported as an archive, and loaded."""
    archive, run = written(name, tmp_path), tmp_path / "run"
    source = make_recordings(tmp_path / "audio")
    data = prepared(source, tmp_path / "data", "--features", "waveform", "--tokens", "word")
    settings = [
        "finetune.vocabulary=replace",
        "train.steps=2",
        "train.device=cpu",
        "data.num_workers=0",
        "data.max_duration=8",
        "data.num_buckets=1",
        f"train.folder={run}",
    ]
    assert main(["finetune", str(archive), str(data), *settings]) == 0
    text = capsys.readouterr()
    assert ("CTC head: that of the source" in text.out + text.err) == (name == "nemo_window")
    config = run_config(run)
    assert config.feature_kind.name == "nemo"
    loaded = load_model(config)
    assert loaded.tokenizer.symbols == Tokenizer.load(data / "tokens").symbols
    before = import_model(archive).model.state_dict()
    after = loaded.model.state_dict()
    changed = [key for key in before if before[key].shape != after[key].shape]
    assert {key.split(".")[-2] for key in changed} <= {
        "embedding",
        "output_linear",
        "ctc_head",
    }
    assert main(["export", str(run), "--format", "nemo"]) == 0
    again = import_model(run / "export" / "nemo" / "model.nemo")
    assert again.tokenizer.symbols == loaded.tokenizer.symbols
    for key, value in again.model.state_dict().items():
        if key.startswith("encoder."):
            assert torch.equal(value, after[key]), key


@pytest.mark.slow
def test_finetune_without_the_ctc_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = written("nemo_window", tmp_path)
    source = make_recordings(tmp_path / "audio")
    stored = prepared(source, tmp_path / "stored", "--tokens", "char")
    settings = ["train.steps=1", "train.device=cpu", "data.num_workers=0", "data.num_buckets=1"]
    run = f"train.folder={tmp_path / 'run'}"
    refused = ["finetune", str(archive), str(stored), "data.features=stored", run, *settings]
    assert main(refused) == EXIT_USAGE
    assert "set data.features=waveform" in capsys.readouterr().err
    data = prepared(source, tmp_path / "data", "--features", "waveform", "--tokens", "char")
    command = ["finetune", str(archive), str(data), "loss.ctc_scale=0", run, *settings]
    with caplog.at_level("INFO"):
        assert main(command) == 0
    text = capsys.readouterr()
    assert "that of the source is dropped" in text.out + text.err + caplog.text
    assert load_model(run_config(tmp_path / "run")).model.ctc_head is None
