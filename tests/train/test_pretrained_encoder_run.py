"""A run with a pretrained encoder, by the command line: train, continue, decode, transcribe."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.config.load import ConfigError, load_config
from pruned_rnnt.licences.chain import read_chain
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder, load_checkpoint
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import load_model, run_config
from tests.data.spoken_corpus import make_corpus, noise
from tests.model.tiny_pretrained import saved_model
from tests.tiny_corpus import speech_trainer
from tests.train.run_files import losses_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("spoken") / "data", 12)


def settings(data: Path, run: Path, model: Path, *others: str) -> list[str]:
    return [
        f"data.path={data}",
        "data.features=waveform",
        "data.augmentation.spec_augment.enabled=false",
        "data.num_workers=0",
        "data.max_duration=12",
        f"train.folder={run}",
        "train.steps=20",
        "train.log_every=1",
        "train.validate_every=20",
        "train.device=cpu",
        "train.average_decay=0",
        "optimiser.learning_rate=5e-3",
        "schedule.warm_up_steps=2",
        "model.encoder.kind=transformers",
        f"model.encoder.name_or_folder={model}",
        "model.encoder.dim=16",
        "model.predictor.dim=16",
        "model.joiner_dim=16",
        "loss.kind=full",
        *others,
    ]


@pytest.mark.parametrize("name", ["wav2vec2-group", "wavlm-layer", "whisper"])
def test_a_run_needs_the_pretrained_model_only_once(
    spoken: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = tmp_path / "pretrained", tmp_path / "run"
    changes = {"max_source_positions": 400} if name == "whisper" else {}
    saved_model(name, model, **changes)
    frozen = "model.encoder.frozen=none"
    assert main(["train", *settings(spoken, run, model, frozen)]) == 0
    losses = [loss for _, loss in losses_of(run)]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert read_chain(run).origins[0].name == "pretrained"

    shutil.rmtree(model)
    assert main(["train", str(run), "train.steps=22"]) == 2  # steps are part of the schedule
    assert main(["train", str(run), "train.steps=22", "--allow-changes"]) == 0
    assert len(losses_of(run)) == 22
    assert main(["decode", str(run), "decode.split=test"]) == 0

    loaded = load_model(run_config(run))
    saved = load_checkpoint(CheckpointFolder(run / "checkpoints").paths()[-1])["model"]
    assert saved.keys() == loaded.model.state_dict().keys()
    for key, value in loaded.model.state_dict().items():
        torch.testing.assert_close(value, saved[key], atol=0, rtol=0)

    wav = tmp_path / "a.wav"
    soundfile.write(wav, noise(1.5, seed=5), 16000)
    recogniser = pruned_rnnt.load(run)
    text = recogniser.transcribe(wav).text
    assert recogniser.transcribe(noise(1.5, seed=5)).text == text

    capsys.readouterr()
    assert main(["export", str(run), "--output", str(tmp_path / "onnx")]) == 1
    assert "model.encoder.kind is transformers" in capsys.readouterr().err
    exported = tmp_path / "exported"
    assert main(["export", str(run), "--format", "torch", "--output", str(exported)]) == 0
    assert pruned_rnnt.load(exported).transcribe(wav).text == text
    assert main(["align", str(run), str(wav), "--text", "stop now"]) == 0


def test_long_audio_is_cut_with_its_samples(spoken: Path, tmp_path: Path) -> None:
    """Segments of a long recording have the text of the same samples by themselves."""
    saved_model("wav2vec2-layer", tmp_path / "model")
    run = tmp_path / "run"
    assert main(["train", *settings(spoken, run, tmp_path / "model", "train.steps=12")]) == 0
    recogniser = pruned_rnnt.load(run)
    silence = np.zeros(16000 * 3, dtype=np.float32)
    parts = [_syllables(1.2, seed) for seed in range(4)]
    audio = np.concatenate([np.concatenate((part, silence)) for part in parts])
    samples = []
    for _, recording in recogniser.recordings([audio]):
        for part in recording:
            samples.append((part.begin, part.samples_S))
    assert len(samples) > 1
    for begin, found in samples:
        np.testing.assert_array_equal(found, audio[160 * begin : 160 * begin + len(found)])
    with pytest.raises(ValueError, match=r"model\.encoder\.features"):
        recogniser.transcribe_features(torch.zeros(50, 80))


def _syllables(seconds: float, seed: int) -> np.ndarray:
    """Noise that rises and falls four times a second, as speech does."""
    samples_S = noise(seconds, seed)
    phase_S = np.arange(len(samples_S), dtype=np.float32) / 16000 * 4
    return samples_S * np.sin(np.pi * phase_S) ** 4


def test_a_frozen_encoder_stays_as_it_is(spoken: Path, tmp_path: Path) -> None:
    reference = saved_model("hubert-group", tmp_path / "model").state_dict()
    others = ("model.encoder.frozen=all", "train.steps=3")
    config = load_config(
        ExperimentConfig, None, settings(spoken, tmp_path / "run", tmp_path / "model", *others)
    )
    trainer = speech_trainer(config)
    assert trainer.run() == "finished"
    network = trainer.model.encoder.network.state_dict()
    for key, value in reference.items():
        torch.testing.assert_close(network[key], value, atol=0, rtol=0)
    trained = sum(len(group["params"]) for group in trainer.optimiser.param_groups)
    assert trained == sum(p.requires_grad for p in trainer.model.parameters())


def test_learning_rates_fall_from_layer_to_layer(spoken: Path, tmp_path: Path) -> None:
    saved_model("wav2vec2-layer", tmp_path / "model")
    others = ("model.encoder.rate=0.5", "model.encoder.layer_decay=0.1")
    config = load_config(
        ExperimentConfig, None, settings(spoken, tmp_path / "run", tmp_path / "model", *others)
    )
    trainer = speech_trainer(config)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    rates = {
        names[parameter]: group["rate"]
        for group in trainer.optimiser.param_groups
        for parameter in group["params"]
    }
    last = "encoder.network.encoder.layers.1.attention.q_proj.weight"
    assert rates[last] == pytest.approx(0.5)
    assert rates[last.replace("layers.1", "layers.0")] == pytest.approx(0.05)
    assert rates["encoder.network.feature_projection.projection.weight"] == pytest.approx(0.005)
    assert rates["encoder.projection.weight"] == 1
    assert rates["predictor.embedding.weight"] == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("setting", "named"),
        [
            ("data.features=stored", "data.features is stored"),
            ("data.augmentation.spec_augment.enabled=true", "spec_augment.enabled is true"),
            ("data.augmentation.tempo=0.1", "data.augmentation.tempo is 0.1"),
            ("data.joining.probability=0.5", "data.joining.probability is 0.5"),
            ("loss.cr_ctc_scale=0.1", "loss.cr_ctc_scale is 0.1"),
            ("train.compile_encoder=true", "train.compile_encoder"),
        ],
    )
    def test_settings(self, tmp_path: Path, setting: str, named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            load_config(ExperimentConfig, None, settings(tmp_path, tmp_path, tmp_path, setting))

    def test_no_such_model(
        self, spoken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", *settings(spoken, tmp_path / "run", tmp_path / "none")]) == 2
        error = capsys.readouterr().err
        assert (
            f"model.encoder.name_or_folder is '{tmp_path / 'none'}' (no local folder, so" in error
        )
        assert not (tmp_path / "run").exists()
