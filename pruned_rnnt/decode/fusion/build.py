"""Configure the scores that beam search adds: language models, internal model, hotwords, and a
bonus for every symbol; with the scorers of a bonus and of a neural language model.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.fusion.hotwords import HotwordScorer, check_bonus, read_hotwords
from pruned_rnnt.decode.fusion.ngram import NgramScorer
from pruned_rnnt.decode.fusion.ngram_files import read_texts, read_word_ngram, symbol_bigrams
from pruned_rnnt.decode.fusion.word_scorer import WordNgramScorer
from pruned_rnnt.decode.search.states import Rows, TokenScorer
from pruned_rnnt.model.language_model import SOS_EOS, LanguageModel


class SymbolBonus:
    """A `TokenScorer` that adds the same score to each symbol.

    Log-probabilities of a language model are negative, so that a large scale shortens the texts; a
    positive bonus makes up for it.

    Args:
        bonus: a natural log-probability; may be negative.
        vocab_size: V.
    """

    capturable = True

    def __init__(self, bonus: float, vocab_size: int) -> None:
        self._bonus = bonus
        self._vocab_size = vocab_size

    def start(self, rows: int, device: torch.device) -> Rows:
        return (torch.zeros(rows, device=device),)

    def scores(self, state: Rows) -> Tensor:
        return (state[0] + self._bonus)[:, None].expand(-1, self._vocab_size)

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        return state

    def final(self, state: Rows) -> Tensor:
        return state[0]


class NeuralScorer:
    """A `TokenScorer` whose state has the next symbols' log-probabilities and the model's state.

    Args:
        model: in evaluation mode, on the device of the search.
        scale: factor of the log-probabilities.
    """

    capturable = True

    def __init__(self, model: LanguageModel, scale: float) -> None:
        self._model = model
        self._scale = scale

    def start(self, rows: int, device: torch.device) -> Rows:
        first_R = torch.full((rows,), SOS_EOS, device=device)
        return self._step(first_R, self._model.start(rows))

    def scores(self, state: Rows) -> Tensor:
        return state[0]

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        if symbols_R.is_cuda:  # Selecting the rows that emit would synchronise with the device.
            return self._step(symbols_R, state[1:])
        (rows,) = emits_R.nonzero(as_tuple=True)
        if len(rows) == 0:
            return state
        grown = self._step(symbols_R[rows], tuple(x[rows] for x in state[1:]))
        return tuple(
            before.index_copy(0, rows, after) for before, after in zip(state, grown, strict=True)
        )

    def final(self, state: Rows) -> Tensor:
        return state[0][:, SOS_EOS]

    def _step(self, symbols_R: Tensor, state: Rows) -> Rows:
        log_probs_RV, state = self._model.step(symbols_R, state)
        return (self._scale * log_probs_RV, *state)


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Scores that beam searches add to those of the model for each symbol.

    For decode.method=modified_beam and ctc_prefix_beam.

    ngram, ngram_scale: n-gram model over the symbols (ARPA), and the factor of its
        log-probabilities.
    bigram_texts, bigram_scale: as word_texts; and the factor with which the log-probabilities of
        the bigrams of symbols in these texts are subtracted. With the training texts, it takes what
        the model learned of their language from the scores (arXiv 2203.16776), so that word_scale
        can be larger.
    word_ngram: n-gram model of words (ARPA), for recognisers of letters or pieces.
    word_texts: file with a text per line, or a prepared folder for its training texts, whose
        n-grams adapt word_ngram, or take its place if that is empty.
    word_scale: factor of the log-probabilities of word_ngram and word_texts.
    word_unknown: the share of words that the n-gram model of words lacks.
    lm, lm_scale: run folder of a language model, and the factor of its log-probabilities.
    ilm_scale: factor with which the log-probabilities of the model's internal language model are
        subtracted; for models trained with loss.hat=true.
    hotwords: file with a phrase per line, and optionally its bonus after a colon (`NEW YORK :2`).
    hotword_bonus: bonus per symbol of phrases without their own, a natural log-probability.
    symbol_bonus: bonus of every symbol, a natural log-probability: makes up for the words that a
        language model with a large scale deletes. Tune it on dev, between 0 and 1.
    """

    ngram: str = ""
    ngram_scale: float = 0.2
    bigram_texts: str = ""
    bigram_scale: float = 0.3
    word_ngram: str = ""
    word_texts: str = ""
    word_scale: float = 0.5
    word_unknown: float = 0.001
    lm: str = ""
    lm_scale: float = 0.3
    ilm_scale: float = 0.0
    hotwords: str = ""
    hotword_bonus: float = 1.5
    symbol_bonus: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "ngram_scale",
            "bigram_scale",
            "word_scale",
            "lm_scale",
            "ilm_scale",
            "symbol_bonus",
        ):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        try:
            check_bonus(self.hotword_bonus)
        except ValueError as error:
            raise ValueError(f"hotword_bonus {error}") from error
        if not 0.0 < self.word_unknown < 1.0:
            raise ValueError(f"word_unknown must lie between 0 and 1, got {self.word_unknown}")

    @property
    def enabled(self) -> bool:
        return bool(self.ilm_scale or self.adds_scorers)

    @property
    def adds_scorers(self) -> bool:
        """Whether any setting needs a scorer of symbols."""
        ngrams = self.ngram or self.bigram_texts or self.word_ngram or self.word_texts
        return bool(ngrams or self.lm or self.hotwords or self.symbol_bonus)


def build_scorers(
    config: FusionConfig, tokenizer: Tokenizer | None, language_model: LanguageModel | None = None
) -> list[TokenScorer]:
    """Build the scorers of a configuration.

    Args:
        tokenizer: the model's; may be None if the configuration has no scorers.
        language_model: the model that `config.lm` names, over the same symbols, in evaluation
            mode.

    Raises:
        ValueError: tokenizer or language_model is None and a scorer needs it; and as the scorers.
        FileNotFoundError: as the scorers.
    """
    if not config.adds_scorers:
        return []
    if tokenizer is None:
        raise ValueError("decode.fusion needs the model's tokenizer, got None: pass tokenizer=")
    if config.lm and language_model is None:
        raise ValueError(
            f"decode.fusion.lm is {config.lm}, which needs its model, got None: pass "
            "language_model="
        )
    scorers: list[TokenScorer] = []
    if config.ngram:
        scorers.append(NgramScorer(Path(config.ngram), tokenizer.symbols, config.ngram_scale))
    if config.bigram_texts:
        texts = read_texts(Path(config.bigram_texts), "bigram_texts")
        names = tokenizer.symbols
        bigrams = symbol_bigrams([names[n] for n in tokenizer.encode(text)] for text in texts)
        scorers.append(NgramScorer(bigrams, names, -config.bigram_scale))
    if config.word_ngram or config.word_texts:
        words = read_word_ngram(config.word_ngram, config.word_texts)
        scorers.append(
            WordNgramScorer(
                words, tokenizer.symbols, scale=config.word_scale, unknown=config.word_unknown
            )
        )
    if language_model is not None:
        scorers.append(NeuralScorer(language_model, config.lm_scale))
    if config.hotwords:
        hotwords = read_hotwords(Path(config.hotwords), tokenizer, config.hotword_bonus)
        scorers.append(HotwordScorer(hotwords, len(tokenizer), tokenizer.symbols))
    if config.symbol_bonus:
        scorers.append(SymbolBonus(config.symbol_bonus, len(tokenizer)))
    return scorers
