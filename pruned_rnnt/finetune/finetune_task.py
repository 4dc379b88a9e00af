"""The fine-tuning task: trains a recogniser, or parts of it, from a source model."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.finetune.evaluation import Evaluation
from pruned_rnnt.finetune.source import Source, check_data, check_model
from pruned_rnnt.finetune.vocabulary import (
    Vocabulary,
    check_added_are_trained,
    check_coverage,
    choose_vocabulary,
    transfer_parameters,
)
from pruned_rnnt.licences.chain import Origin
from pruned_rnnt.model.lora import add_adapters
from pruned_rnnt.model.quantisation import quantised_layers, round_weights
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.run_files import run_tokenizer
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.optim.optimiser import ParameterGroup, grouped_by_rate, layer_of
from pruned_rnnt.train.run_chain import chain_of_run
from pruned_rnnt.train.tasks.speech_task import SpeechTask

# Past the end of all encoder schedules, which are for random parameters and harm trained ones.
_STEPS_BEFORE = 100_000.0
_KEPT_HEAD = "that of the source"
_DROPPED_HEAD = "that of the source is dropped, because loss.ctc_scale is 0"


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Exclude parameters from training; returns the number of their elements.

    Args:
        patterns: names of parameters or of modules that hold them, or patterns of such names.

    Raises:
        ConfigError: a pattern matches nothing; the message lists the names.
    """
    frozen = 0
    for pattern in patterns:
        chosen = [p for name, p in model.named_parameters() if _matches(name, pattern)]
        if not chosen:
            raise ConfigError(
                f"finetune.freeze: {pattern!r} matches no parameter; the parts of this model are "
                f"{', '.join(part_names(model))}"
            )
        for parameter in chosen:
            frozen += parameter.numel() if parameter.requires_grad else 0
            parameter.requires_grad_(False)
    return frozen


def check_trained(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raise ConfigError if all parameters are frozen, and there are no adapters.

    Args:
        patterns: as of `freeze`, for the message.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"finetune.freeze={list(patterns)} leaves nothing to train")


def check_no_frozen_adapters(
    model: SpeechModel, layers: Sequence[str], patterns: Sequence[str]
) -> None:
    """Raise an error if a part of the encoder is frozen, and has adapters that change it.

    Args:
        layers: names within the encoder of the layers with adapters.
        patterns: as of `freeze`. One that matches the whole encoder is no contradiction, because
            adapters freeze its other parameters anyway.

    Raises:
        ConfigError: a pattern matches weights with adapters; the message names one.
    """
    names = [f"encoder.{name}" for name, _ in model.encoder.named_parameters()]
    for pattern in patterns:
        frozen = [name for name in layers if _matches(f"encoder.{name}.weight", pattern)]
        if frozen and not all(_matches(name, pattern) for name in names):
            raise ConfigError(
                f"finetune.freeze: {pattern!r} matches encoder.{frozen[0]}, which has an adapter "
                "(finetune.lora) that would change it: leave the pattern out, as adapters freeze "
                "all other parameters of the encoder, or set finetune.lora.rank=0"
            )


def _matches(name: str, pattern: str) -> bool:
    """True if the pattern matches the parameter's name or a module that contains it."""
    parts = name.split(".")
    starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(fnmatchcase(start, pattern) for start in starts)


def part_names(model: nn.Module) -> list[str]:
    """Names of the modules with parameters: parts, their children, and the encoder's layers."""
    names: dict[str, None] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        names[parts[0]] = None
        names[layer_of(name) or ".".join(parts[:-1][:2])] = None
    return list(names)


