"""Moves the delay penalty so that symbols are emitted with a given delay.

Axes: N utterances, U symbols.

    delay of a word = expected emission time of its last symbol - end of the word
    estimate        = 95th percentile of the delays of the last batches + correction
    error           = estimate - target
    sum            += _SUM_GAIN * error                       each step
    penalty         = sum + _GAIN * error                     both within 0 to _MOST_PENALTY

The occupancies of the lattice give the expected emission times of every batch, but a search emits
at other times than they say, and a model without augmentation and dropout at other times than in
training. So the correction is what greedy search of the validation set last had more than the
estimate without it.

While the alignment forms, delays change by themselves, and a penalty then would move the alignment
for good. So the penalty changes only once greedy search finds half of the words and their delay has
changed little since the validation before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.speech_dataset import aligned_words
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.emission_delay import percentile, spoken_words
from pruned_rnnt.decode.word_times import FRAME_SECONDS, word_spans
from pruned_rnnt.diagnostics import mean_symbol_delay
from pruned_rnnt.model.speech_model import ModelLosses
from pruned_rnnt.system.device import HostCopy
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine.distributed import Ranks

_PERCENT = 95.0
# Of the error in seconds. A small Conformer's delay falls by about 25 s for each unit of the
# penalty, and follows it in 65 steps; with a sum that grows seven times as fast, it swings by
# 400 ms. These gains need about 150 steps, and stay stable with twice the slope or the time.
_GAIN, _SUM_GAIN = 1.8e-2, 2.8e-4
# The error in seconds beyond which the penalty moves no faster.
_MOST_ERROR = 0.2
_MOST_PENALTY = 0.5
# The delay is settled if fewer words than this are wrong and the percentile has changed by less
# than these seconds. In a training of the synthetic recipe, a penalty before that left 7.5 instead
# of 2.2% of errors, and the 95th percentile 56 ms below its target.
_MOST_WRONG, _SETTLED = 0.5, 0.05
# The share of the earlier batches that the next one keeps.
_DECAY = 0.95
# Delays are counted in bins of 10 ms.
_LEAST_SECONDS, _MOST_SECONDS, _BIN_SECONDS = -2.0, 6.0, 0.01
_BINS = round((_MOST_SECONDS - _LEAST_SECONDS) / _BIN_SECONDS)
# Steps in which at least one word must have a time.
_PATIENCE = 20

_Counts = npt.NDArray[np.float64]


class _WordEnd(NamedTuple):
    """The end of a word in a batch: the utterance, its last symbol, and seconds."""

    utterance: int
    symbol: int
    seconds: float


class DelayControl:
    """The controller of one training process.

    Args:
        target: 95th percentile of the delay, in seconds.
        penalty: to start with.
        first_step: penalties change from this step on.
        frame_seconds: of an encoder frame.

    Attributes:
        penalty: for the next batch.
        is_settled: the alignment has formed; until then the penalty does not change.
    """

    def __init__(
        self,
        target: float,
        penalty: float,
        first_step: int,
        tokenizer: Tokenizer,
        ranks: Ranks,
        *,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self.penalty = self._sum = penalty
        self._target = target
        self._frame = frame_seconds
        self._first_step = first_step
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._correction = 0.0
        # Of the last validation: the percentile of greedy search.
        self._validated = math.inf
        self.is_settled = False
        self._counts: _Counts = np.zeros(_BINS)
        self._step = -1
        self._without_words = 0
        # Of the batches since the last update: delays of words, and copies that have not arrived.
        self._delays: list[float] = []
        self._pending: list[tuple[HostCopy, list[_WordEnd]]] = []

    def begin(self, step: int) -> float:
        """The penalty for the batches of a step; all processes call it for each step."""
        if step != self._step:
            self._step = step
            self._update(step)
        return self.penalty

    def observe(self, batch: Batch, losses: ModelLosses) -> None:
        """Take in the occupancies of a batch, without waiting for the device."""
        assert losses.occupancy is not None
        ends = self._word_ends(batch)
        if ends:
            # With CR-CTC, the occupancies are those of all first views, then of the second ones.
            first = type(losses.occupancy)(*(each[: len(batch)] for each in losses.occupancy))
            found = mean_symbol_delay(first, losses.frame_lengths, batch.target_lengths_N)
            self._pending.append((HostCopy([found.frames]), ends))

    def correct(self, seconds: Sequence[float], wrong: float) -> None:
        """Take in the delays of words that greedy search found in the validation set.

        Args:
            wrong: its error rate.
        """
        estimate = _quantile(self._counts)
        if not seconds or estimate is None:
            return
        found = percentile(seconds, _PERCENT)
        self._correction = found - estimate
        if wrong < _MOST_WRONG and abs(found - self._validated) < _SETTLED:
            self.is_settled = True
        self._validated = found

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        self._collect()
        return {
            "penalty": self.penalty,
            "sum": self._sum,
            "correction": self._correction,
            "validated": self._validated,
            "is_settled": self.is_settled,
            "counts": self._counts.tolist(),
            "step": self._step,
            "without_words": self._without_words,
            "delays": self._delays,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.penalty, self._sum = state["penalty"], state["sum"]
        self._correction = state["correction"]
        # Earlier versions began at once.
        self._validated = state.get("validated", math.inf)
        self.is_settled = state.get("is_settled", True)
        self._counts = np.array(state["counts"])
        self._step, self._without_words = state["step"], state["without_words"]
        self._delays, self._pending = list(state["delays"]), []

    def _collect(self) -> None:
        for copy, ends in self._pending:
            frames_NU: Tensor = copy.tensors()[0]
            frames = frames_NU.tolist()
            for end in ends:
                seconds = (frames[end.utterance][end.symbol] + 1) * self._frame - end.seconds
                if seconds == seconds:  # not NaN
                    self._delays.append(seconds)
        self._pending = []

    def _update(self, step: int) -> None:
        self._collect()
        counts = np.array(self._ranks.sum(_counts(self._delays).tolist()))
        self._delays = []
        if step == 0:
            return
        self._check(counts)
        self._counts = _DECAY * self._counts + counts
        estimate = _quantile(self._counts)
        if self.is_settled and step >= self._first_step and estimate is not None:
            error = estimate + self._correction - self._target
            error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
            self._sum = _within(self._sum + _SUM_GAIN * error)
            self.penalty = _within(self._sum + _GAIN * error)

    def _check(self, counts: _Counts) -> None:
        self._without_words = 0 if counts.any() else self._without_words + 1
        if self._without_words == _PATIENCE:
            raise _no_word_times(f"{_PATIENCE} steps", "train")

    def _word_ends(self, batch: Batch) -> list[_WordEnd]:
        """The ends of the words whose times are known, in the time of the features."""
        names, ends = self._tokenizer.symbols, []
        lengths = batch.feature_lengths_N.tolist()
        for n, words in enumerate(batch.words):
            if not words:
                continue
            spoken = spoken_words(words, self._tokenizer)
            symbols = self._tokenizer.encode(batch.texts[n])
            spans = word_spans([names[i] for i in symbols])
            # A language tag comes before the words. Utterances of several languages that were
            # joined have more tags, at places that are not known here.
            first = batch.languages[n] in self._tokenizer.languages
            if len(spans) == len(spoken) and batch.target_lengths_N[n] == first + len(symbols):
                # Augmentation may have changed the tempo.
                speed = lengths[n] / batch.lengths_before[n]
                ends += [
                    _WordEnd(n, first + stop - 1, speed * word.end)
                    for (_, stop), word in zip(spans, spoken, strict=True)
                ]
        return ends


def _within(penalty: float) -> float:
    return min(max(penalty, 0.0), _MOST_PENALTY)


def check_word_times(cuts: Iterable[Any], split: str) -> None:
    """Raise a UsageError if none of the validation cuts has words with times."""
    if not any(aligned_words(cut) for cut in cuts):
        raise _no_word_times(f"the validation set {split}", split)


def _no_word_times(where: str, split: str) -> UsageError:
    return UsageError(
        f"loss.target_delay_ms needs the times of words, and {where} had none: `pruned-rnnt align "
        f"OFFLINE_RUN --split {split} --format lhotse` writes cuts with word times, which can "
        "replace the file of the split in data.path; or set loss.target_delay_ms=null"
    )


def _counts(seconds: Sequence[float]) -> _Counts:
    """The number of delays in each bin; those beyond the ends are in the first and the last."""
    places = (np.array(seconds) - _LEAST_SECONDS) / _BIN_SECONDS
    bins = np.clip(places.astype(np.int64), 0, _BINS - 1)
    return np.bincount(bins, minlength=_BINS).astype(np.float64)


def _quantile(counts: _Counts) -> float | None:
    """The percentile of the counted delays in seconds; None without any."""
    total = counts.cumsum()
    if total[-1] == 0:
        return None
    wanted = _PERCENT / 100 * total[-1]
    place = int(np.searchsorted(total, wanted))
    inside = (wanted - (total[place] - counts[place])) / max(counts[place], 1e-12)
    return float(_LEAST_SECONDS + (place + min(inside, 1.0)) * _BIN_SECONDS)
