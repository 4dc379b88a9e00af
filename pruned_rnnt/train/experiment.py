"""One experiment: every configuration section, and what is built from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from pruned_rnnt.data.input.datamodule import DataConfig
from pruned_rnnt.decode.decode_set import DecodeConfig
from pruned_rnnt.model.transducer_model import LossConfig, ModelConfig
from pruned_rnnt.setting_checks import check_at_least, check_fractions
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig

CONFIG_NAME = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop: how long, how precise, what is kept and shown.

    folder: of the run; checkpoints, logs and results go there.
    steps: optimiser steps in all.
    seed: of the parameters at the start and of dropout.
    accumulate: batches whose gradients are summed for one step.
    device: `auto` takes a CUDA device where there is one.
    precision: of matrix products; float16 scales the loss against underflow.
    compile_encoder: run the encoder (a Conformer) through torch.compile, for any length; the first
        steps then take minutes. Checkpoints are the same with and without.
    average_decay: of the running average of parameters; 0 switches it off.
    log_every, validate_every, save_every: in steps; 0 stands for the end of each epoch (log_every:
        at least 1). A run also ends with a validation; with each of them goes a checkpoint.
    picture_every: steps between pictures and decoded samples in TensorBoard, besides those of each
        validation; 0 for no others.
    keep_last, keep_best: checkpoints kept, newest and of lowest validation WER.
    max_bad_steps: training stops after so many steps in a row that were skipped, for infinite or
        NaN values or for want of memory.
    threads: CPU threads of the training process; 0 leaves torch's choice.
    """

    folder: str = "exp/synthetic"
    steps: int = 1000
    seed: int = 42
    accumulate: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile_encoder: bool = False
    average_decay: float = 0.99
    log_every: int = 20
    validate_every: int = 0
    save_every: int = 0
    picture_every: int = 0
    keep_last: int = 3
    keep_best: int = 1
    max_bad_steps: int = 10
    threads: int = 0

    def __post_init__(self) -> None:
        positive = ("steps", "accumulate", "log_every", "keep_last", "max_bad_steps")
        check_at_least("train", self, **dict.fromkeys(positive, 1))
        others = ("validate_every", "save_every", "picture_every", "keep_best", "threads")
        check_at_least("train", self, **dict.fromkeys(others, 0))
        check_fractions("train", self, "average_decay", below_one=True)


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """All sections; what a YAML file and `section.key=value` may set."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        if self.train.compile_encoder and self.model.encoder.kind != "conformer":
            # Draws and schedules between its modules make another graph of every step.
            raise ValueError(
                f"train.compile_encoder is for model.encoder.kind=conformer; a "
                f"{self.model.encoder.kind} cannot be compiled while it is trained"
            )

    @property
    def folder(self) -> Path:
        return Path(self.train.folder)


def pick_device(config: TrainConfig, local_rank: int = 0) -> torch.device:
    """The device of this process.

    Raises:
        ValueError: `cuda` was asked for and there is none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device is 'cuda', but torch sees no CUDA device")
    if config.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
