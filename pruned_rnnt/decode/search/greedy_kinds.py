"""Greedy search of any model."""

from __future__ import annotations

from collections.abc import Sequence

from pruned_rnnt.decode.search.ctc_greedy import CtcGreedySearch
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS, TdtGreedySearch
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.transducer_model import TransducerModel


def new_greedy_search(
    model: SpeechModel, silent_symbols: Sequence[int] = (), max_symbols_per_frame: int = 0
) -> GreedySearch | TdtGreedySearch | CtcGreedySearch:
    """Greedy search of any model.

    Args:
        silent_symbols: as for the search.
        max_symbols_per_frame: as for the search; 0 chooses the value of sherpa-onnx: 5 for a
            transducer with durations, else 1.
    """
    if not isinstance(model, TransducerModel):
        return CtcGreedySearch(model, silent_symbols=silent_symbols)
    if model.loss_config.durations:
        most = max_symbols_per_frame or SHERPA_MAX_SYMBOLS
        return TdtGreedySearch(model, max_symbols_per_frame=most, silent_symbols=silent_symbols)
    most = max_symbols_per_frame or 1
    return GreedySearch(model, max_symbols_per_frame=most, silent_symbols=silent_symbols)
