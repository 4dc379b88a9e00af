"""The configuration of an experiment with all sections, and the sections that belong to no other
code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pruned_rnnt.config.load import ConfigError, value_of
from pruned_rnnt.data.audio.features import FeatureKind
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.filters import MOST_FRAME_STEP
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.licences.terms import UNKNOWN
from pruned_rnnt.model.encoder_kinds import subsampling_factor
from pruned_rnnt.model.lora import LoraConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig
from pruned_rnnt.train.tasks.mwer import MwerConfig


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How training starts from the model that train.init names; the data are in data.*.

    vocabulary: `keep` uses the symbols of the source; `extend` adds the symbols of the data that
        the source lacks; `replace` uses those of the data, with the rows of symbols that the source
        has too; `auto` keeps if the source's symbols cover the texts and, if it has languages,
        those of the data, and otherwise extends.
    freeze: parts that are not trained, by their names in the model or patterns of them: encoder,
        encoder.layers.0, *.bias. Frozen batch normalisations keep their running statistics.
    layer_decay: the learning rate of each encoder layer as a fraction of that of the layer above;
        predictor, joiner and the top layer have the full rate.
    checkpoint: for a run as source: its checkpoint, as decode.checkpoint names it.
    tokens: for an icefall checkpoint: its bpe.model or tokens.txt, if they are not beside it.
    quantise: round the matrices of the encoder, and those before the joiner's activation, in each
        pass as files of `export --precision` do, so that training makes up for it; none for no
        rounding. The result is an ordinary model.
    trust: allow an icefall checkpoint to run code when it is loaded, as pickle files can.
    """

    vocabulary: Literal["auto", "keep", "extend", "replace"] = "auto"
    freeze: tuple[str, ...] = ()
    layer_decay: float = 1.0
    checkpoint: str = "last"
    tokens: str = ""
    trust: bool = False
    quantise: Literal["none", "int8", "int4"] = "none"
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"finetune.layer_decay is {self.layer_decay}, needs 0 < x <= 1")
        if self.quantise != "none" and self.lora.rank > 0:
            raise ValueError(
                f"finetune.quantise is {self.quantise} and finetune.lora.rank is {self.lora.rank}: "
                "rounded weights need finetune.lora.rank=0; fine-tune with adapters first, and "
                "then fine-tune the result with finetune.quantise"
            )


@dataclass(frozen=True, kw_only=True)
class CardConfig:
    """What the README of an exported model says that this program cannot know.

    name: of the model; empty: the name of the run's folder.
    license: identifier as on the hub, such as apache-2.0, cc-by-4.0 or other; `unknown` until the
        owner of the model sets it. `export` refuses one that contradicts the licences of the data
        and weights that the model was made from.
    license_reason: why the licence may be given although it contradicts one of those; the card
        shows it.
    language: codes of the languages, such as [en] or [zh, en].
    data: what the model was trained on, in words; empty: the recipe and its counts.
    datasets: names of the training data on the hub, such as [openslr/librispeech_asr].
    description: a paragraph about the model, its purpose and limits.
    """

    name: str = ""
    license: str = UNKNOWN
    license_reason: str = ""
    language: tuple[str, ...] = ()
    data: str = ""
    datasets: tuple[str, ...] = ()
    description: str = ""


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
        self._set_subsampling_factor()
        self._check_features()
        if self.finetune != FinetuneConfig() and not self.train.init:
            raise ValueError("the settings of finetune need train.init, the model to start from")
        if self.train.compile_encoder and self.finetune.lora.rank > 0:
            raise ValueError("train.compile_encoder does not support adapters (finetune.lora)")
        if self.finetune.lora.rank > 0 and getattr(self.model.encoder, "frozen", "") == "all":
            raise ValueError(
                f"finetune.lora.rank is {self.finetune.lora.rank} and model.encoder.frozen is all, "
                "so the adapters would get no gradients: set model.encoder.frozen=convolutions "
                "(adapters freeze the other parameters) or finetune.lora.rank=0"
            )
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

    def _set_subsampling_factor(self) -> None:
        """Replace null in data.filters by the number, which runs save."""
        filters = self.data.filters
        if filters.subsampling_factor is None:
            factor = subsampling_factor(self.model.encoder)
            if not self.loss.has_ctc_head and self.loss.rnnt_type == "regular":
                factor = min(factor, MOST_FRAME_STEP)
            filters = replace(filters, subsampling_factor=factor)
            object.__setattr__(self, "data", replace(self.data, filters=filters))

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


def check_no_folder(overrides: Sequence[str], output: Path) -> None:
    """Raise ConfigError if overrides name the folder of a run that a command writes to `output`."""
    if (folder := value_of("train.folder", overrides=overrides)) is not None:
        raise ConfigError(
            f"train.folder is {folder}, but the run is written to {output}, as the command says: "
            "leave train.folder out"
        )
