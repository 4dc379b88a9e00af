"""A training step after a checkpoint was loaded, bit for bit that of the training that went on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.model.build_model import build_model
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.selfcheck.encoders import encoder_configs
from pruned_rnnt.selfcheck.problem import Finding, guarded
from pruned_rnnt.train.engine.checkpoint import load_checkpoint, save_checkpoint
from pruned_rnnt.train.engine.random_state import (
    capture_random_state,
    restore_random_state,
    seed_everything,
)
from pruned_rnnt.train.optim.optimiser import (
    OptimiserConfig,
    build_optimiser,
    load_optimiser_state,
)

PART = "training"
_VOCABULARY = 30


def check_resumed(device: torch.device) -> Finding:
    """Two steps, a checkpoint and a third step; then the third step from the checkpoint, twice."""
    what = "training step resumed from a checkpoint"
    before = capture_random_state()
    try:
        return guarded(PART, what, lambda: _compare(device, what))
    finally:
        restore_random_state(before)


def _compare(device: torch.device, what: str) -> Finding:
    seed_everything(0)
    model, optimiser = _new(device)
    for step in range(2):
        _train_step(model, optimiser, step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check.pt"
        save_checkpoint(
            path,
            {
                "config": {},
                "vocab_size": _VOCABULARY,
                "model": model.state_dict(),
                "average": None,
                "optimiser": optimiser.state_dict(),
                "random": capture_random_state(),
                "counters": {"step": 2},
            },
        )
        values = load_checkpoint(path)
    went_on = _train_step(model, optimiser, 2)
    resumed = [_resumed(values, device) for _ in range(2)]
    failure = ""
    if not torch.equal(*resumed):
        failure = (
            "the same step gives different bits each time on this device, so that a resumed "
            "training differs from one that went on"
        )
    elif not torch.equal(resumed[0], went_on):
        failure = "the parameters differ from those of the training that went on"
    error = float((resumed[0] - went_on).abs().max())
    return Finding(part=PART, what=what, error=error, failure=failure)


def _new(device: torch.device) -> tuple[SpeechModel, torch.optim.Optimizer]:
    config = ModelConfig(encoder=encoder_configs()["Zipformer"], joiner_dim=16)
    model = build_model(config, _VOCABULARY, LossConfig()).to(device).train()
    optimiser = build_optimiser(model, OptimiserConfig(name="scaled_adam", learning_rate=0.03))
    return model, optimiser


def _resumed(values: dict[str, Any], device: torch.device) -> Tensor:
    seed_everything(7)
    model, optimiser = _new(device)
    model.load_state_dict(values["model"])
    load_optimiser_state(optimiser, values["optimiser"])
    restore_random_state(values["random"])
    return _train_step(model, optimiser, values["counters"]["step"])


def _train_step(model: SpeechModel, optimiser: torch.optim.Optimizer, step: int) -> Tensor:
    """All parameters after the step."""
    generator = torch.Generator().manual_seed(step)
    bins = model.config.encoder.num_mel_bins
    features_NTF = torch.randn((3, 120, bins), generator=generator)
    targets_NU = torch.randint(1, _VOCABULARY, (3, 8), generator=generator)
    lengths = (torch.tensor([120, 77, 90]), torch.tensor([8, 5, 0]))
    device = next(model.parameters()).device
    optimiser.zero_grad(set_to_none=True)
    losses = model(features_NTF.to(device), lengths[0], targets_NU.to(device), lengths[1], step)
    losses.objective.backward()
    optimiser.step()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
