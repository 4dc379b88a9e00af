"""Greedy search with the ONNX files of a TDT model, or of one in NeMo's layout.

Axes: N = 1 utterance, T' encoder frames, J joiner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS
from pruned_rnnt.export.differences import SHERPA_MAX_NEMO_SYMBOLS
from pruned_rnnt.export.onnx_folder import Feeds

_FloatArray = npt.NDArray[np.float32]
_Run = Callable[[Feeds], list[Any]]


class NemoSearch(NamedTuple):
    """Greedy search with the graphs of a TDT model, or of one in NeMo's layout, as in sherpa-onnx:
    the most probable symbol and duration at each node.

    decoder, joiner: run a graph on inputs by name (`pruned_rnnt.export.nemo_graphs`).
    state_sizes: layers and width of the states of the decoder.
    vocab_size: V with the blank, which is the last symbol.
    has_durations: whether the logits of V symbols are followed by those of durations.
    """

    decoder: _Run
    joiner: _Run
    state_sizes: tuple[int, int]
    vocab_size: int
    has_durations: bool

    def best_path(self, encoded_JT: _FloatArray) -> Hypothesis:
        """The symbols in our order, in which the blank is the first one.

        Scores are log-probabilities without `<unk>`, which the joiner's graph leaves out.
        """
        blank = self.vocab_size - 1
        most = SHERPA_MAX_SYMBOLS if self.has_durations else SHERPA_MAX_NEMO_SYMBOLS
        layers, width = self.state_sizes
        states = [np.zeros((layers, 1, width), dtype=np.float32) for _ in range(2)]
        predicted_NJ1, states = self._predict(blank, states)
        symbols, frames, scores, durations = [], [], [], []
        frame = taken = 0
        score = 0.0
        while frame < encoded_JT.shape[1]:
            inputs = {
                "encoder_outputs": encoded_JT[None, :, frame : frame + 1],
                "decoder_outputs": predicted_NJ1,
            }
            logits = self.joiner(inputs)[0].reshape(-1)
            symbol, symbol_score = most_probable(logits[: self.vocab_size])
            duration = int(symbol == blank)
            score += symbol_score
            if self.has_durations:
                duration, duration_score = most_probable(logits[self.vocab_size :])
                score += duration_score
            taken += symbol != blank
            if duration == 0 and (symbol == blank or taken >= most):
                duration = 1
            if symbol != blank:
                symbols.append(symbol + 1)
                frames.append(frame)
                scores.append(symbol_score)
                durations.append(duration)
                predicted_NJ1, states = self._predict(symbol, states)
            if duration:
                frame, taken = frame + duration, 0
        return Hypothesis(
            symbols=tuple(symbols),
            frames=tuple(frames),
            score=score,
            symbol_scores=tuple(scores),
            durations=tuple(durations) if self.has_durations else (),
        )

    def _predict(
        self, symbol: int, states: list[_FloatArray]
    ) -> tuple[_FloatArray, list[_FloatArray]]:
        output_NJ1, _, *after = self.decoder(
            {
                "targets": np.array([[symbol]], dtype=np.int32),
                "target_length": np.ones(1, dtype=np.int32),
                "states.1": states[0],
                "states.2": states[1],
            }
        )
        return output_NJ1, after


def most_probable(logits: _FloatArray) -> tuple[int, float]:
    """The place of the largest logit, and its log-probability."""
    shifted = logits - logits.max()
    place = int(logits.argmax())
    return place, float(shifted[place] - np.log(np.exp(shifted).sum()))
