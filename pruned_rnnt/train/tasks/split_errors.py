"""The errors of a model on a split, for commands that compare models."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import score_problem
from pruned_rnnt.decode.decode_set import decode_set
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.scoring.error_rates import SetErrors
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SplitErrors:
    """Errors and words of the references of a set; characters instead of words if metric is cer."""

    errors: int
    words: int
    metric: str = "wer"

    @property
    def rate(self) -> float:
        return self.errors / max(self.words, 1)

    @property
    def unit(self) -> str:
        return {"wer": "words", "cer": "characters"}[self.metric]


def first_split(path: str, names: str) -> str:
    """The first of these splits that the prepared folder has; empty if it has none of them."""
    splits = PreparedFolder(Path(path)).splits()
    return next((name for name in names.split(",") if name in splits), "")


def measure_errors(
    model: SpeechModel,
    tokenizer: Tokenizer,
    config: ExperimentConfig,
    split: str,
    *,
    ranks: Ranks,
    sample: int | None = None,
) -> SplitErrors:
    """The errors of the search of `config.decode` on a split of `config.data`, over all processes.

    Without the configuration's language models and hotwords, which are tied to the vocabulary that
    they were made for. Texts of scores that are NaN or infinite count like others, with a warning:
    an error would leave the other processes waiting.

    Args:
        model: on the device that it shall use.
        sample: only so many utterances.
    """
    search = replace(config.decode, fusion=FusionConfig())
    data = DataModule(
        config.data,
        rank=ranks.rank,
        world_size=ranks.world_size,
        tokenizer=tokenizer,
        kind=config.feature_kind,
    )
    # Starting workers draws from torch's generator.
    with torch.random.fork_rng(devices=[]):
        loader = data.test_loader(split, sample=sample)
        decoded = decode_set(model, loader, tokenizer, search, finite=False)
    utterances = [u for u in decoded.utterances if not u.repeated]
    broken = [(u.id, p) for u in utterances for h in u.hypotheses[:1] if (p := score_problem(h))]
    if broken:
        name, problem = broken[0]
        logger.warning("%d utterances of %s, such as %s: %s", len(broken), split, name, problem)
    own = SetErrors.of([utterance.transcript for utterance in utterances])
    total = sum(ranks.gather(own), SetErrors())
    counts, metric = total.headline(search.metric), total.metric(search.metric)
    return SplitErrors(errors=counts.errors, words=counts.reference_words, metric=metric)
