"""Language models on texts: the task for the training engine, and loading a trained model."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.config.load import from_dict, value_of
from pruned_rnnt.data.input.lm_texts import TextBatch, TextFiles, TextLoader
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.model.build_model import fitted_model
from pruned_rnnt.model.language_model import (
    SOS_EOS,
    LanguageModel,
    LanguageModelConfig,
    LanguageModelLosses,
)
from pruned_rnnt.model.saved_file import UnusableFileError
from pruned_rnnt.train.engine.bad_steps import report_too_large
from pruned_rnnt.train.engine.checkpoint import CheckpointError
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import RunLog
from pruned_rnnt.train.engine.memory import out_of_memory_in
from pruned_rnnt.train.engine.report import BatchSize, Utterance
from pruned_rnnt.train.engine.run_files import check_tokens, run_tokenizer, save_tokens
from pruned_rnnt.train.engine.task import TaskDefaults
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig
from pruned_rnnt.train.run import config_path, find_checkpoint, read_checkpoint

logger = logging.getLogger(__name__)

_SAMPLES, _SAMPLE_SYMBOLS = 5, 40


@dataclass(frozen=True, kw_only=True)
class TextDataConfig:
    """The texts and their batches.

    path: folder that `pruned-rnnt prepare lm` wrote.
    train, valid: names of the splits.
    batch_symbols: largest number of symbols in a batch, including padding.
    seed: for the order of the batches.
    """

    path: str = "data/lm"
    train: str = "train"
    valid: str = "dev"
    batch_symbols: int = 8192
    seed: int = 42

    def __post_init__(self) -> None:
        check_at_least("data", self, batch_symbols=1, seed=0)


@dataclass(frozen=True, kw_only=True)
class LanguageModelExperiment:
    """All sections of a language model's configuration.

    task: `lm`; the configuration of a recogniser has no task.
    """

    task: Literal["lm"] = "lm"
    data: TextDataConfig = field(default_factory=TextDataConfig)
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(folder="exp/lm"))

    def __post_init__(self) -> None:
        if self.train.init:
            raise ValueError("train.init is for recognisers; a language model has no fine-tuning")


class LanguageModelTask(TaskDefaults):
    """Texts and model of one process; the engine's frames are symbols here.

    Raises:
        FileNotFoundError: the texts are not prepared.
        ValueError: a split has no text.
    """

    def __init__(self, config: LanguageModelExperiment, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.ranks = ranks
        folder = Path(config.data.path)
        self.tokenizer = PreparedFolder(folder).tokenizer()
        self._train = TextFiles(folder, config.data.train)
        self._valid = TextFiles(folder, config.data.valid)
        for name, texts in (("train", self._train), ("valid", self._valid)):
            if len(texts) == 0:
                raise ValueError(
                    f"data.{name} is {getattr(config.data, name)}, which has no text in {folder}: "
                    "run `pruned-rnnt prepare lm` again, or name another split"
                )
        self.model = LanguageModel(config.model, len(self.tokenizer)).to(device)

    def train_loader(self) -> TextLoader:
        return self._loader(self._train, shuffle=True)

    def losses(self, batch: TextBatch, step: int) -> LanguageModelLosses:
        losses: LanguageModelLosses = self.model(batch.texts_NU, batch.lengths_N)
        return losses

    def size(self, batch: TextBatch) -> BatchSize:
        symbols = int(batch.lengths_N.sum()) + len(batch)
        return BatchSize(utterances=len(batch), frames=symbols, symbols=symbols, audio_seconds=0.0)

    def utterances(self, batch: TextBatch) -> list[Utterance]:
        return [
            Utterance(id=f"{self.config.data.train}-{index}", frames=0, symbols=int(length))
            for index, length in zip(batch.ids, batch.lengths_N, strict=True)
        ]

    def shapes(self, batch: TextBatch) -> dict[str, Any]:
        return {"texts": list(batch.texts_NU.shape)}

    @torch.no_grad()
    def validate(self, step: int, log: RunLog | None) -> float | None:
        """Perplexity per symbol, counting the end of each text as a symbol."""
        was_training, device = self.model.training, next(self.model.parameters()).device
        self.model.eval()
        loss = symbols = 0.0
        too_large: list[tuple[TextBatch, str]] = []

        def add(batch: TextBatch) -> None:
            nonlocal loss, symbols
            loss += float(self.losses(batch.to(device), step).total.sum())
            symbols += self.size(batch).symbols

        # Each text once: no batch is repeated to give all processes equally many, as in training.
        everything = TextLoader(self._valid, self.config.data.batch_symbols, shuffle=False)
        for batch in islice(everything, self.ranks.rank, None, self.ranks.world_size):
            if message := out_of_memory_in(partial(add, batch)):
                too_large.append((batch, message))
        self.model.train(was_training)
        folder = Path(self.config.train.folder)
        report_too_large(self, folder, step, self.ranks.rank, too_large)
        loss, symbols, skipped = self.ranks.sum([loss, symbols, len(too_large)])
        if not symbols:
            return None
        per_symbol = loss / symbols
        perplexity = math.exp(min(per_symbol, 100.0))
        if log is not None:
            values = {"total": per_symbol, "perplexity": perplexity, "skipped_batches": skipped}
            log.scalars("valid", step, values)
            logger.info("step %d validation: perplexity %.3f", step, perplexity)
            self.show(step, log)
        return perplexity

    @torch.no_grad()
    def show(self, step: int, log: RunLog) -> None:
        """Log texts that the model generates."""
        was_training = self.model.training
        self.model.eval()
        lines = [f"- {text}" for text in sample_texts(self.model, self.tokenizer, seed=step)]
        self.model.train(was_training)
        log.text("valid/samples", step, "\n".join(lines))

    def checkpoint_values(self) -> dict[str, Any]:
        return {"vocab_size": self.model.vocab_size}

    def check_files(self, folder: Path) -> None:
        check_tokens(self.tokenizer, folder, self.config.data.path)

    def save_files(self, folder: Path) -> None:
        save_tokens(self.tokenizer, folder)

    def _loader(self, texts: TextFiles, *, shuffle: bool) -> TextLoader:
        return TextLoader(
            texts,
            self.config.data.batch_symbols,
            shuffle=shuffle,
            seed=self.config.data.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
        )


@torch.no_grad()
def sample_texts(model: LanguageModel, tokenizer: Tokenizer, seed: int) -> list[str]:
    """Draw texts from the model, cut after 40 symbols, without torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    symbols_R = torch.full((_SAMPLES,), SOS_EOS, device=device)
    state = model.start(_SAMPLES)
    drawn = []
    for _ in range(_SAMPLE_SYMBOLS):
        log_probs_RV, state = model.step(symbols_R, state)
        chosen_R1 = torch.multinomial(log_probs_RV.exp().cpu(), 1, generator=generator)
        symbols_R = chosen_R1[:, 0].to(device)
        drawn.append(symbols_R)
    texts: Sequence[list[int]] = torch.stack(drawn, dim=1).tolist()
    return [
        tokenizer.decode(text[: text.index(SOS_EOS)] if SOS_EOS in text else text) for text in texts
    ]


def load_language_model(folder: Path, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """The model of a run's best checkpoint, averaged, in evaluation mode, and its tokenizer.

    Raises:
        CheckpointError: the folder has no checkpoint, or that of another task.
    """
    if value_of("task", config_path(folder)) != "lm":
        raise CheckpointError(f"{folder} is no run of a language model: check decode.fusion.lm")
    path = find_checkpoint(folder, "best")
    values = read_checkpoint(path)
    saved = from_dict(LanguageModelExperiment, values["config"], str(path))
    state = values["average"] if values["average"] is not None else values["model"]
    try:
        model = fitted_model(
            lambda: LanguageModel(saved.model, values["vocab_size"]), state, str(path)
        )
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from error
    return model.to(device).eval(), run_tokenizer(folder)
