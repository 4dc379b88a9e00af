"""Training with a compiled encoder gives the same losses and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pruned_rnnt.config.load import load_config
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.run_files import losses_of


def check_compiled_training(corpus: Path, tmp_path: Path, device: str, tolerance: float) -> None:
    settings = ["model.encoder.dropout=0.0", "train.save_every=2", f"train.device={device}"]
    plain = tiny_experiment(corpus, tmp_path / "plain", *settings)
    speech_trainer(plain).run()
    compiled = tiny_experiment(corpus, tmp_path / "run", *settings, "train.compile_encoder=true")
    speech_trainer(compiled).run()
    plain_losses = [loss for _, loss in losses_of(plain.folder)]
    assert [loss for _, loss in losses_of(compiled.folder)] == pytest.approx(
        plain_losses, abs=tolerance
    )
    name = "checkpoints/step-00000004.pt"
    state = load_checkpoint(compiled.folder / name)["model"]
    assert set(state) == set(load_checkpoint(plain.folder / name)["model"])
    # A run without the compiler can continue from it, if changes are allowed.
    longer = tiny_experiment(corpus, compiled.folder, *settings, "train.steps=5")
    trainer = speech_trainer(longer, allow_changes=True)
    trainer.run()
    assert trainer.state.counters.step == 5


@pytest.mark.slow
def test_compiled_encoder_trains_the_same(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_in_place = nn.Module.compile
    compiled: list[str] = []

    def without_code_generator(self: nn.Module, **options: Any) -> None:
        # Captures the graph but generates no machine code, which would take a minute.
        compiled.append(type(self).__name__)
        compile_in_place(self, backend="eager", **options)

    monkeypatch.setattr(nn.Module, "compile", without_code_generator)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    check_compiled_training(corpus, tmp_path, "cpu", tolerance=1e-5)
    assert compiled == ["Conformer"]
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    # One graph for batches of any size.
    assert counters["stats"]["unique_graphs"] == 1


def test_zipformer_cannot_be_compiled() -> None:
    settings = ["model.encoder.kind=zipformer", "train.compile_encoder=true"]
    with pytest.raises(ValueError, match=r"model\.encoder\.kind=conformer; a zipformer cannot"):
        load_config(ExperimentConfig, None, settings)


@pytest.mark.gpu
def test_compiled_encoder_trains_the_same_on_a_gpu(corpus: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    check_compiled_training(corpus, tmp_path, "cuda", tolerance=1e-3)
