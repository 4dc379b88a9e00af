"""Build the search of a configuration, for whole utterances or for streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig, warn_of_unused_settings
from pruned_rnnt.decode.fusion.build import build_scorers
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.ctc_search import CtcGreedySearch, CtcPrefixBeamSearch
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.search.interface import DeviceSearch, Hypothesis, Pending, StreamSearch
from pruned_rnnt.decode.search.tdt_beam import DEFAULT_ROUNDS, TdtBeamSearch
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS, TdtGreedySearch
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel

# (N, T, E) encoder output and (N,) lengths -> hypotheses of each utterance, best first.
Search = Callable[[Tensor, Tensor], list[list[Hypothesis]]]
_STREAM_METHODS = ("greedy", "modified_beam", "ctc_greedy")


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


def build_search(
    model: SpeechModel,
    config: DecodeConfig,
    tokenizer: Tokenizer | None = None,
    language_model: LanguageModel | None = None,
) -> Search:
    """Build the search of a configuration; one search can decode many batches.

    Scales of scores that are not in use are named in a warning.

    Args:
        model: in evaluation mode; do not move or replace its parameters while using the search.
        tokenizer: required if `config.fusion` has a language model or hotwords.
        language_model: the model that `config.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as the searches and scorers.
    """
    silent = [UNKNOWN_ID] if config.skip_unknown and model.vocab_size > UNKNOWN_ID else []
    fusion = config.fusion
    warn_of_unused_settings(config)
    if config.method == "ctc_prefix_beam":
        return CtcPrefixBeamSearch(
            model,
            beam_size=config.beam_size,
            num_best=config.num_best,
            silent_symbols=silent,
            scorers=build_scorers(fusion, tokenizer, language_model),
        )
    if config.method == "ctc_greedy" or (config.method == "greedy" and isinstance(model, CtcModel)):
        return _OneBest(CtcGreedySearch(model, silent_symbols=silent))
    transducer = as_transducer(model, f"decode.method={config.method}")
    trained = transducer.loss_config
    has_internal_lm = trained.hat and not trained.durations
    if config.method == "modified_beam" and fusion.ilm_scale and not has_internal_lm:
        raise ValueError(
            f"decode.fusion.ilm_scale is {fusion.ilm_scale}, which needs a model trained with "
            "loss.hat=true, without loss.durations: others have no separate internal language "
            "model. Leave it out"
        )
    if config.method == "modified_beam" and trained.durations:
        return TdtBeamSearch(
            transducer,
            beam_size=config.beam_size,
            num_best=config.num_best,
            length_norm=config.length_norm,
            max_symbols_per_frame=config.max_symbols_per_frame or DEFAULT_ROUNDS,
            silent_symbols=silent,
            scorers=build_scorers(fusion, tokenizer, language_model),
        )
    if config.method == "modified_beam":
        return ModifiedBeamSearch(
            transducer,
            beam_size=config.beam_size,
            num_best=config.num_best,
            length_norm=config.length_norm,
            silent_symbols=silent,
            scorers=build_scorers(fusion, tokenizer, language_model),
            ilm_scale=fusion.ilm_scale,
        )
    return _OneBest(new_greedy_search(transducer, silent, config.max_symbols_per_frame))


def build_stream_search(
    model: SpeechModel,
    config: DecodeConfig,
    tokenizer: Tokenizer | None = None,
    language_model: LanguageModel | None = None,
) -> StreamSearch:
    """Build the search of a configuration for streams; arguments as for `build_search`.

    Raises:
        ValueError: as `build_search`; and for methods that need whole utterances.
    """
    if config.method not in _STREAM_METHODS:
        raise ValueError(
            f"decode.method is {config.method}, which needs whole utterances: a stream needs one "
            f"of {', '.join(_STREAM_METHODS)}"
        )
    found: object = build_search(model, config, tokenizer, language_model)
    search = found.search if isinstance(found, _OneBest) else found
    assert isinstance(search, StreamSearch)
    return search


def score_problem(best: Hypothesis) -> str:
    """Why the text of a best hypothesis means nothing; empty if its score is finite."""
    if math.isfinite(best.score):
        return ""
    return (
        f"the score of the best hypothesis is {best.score}, because the model's output has a NaN "
        "or an infinity: with decode.precision=float16, use bfloat16 or float32; for ONNX files, "
        "export the model again; otherwise look for such values in the audio and the parameters"
    )


class _OneBest(DeviceSearch[list[list[Hypothesis]]]):
    """The results of a search that finds one hypothesis, in lists."""

    def __init__(self, search: DeviceSearch[list[Hypothesis]]) -> None:
        self.search = search

    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[list[list[Hypothesis]]]:
        found = self.search.launch(encoded_NTE, lengths)
        return found.map(lambda hypotheses: [[best] for best in hypotheses])


def launch_search(
    search: Search, encoded_NTE: Tensor, lengths: Tensor
) -> Pending[list[list[Hypothesis]]]:
    """Launch a search; those that need the host in between wait for their results here."""
    if isinstance(search, DeviceSearch):
        return search.launch(encoded_NTE, lengths)
    found = search(encoded_NTE, lengths)
    return Pending((), lambda _: found)
