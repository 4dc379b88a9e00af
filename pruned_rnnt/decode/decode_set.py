"""Decode a split: build the search of a configuration; texts, times and real-time factor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pruned_rnnt.data.input.batch import AlignedWord, Batch
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import encode_batch
from pruned_rnnt.decode.fusion.build import build_scorers
from pruned_rnnt.decode.scoring.wer import Transcript
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.ctc_greedy import CtcGreedySearch
from pruned_rnnt.decode.search.ctc_prefix_beam import CtcPrefixBeamSearch
from pruned_rnnt.decode.search.greedy_kinds import new_greedy_search
from pruned_rnnt.decode.search.hypothesis import DeviceSearch, Hypothesis, Pending
from pruned_rnnt.decode.search.stream_search import StreamSearch
from pruned_rnnt.decode.search.tdt_beam import DEFAULT_ROUNDS, TdtBeamSearch
from pruned_rnnt.decode.timing.head_paths import HeadPath, head_paths
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel

# (N, T, E) encoder output and (N,) lengths -> hypotheses of each utterance, best first.
Search = Callable[[Tensor, Tensor], list[list[Hypothesis]]]
_STREAM_METHODS = ("greedy", "modified_beam", "ctc_greedy")


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The hypotheses of one utterance, best first.

    heads: the path of the CTC head through each; None for one without, empty if not computed.
    language, found_language: code of the reference's language, and of the tag that the best
        hypothesis has; "" for none.
    repeated: as in `Batch.repeats`: the utterance does not count.
    spoken: the words of the reference with their times in the audio; empty if unknown.
    """

    id: str
    reference: str
    texts: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    heads: tuple[HeadPath | None, ...] = ()
    language: str = ""
    found_language: str = ""
    repeated: bool = False
    spoken: tuple[AlignedWord, ...] = ()

    @property
    def transcript(self) -> Transcript:
        best = self.texts[0] if self.texts else ""
        return Transcript(
            id=self.id, reference=tuple(self.reference.split()), hypothesis=tuple(best.split())
        )


@dataclass(frozen=True, kw_only=True)
class DecodedSet:
    """The decoded utterances of a split, and the time that decoding took.

    audio_seconds: total duration of the audio.
    search_seconds: time in encoder and search, without loading features.
    """

    utterances: tuple[Decoded, ...]
    audio_seconds: float
    search_seconds: float

    @property
    def real_time_factor(self) -> float:
        """Seconds of computation per second of audio."""
        return self.search_seconds / max(self.audio_seconds, 1e-9)


def build_search(
    model: SpeechModel,
    config: DecodeConfig,
    tokenizer: Tokenizer | None = None,
    language_model: LanguageModel | None = None,
) -> Search:
    """Build the search of a configuration; one search can decode many batches.

    Args:
        model: in evaluation mode; do not move or replace its parameters while using the search.
        tokenizer: required if `config.fusion` has a language model or hotwords.
        language_model: the model that `config.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as the searches and scorers.
    """
    silent = [UNKNOWN_ID] if config.skip_unknown and model.vocab_size > UNKNOWN_ID else []
    fusion = config.fusion
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
    if config.method == "modified_beam" and transducer.loss_config.durations:
        if fusion.ilm_scale:
            raise ValueError(
                f"decode.fusion.ilm_scale is {fusion.ilm_scale}, which needs a model trained with "
                "loss.hat=true, and this one has loss.durations"
            )
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


def search_batch(model: SpeechModel, batch: Batch, search: Search) -> list[list[Hypothesis]]:
    """Hypotheses of each utterance, best first; the model must be in evaluation mode."""
    return search(*encode_batch(model, batch))


def decode_set(
    model: SpeechModel,
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    config: DecodeConfig,
    language_model: LanguageModel | None = None,
    *,
    search: Search | None = None,
) -> DecodedSet:
    """Decode every utterance of `batches`; other arguments and errors as for `build_search`.

    Args:
        search: a search of your own instead of the configured one.
    """
    utterances: list[Decoded] = []
    audio_seconds = search_seconds = 0.0
    model.eval()
    search = search or build_search(model, config, tokenizer, language_model)
    for batch in batches:
        started = time.perf_counter()
        encoded = encode_batch(model, batch, config.precision)
        hypotheses = search(*encoded)
        search_seconds += time.perf_counter() - started
        audio_seconds += sum(batch.durations)
        utterances += [
            replace(utterance, heads=heads)
            for utterance, heads in zip(
                to_texts(batch, hypotheses, tokenizer),
                _heads(model, *encoded, hypotheses),
                strict=True,
            )
        ]
    return DecodedSet(
        utterances=tuple(utterances), audio_seconds=audio_seconds, search_seconds=search_seconds
    )


def _heads(
    model: SpeechModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    hypotheses: Sequence[Sequence[Hypothesis]],
) -> list[tuple[HeadPath | None, ...]]:
    """The paths of the CTC head through the hypotheses of each utterance."""
    ranks = max((len(found) for found in hypotheses), default=0)
    by_rank = [
        head_paths(
            model,
            encoded_NTE,
            lengths,
            [found[rank].symbols if rank < len(found) else () for found in hypotheses],
        )
        for rank in range(ranks)
    ]
    return [
        tuple(paths[n] for paths in by_rank[: len(found)]) for n, found in enumerate(hypotheses)
    ]


def to_texts(
    batch: Batch, hypotheses: Sequence[Sequence[Hypothesis]], tokenizer: Tokenizer
) -> list[Decoded]:
    """The hypotheses of a batch with their texts and references."""
    return [
        Decoded(
            id=utterance,
            reference=reference,
            texts=tuple(tokenizer.decode(hypothesis.symbols) for hypothesis in found),
            hypotheses=tuple(found),
            language=language,
            found_language=tokenizer.language_of(found[0].symbols) if found else "",
            repeated=utterance in batch.repeats,
            spoken=spoken,
        )
        for utterance, reference, language, spoken, found in zip(
            batch.ids, batch.texts, batch.languages, batch.words, hypotheses, strict=True
        )
    ]
