"""The same tiny random model as a run, a model file, an ONNX folder and an icefall folder."""

from __future__ import annotations

from pathlib import Path

import torch

from pruned_rnnt.config.load import to_dict
from pruned_rnnt.config.written import to_yaml
from pruned_rnnt.data.tokens.tokenizer import SOS_EOS_ID, Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.export.model_file import ModelFile, save_model
from pruned_rnnt.interop.icefall_model import to_icefall_state
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_models import tiny_model, zipformer_of_icefall


def make_tokenizer() -> Tokenizer:
    return train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="word"))


def make_model(tokenizer: Tokenizer, encoder: EncoderConfig | None = None) -> SpeechModel:
    """By default of an architecture that icefall has, too. It never emits `<sos/eos>`."""
    model = tiny_model(encoder or zipformer_of_icefall(), len(tokenizer))
    with torch.no_grad():
        model.joiner.output_linear.bias[SOS_EOS_ID] = -50.0
    return model


def save_run(folder: Path, model: SpeechModel, tokenizer: Tokenizer, *, step: int = 7) -> Path:
    """A run with one checkpoint, without data."""
    config = ExperimentConfig(
        model=model.config,
        loss=model.loss_config,
        train=TrainConfig(folder=str(folder), device="cpu"),
    )
    tokenizer.save(folder / "tokens")
    RunFolder(folder).config.write_text(to_yaml(config), encoding="utf-8")
    CheckpointFolder(folder / "checkpoints").save(
        step,
        {
            "config": to_dict(config),
            "vocab_size": model.vocab_size,
            "model": model.state_dict(),
            "average": None,
            "counters": {"step": step},
            "score": None,
        },
    )
    return folder


def save_file(folder: Path, model: SpeechModel, tokenizer: Tokenizer) -> Path:
    save_model(ModelFile(model, tokenizer), folder / "model.pt", "test")
    return folder


def save_icefall(folder: Path, model: SpeechModel, tokenizer: Tokenizer) -> Path:
    """In the layout of repositories of icefall's models."""
    (folder / "exp").mkdir(parents=True)
    torch.save({"model": to_icefall_state(model)}, folder / "exp/pretrained.pt")
    tokenizer.save(folder / "data/lang_bpe_5")
    (folder / "data/lang_bpe_5/tokens.model").rename(folder / "data/lang_bpe_5/bpe.model")
    return folder
