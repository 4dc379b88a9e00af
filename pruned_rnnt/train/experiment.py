"""The configuration of an experiment with all sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pruned_rnnt.data.audio.feature_kinds import FeatureKind
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.train.card_config import CardConfig
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.finetune_config import FinetuneConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig
from pruned_rnnt.train.tasks.mwer import MwerConfig


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """All sections that a YAML file and `section.key=value` may set."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mwer: MwerConfig = field(default_factory=MwerConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    card: CardConfig = field(default_factory=CardConfig)

    def __post_init__(self) -> None:
        self._check_features()
        if self.finetune != FinetuneConfig() and not self.train.init:
            raise ValueError("the settings of finetune need train.init, the model to start from")
        if self.train.compile_encoder and self.finetune.lora.rank > 0:
            raise ValueError("train.compile_encoder does not support adapters (finetune.lora)")
        if self.train.compile_encoder and self.finetune.quantise != "none":
            raise ValueError("train.compile_encoder does not support finetune.quantise")
        if self.train.compile_encoder and self.model.encoder.kind != "conformer":
            # Random draws and schedules between its modules change the graph in every step.
            raise ValueError(
                f"train.compile_encoder is for model.encoder.kind=conformer; a "
                f"{self.model.encoder.kind} cannot be compiled for training"
            )
        if self.mwer.enabled and self.loss.kind == "ctc":
            raise ValueError(
                "mwer.enabled=true needs a transducer, but loss.kind is 'ctc', which has none; set "
                "loss.kind to pruned or full, or mwer.enabled=false"
            )

    def _check_features(self) -> None:
        """Raise ValueError if the encoder reads other features than `data` has."""
        features = self.model.encoder.features
        if features != "fbank" and self.data.features != "waveform":
            raise ValueError(
                f"model.encoder.features is {features} and data.features is {self.data.features}: "
                "such features are computed from recordings, so set data.features=waveform (and "
                "prepare the data with --features waveform)"
            )
        if features == "samples":
            self.data.check_unchanged_samples()
            if self.loss.cr_ctc_scale > 0:
                raise ValueError(
                    f"loss.cr_ctc_scale is {self.loss.cr_ctc_scale}, whose two views differ in "
                    "their SpecAugment masks, but samples have none: set loss.cr_ctc_scale=0"
                )

    @property
    def feature_kind(self) -> FeatureKind:
        """The features of the model."""
        return FeatureKind.of_encoder(self.model.encoder)

    @property
    def folder(self) -> Path:
        return Path(self.train.folder)