class FinetuneTask(SpeechTask):
    """A recogniser that starts from a source model.

    Args:
        source: None to continue a run that has checkpoints, whose parameters and tokens are used.

    Raises:
        ConfigError: data or settings do not fit the source.
        FileNotFoundError: the data are not prepared.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        ranks: Ranks,
        device: torch.device,
        *,
        source: Source | None,
    ) -> None:
        self.config = config
        self.source = source
        self._notes: list[str] = []
        if source is None:
            self.tokenizer = run_tokenizer(config.folder)
        else:
            self.tokenizer = self._fitting_vocabulary(source).tokenizer
        super().__init__(config, ranks, device)
        self.evaluation = Evaluation(config, source, ranks, device)

    def _fitting_vocabulary(self, source: Source) -> Vocabulary:
        """Check that all data fit the source; returns the vocabulary."""
        config = self.config
        check_model((source.model.config, source.model.loss_config), (config.model, config.loss))
        kind = source.config.feature_kind
        data = config.data
        new = check_data(data, data.path, kind, (data.train, data.valid))
        tokenizer = _data_tokenizer(data.path, config.finetune.vocabulary, source)
        vocabulary = choose_vocabulary(
            config.finetune.vocabulary, source.tokenizer, tokenizer, new.texts
        )
        check_coverage(vocabulary, new.texts, new.path)
        if data.old_path and data.old_share > 0:
            old = check_data(data, data.old_path, kind, (data.train,))
            check_coverage(vocabulary, old.texts, old.path)
        self._change = vocabulary.change
        self._notes = [f"fine-tuning of {source.name}", vocabulary.describe()]
        return vocabulary

    def _make_data(self, tokenizer: Tokenizer | None = None) -> DataModule:
        return super()._make_data(tokenizer or self.tokenizer)

    def _make_model(self) -> SpeechModel:
        config = self.config.finetune
        model = super()._make_model()
        model.steps_before = _STEPS_BEFORE
        if self.source is not None:
            random = transfer_parameters(self.source.model, model, self._change)
            if self.source.model.ctc_head is not None:
                kept = model.ctc_head is not None
                self._notes.append(f"CTC head: {_KEPT_HEAD if kept else _DROPPED_HEAD}")
            if random:
                self._notes.append(f"not in the source, initialised at random: {', '.join(random)}")
        if config.freeze:
            frozen = freeze(model, config.freeze)
            self._notes.append(f"frozen: {frozen:,} parameters of {', '.join(config.freeze)}")
        if config.lora.rank > 0:
            layers = add_adapters(model.encoder, config.lora)
            check_no_frozen_adapters(model, layers, config.freeze)
            self._notes.append(f"adapters of rank {config.lora.rank} on {len(layers)} layers")
        check_trained(model, config.freeze)
        if self.source is not None:
            check_added_are_trained(model, self._change, config.freeze)
        if config.quantise != "none":
            layers = round_weights(model.encoder, config.quantise)
            # The projections change the output of a four-bit file more than any other layer.
            if isinstance(model, TransducerModel):
                for each in (model.joiner.encoder_proj, model.joiner.decoder_proj):
                    layers += round_weights(each, config.quantise) if quantised_layers(each) else []
            self._notes.append(f"weights of {len(layers)} layers are rounded to {config.quantise}")
        return model

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        return grouped_by_rate(self.model, self.config.finetune.layer_decay)

    def notes(self) -> list[str]:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        mixed = self.config.data.old_share if self.config.data.old_path else 0.0
        old = f", {mixed:.0%} of the utterances from {self.config.data.old_path}" if mixed else ""
        return [*self._notes, f"trained: {trained:,} parameters{old}", *super().notes()]

    def check_files(self, folder: Path) -> None:
        if self.source is not None:
            super().check_files(folder)

    def origins(self) -> tuple[Origin, ...]:
        before = self.source.origins if self.source else chain_of_run(self.config).origins
        return (*before, *super().origins())

    def save_files(self, folder: Path) -> None:
        super().save_files(folder)
        self.evaluation.save(folder)


def _data_tokenizer(path: str, how: str, source: Source) -> Tokenizer:
    """The tokenizer of the data, or the source's if the data have none and it is kept."""
    try:
        return PreparedFolder(Path(path)).tokenizer()
    except FileNotFoundError:
        if how == "keep":
            return source.tokenizer
        raise


def task_of(source: Source | None) -> Any:
    """Builds the task for the trainer; see `FinetuneTask`."""

    def make(config: ExperimentConfig, ranks: Ranks, device: torch.device) -> FinetuneTask:
        return FinetuneTask(config, ranks, device, source=source)

    return make
