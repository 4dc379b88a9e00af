"""Speech recognisers on prepared data: the task for the training engine."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.loader import BatchLoader
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.emission_delay import percentile
from pruned_rnnt.decode.word_times import frame_seconds
from pruned_rnnt.licences.chain import Origin, add_origins
from pruned_rnnt.model.build_model import build_model
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.encoder_graphs import EncoderGraphs, graph_obstacle
from pruned_rnnt.model.inference_graphs import InferenceGraphs
from pruned_rnnt.model.kernels.available import kernel_report
from pruned_rnnt.model.speech_model import ModelLosses, SpeechModel, TransducerModel
from pruned_rnnt.model.training_shapes import TrainingShapes
from pruned_rnnt.model.transformers_model import TransformersConfig
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine.bad_steps import first_ids, report_too_large
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import RunLog, log_info
from pruned_rnnt.train.engine.report import BatchSize, Utterance
from pruned_rnnt.train.engine.run_files import check_tokens, save_p99_duration, save_tokens
from pruned_rnnt.train.engine.task import TaskDefaults
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.optim.optimiser import ParameterGroup, grouped_by_rate
from pruned_rnnt.train.pretrained_encoder import pretrained_origins, start_from_pretrained
from pruned_rnnt.train.run_chain import origins_of_data
from pruned_rnnt.train.tasks.delay_control import DelayControl, check_word_times
from pruned_rnnt.train.tasks.mwer import MinimumWordError
from pruned_rnnt.train.tasks.validate import (
    ValidationReport,
    lattice_of_example,
    samples_as_markdown,
    spectrogram_of_example,
    validate,
)

logger = logging.getLogger(__name__)

# Percentiles of the emission delay that validations log.
_DELAYS = (50, 95)


def prepare_encoder(model: SpeechModel, config: TrainConfig) -> None:
    """Set the encoder to run compiled or as CUDA graphs, as configured."""
    if config.compile_encoder:
        # In place, so that the names of parameters in checkpoints stay the same.
        model.encoder.compile(dynamic=True)
    elif config.cuda_graphs == "auto" and not graph_obstacle(model.encoder):
        model.encoder_graphs = EncoderGraphs(model.encoder)


def graph_report(model: SpeechModel, config: TrainConfig) -> str:
    """A line for the log: whether the encoder runs as CUDA graphs, and if not, why not."""
    if model.encoder_graphs is not None:
        return "CUDA graphs of the encoder: used; a batch of a new size takes longer once"
    if config.cuda_graphs == "off":
        return "CUDA graphs of the encoder: off"
    reason = "it is compiled" if config.compile_encoder else graph_obstacle(model.encoder)
    return f"CUDA graphs of the encoder: not used, {reason}"


def _warn_of_many_chunks(encoder: EncoderConfig) -> None:
    if not (isinstance(encoder, ConformerSettings) and encoder.causal):
        return
    if len(set(encoder.chunk_sizes)) > 1:
        logger.warning(
            "of our trainings with several sizes in model.encoder.chunk_sizes, one in four with "
            "loss.kind=full failed (it guessed words before they were spoken), and none with "
            "loss.kind=pruned: see docs/lost_speech.md"
        )


class SpeechTask(TaskDefaults):
    """Data module and transducer of one process.

    Raises:
        FileNotFoundError: the data are not prepared.
        UsageError: loss.fastemit_lambda is negative, or words lack the times that
            loss.target_delay_ms needs.
    """

    _mwer: MinimumWordError | None = None
    _delay: DelayControl | None = None

    def __init__(self, config: ExperimentConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.ranks = ranks
        if not config.loss.fastemit_lambda >= 0:  # earlier versions trained with such values
            raise UsageError(
                f"loss.fastemit_lambda is {config.loss.fastemit_lambda}, needs at least 0 to "
                "train: 0 turns FastEmit off"
            )
        self.data = self._make_data()
        # Raises errors about the validation set now, not at the first validation.
        self.data.valid_loader()
        self.model = self._make_model().to(device)
        self.model.encoder.check_trainable()
        batches = config.train.accumulate * ranks.world_size
        self.model.batch_seconds = config.data.max_duration * batches
        prepare_encoder(self.model, config.train)
        if config.mwer.enabled:
            # ExperimentConfig rejects it for other models.
            assert isinstance(self.model, TransducerModel)
            self._mwer = MinimumWordError(self.model, self.data.tokenizer, config.mwer)
        loss = config.loss
        if ranks.rank == 0 and loss.kind == "full":
            _warn_of_many_chunks(config.model.encoder)
        if loss.target_delay_ms is not None:
            valid = config.data.valid
            check_word_times(self.data.folder.cuts(valid, lazy=True), valid)
            self._delay = DelayControl(
                loss.target_delay_ms / 1000,
                loss.delay_penalty,
                loss.warm_up_steps,
                self.data.tokenizer,
                ranks,
                frame_seconds=frame_seconds(self.model.encoder),
            )

    def _make_data(self, tokenizer: Tokenizer | None = None) -> DataModule:
        """The data, with the symbols of the tokenizer if there is one."""
        loss, ranks = self.config.loss, self.ranks
        return DataModule(
            self.config.data,
            rank=ranks.rank,
            world_size=ranks.world_size,
            view_mask_factor=loss.cr_ctc_mask_factor if loss.views == 2 else None,
            tokenizer=tokenizer,
            kind=self.config.feature_kind,
            ctc=loss.kind == "ctc",
        )

    def _make_model(self) -> SpeechModel:
        """The model on the CPU."""
        config = self.config
        model = build_model(config.model, len(self.data.tokenizer), config.loss)
        start_from_pretrained(model.encoder, config)
        return model

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        encoder = self.config.model.encoder
        if isinstance(encoder, TransformersConfig):
            return grouped_by_rate(self.model, encoder.layer_decay, pretrained_rate=encoder.rate)
        return ()

    def train_loader(self) -> BatchLoader:
        return self.data.train_loader()

    def begin_step(self, step: int) -> None:
        if self._delay is not None:
            assert isinstance(self.model, TransducerModel)
            assert self.model.pruned_loss is not None
            self.model.pruned_loss.set_delay_penalty(self._delay.begin(step))

    def losses(self, batch: Batch, step: int) -> ModelLosses:
        losses: ModelLosses = self.model(
            batch.features_NTF,
            batch.feature_lengths_N,
            batch.targets_NU,
            batch.target_lengths_N,
            step,
            batch.second_view_NTF,
        )
        if not self.model.training:  # a validation
            return losses
        if self._delay is not None:
            self._delay.observe(batch, losses)
        return losses if self._mwer is None else self._mwer.losses(batch, losses)

    def size(self, batch: Batch) -> BatchSize:
        return BatchSize(
            utterances=len(batch),
            frames=int(self.model.encoder.output_lengths(batch.feature_lengths_N).sum()),
            symbols=int(batch.target_lengths_N.sum()),
            audio_seconds=sum(batch.durations),
        )

    def utterances(self, batch: Batch) -> list[Utterance]:
        return [
            Utterance(id=name, frames=int(frames), symbols=int(symbols))
            for name, frames, symbols in zip(
                batch.ids, batch.feature_lengths_N, batch.target_lengths_N, strict=True
            )
        ]

    def shapes(self, batch: Batch) -> dict[str, Any]:
        utterances, longest, bins = batch.features_NTF.shape
        if batch.second_view_NTF is not None:
            utterances *= 2
        frames = int(self.model.encoder.output_lengths(torch.tensor(longest)))
        symbols = batch.targets_NU.size(1)
        return {
            "features": [utterances, longest, bins],
            "targets": [utterances, symbols],
            "lattice": [utterances, frames, symbols + 1],
            "lattice_nodes": utterances * frames * (symbols + 1),
        }

    def validate(self, step: int, log: RunLog | None) -> float | None:
        report = self._validate(self.data.valid_loader(), step, self.ranks)
        (too_large,) = self.ranks.sum([len(report.too_large)])
        metric = report.errors.metric(self.config.decode.metric)
        errors = report.errors.headline(metric)
        if self._delay is not None:
            self._delay.correct(report.delays, errors.rate)
        if log is not None:
            rate: dict[str, float] = {metric: errors.rate} if errors.reference_words else {}
            values = {**report.losses, **rate, **report.masses, "skipped_batches": too_large}
            values |= {
                f"delay_p{p}": percentile(report.delays, p) for p in _DELAYS if report.delays
            }
            if self._delay is not None:
                values["delay_penalty"] = self._delay.penalty
            log.scalars("valid", step, values)
            loss = report.losses.get("total", math.nan)
            about = f"step {step} validation: loss {loss:.4f} {metric.upper()}"
            left_out = f", without {too_large:.0f} batches that did not fit" if too_large else ""
            if errors.reference_words:
                full = f"{about} {errors}{left_out}"
                log_info(logger, f"{about} {errors.rate:.2%}{left_out}", full)
            else:
                logger.warning(
                    "%s unknown%s: no reference word of data.valid=%s was read, so that this step "
                    "has no score for early stopping and decode.checkpoint=best",
                    about,
                    left_out,
                    self.config.data.valid,
                )
            if self._delay is not None and report.delays:
                delay = f"{1000 * percentile(report.delays, 95):.0f} ms"
                message = f"p95 of the delay {delay}, delay penalty {self._delay.penalty:.4f}"
                if not self._delay.is_settled:
                    message += " until half of the words are right and their delay has settled"
                log_info(logger, message, f"step {step} validation: {message}")
            self._show(report, step, log)
        return errors.rate if errors.reference_words else None

    def show(self, step: int, log: RunLog) -> None:
        # Starting workers draws from torch's generator.
        with torch.random.fork_rng(devices=[]):
            first = list(itertools.islice(self.data.valid_loader(), 1))
        self._show(self._validate(first, step, Ranks()), step, log)

    def _validate(self, batches: Any, step: int, ranks: Ranks) -> ValidationReport:
        # Without gradients each pass would be compiled again, which costs more than it saves.
        stance: AbstractContextManager[Any] = (
            torch.compiler.set_stance("force_eager")
            if self.config.train.compile_encoder
            else nullcontext()
        )
        if self.model.encoder_graphs is not None:
            self.model.inference_graphs = InferenceGraphs()
        losses = partial(self.losses, step=step)
        with stance:
            report = validate(self.model, losses, batches, self.data.tokenizer, ranks=ranks)
        self.model.inference_graphs = None  # training needs the memory
        report_too_large(self, self.config.folder, step, self.ranks.rank, report.too_large)
        if report.without_loss:
            logger.warning(
                "validation at step %d: %d utterances have no finite loss and are left out of the "
                "mean (too short for their symbols?): %s",
                step,
                len(report.without_loss),
                first_ids(report.without_loss),
            )
        return report

    def _show(self, report: ValidationReport, step: int, log: RunLog) -> None:
        if not log.shows_figures:
            return
        durations = self.config.loss.durations
        figure = lattice_of_example(
            report,
            self.data.tokenizer,
            f"step {step}",
            durations,
            frame_seconds(self.model.encoder),
        )
        if figure is not None:
            log.figure("valid/lattice", step, figure)
        spectrogram = spectrogram_of_example(report, f"step {step}", self.data.kind)
        if spectrogram is not None:
            log.figure("valid/spectrogram", step, spectrogram)
        log.text("valid/samples", step, samples_as_markdown(report.samples))

    def release_memory(self) -> None:
        if (graphs := self.model.encoder_graphs) is not None:
            graphs.clear()
            graphs.shapes.drop_newest()

    def notes(self) -> list[str]:
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            return []
        return [kernel_report(device), graph_report(self.model, self.config.train)]

    def checkpoint_values(self) -> dict[str, Any]:
        return {"vocab_size": self.model.vocab_size}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, DelayControl | TrainingShapes]:
        """The parts that have a state besides that of the model, by their names in checkpoints."""
        parts: dict[str, DelayControl | TrainingShapes] = {}
        if self._delay is not None:
            parts["delay"] = self._delay
        if self.model.encoder_graphs is not None:
            parts["shapes"] = self.model.encoder_graphs.shapes
        return parts

    def check_files(self, folder: Path) -> None:
        check_tokens(self.data.tokenizer, folder, self.config.data.path)

    def origins(self) -> tuple[Origin, ...]:
        """The data and weights that the model is made from."""
        return (*pretrained_origins(self.config), *origins_of_data(self.config.data))

    def save_files(self, folder: Path) -> None:
        save_tokens(self.data.tokenizer, folder)
        add_origins(folder, self.origins())
        save_p99_duration(folder, self.data.p99_duration)
