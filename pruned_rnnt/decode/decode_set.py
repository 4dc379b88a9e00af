"""Decode a split: build the search of a configuration; texts, times and real-time factor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.encode import Precision, encode_batch
from pruned_rnnt.decode.fusion.build import FusionConfig, build_scorers
from pruned_rnnt.decode.scoring.wer import Transcript
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.ctc_greedy import CtcGreedySearch
from pruned_rnnt.decode.search.ctc_prefix_beam import CtcPrefixBeamSearch
from pruned_rnnt.decode.search.fast_beam import FastBeamConfig, FastBeamSearch
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.non_autoregressive import NonAutoregressiveSearch
from pruned_rnnt.decode.search.streaming_greedy import new_greedy_search
from pruned_rnnt.decode.search.tdt_beam import MOST_SYMBOLS, TdtBeamSearch
from pruned_rnnt.decode.timing.head_paths import HeadPath, head_paths
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.ctc_model import CtcModel
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.setting_checks import check_at_least

# (N, T, E) encoder output and (N,) lengths -> hypotheses of each utterance, best first.
Search = Callable[[Tensor, Tensor], list[list[Hypothesis]]]
_BEAM_METHODS = ("modified_beam", "ctc_prefix_beam")
_NEEDS_BEAM = f"decode.method={' or '.join(_BEAM_METHODS)}"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The search method, its settings, and the data and checkpoint to decode.

    method: greedy; modified_beam (supports fusion); fast_beam_search (needs k2);
        non_autoregressive (without the predictor, for models trained with
        loss.predictor_mask_probability); ctc_greedy and ctc_prefix_beam (supports fusion) use the
        CTC head. Models of loss.kind=ctc have only the last two; greedy is then ctc_greedy.
    precision: dtype of the encoder's matrix products. On a GPU, bfloat16 takes about half the time
        of float32 and hardly changes texts; the search itself is always float32.
    split: split of the prepared data.
    checkpoint: `last`, `best` (validation WER), `average` (the mean of the parameters of the newest
        three checkpoints, or of all if there are fewer, as `pruned-rnnt average` makes it), or the
        path of a checkpoint.
    use_average: decode with the running average of the parameters; not for checkpoint=average.
    max_symbols_per_frame: for greedy search with models of loss.rnnt_type=regular, and for beam
        search with models of loss.durations. 0: what exported models in sherpa-onnx emit at most in
        greedy search: 5 with loss.durations (3 in beam search), else 1.
    skip_unknown: never emit `<unk>`, like sherpa-onnx.
    beam_size, num_best: for modified beam search and CTC prefix beam search.
    length_norm: order hypotheses of modified beam search by score per symbol.
    refinements: of non-autoregressive search: number of further passes, in which the predictor sees
        the symbols that the pass before found.
    chunk, left: encoder frames (40 ms) in a chunk of a causal encoder, and of its left context; 0:
        as the model is configured.
    metric: wer or cer: the result files count errors in words, or in characters without spaces.
    """

    method: Literal[
        "greedy",
        "modified_beam",
        "fast_beam_search",
        "non_autoregressive",
        "ctc_greedy",
        "ctc_prefix_beam",
    ] = "greedy"
    precision: Precision = "float32"
    split: str = "test"
    checkpoint: str = "last"
    use_average: bool = True
    max_symbols_per_frame: int = 0
    skip_unknown: bool = True
    beam_size: int = 4
    num_best: int = 1
    length_norm: bool = True
    refinements: int = 0
    chunk: int = 0
    left: int = 0
    metric: Literal["wer", "cer"] = "wer"
    fusion: FusionConfig = field(default_factory=FusionConfig)
    fast_beam: FastBeamConfig = field(default_factory=FastBeamConfig)

    def __post_init__(self) -> None:
        check_at_least("decode", self, max_symbols_per_frame=0, beam_size=1, num_best=1)
        check_at_least("decode", self, chunk=0, left=0, refinements=0)
        if self.fusion.enabled and self.method not in _BEAM_METHODS:
            raise ValueError(f"decode.fusion needs {_NEEDS_BEAM}, got {self.method}")
        if self.fusion.ilm_scale and self.method == "ctc_prefix_beam":
            raise ValueError(
                f"decode.fusion.ilm_scale is {self.fusion.ilm_scale}, which needs "
                "decode.method=modified_beam: a CTC head has no internal language model"
            )
        if self.num_best > 1 and self.method not in _BEAM_METHODS:
            raise ValueError(
                f"decode.num_best is {self.num_best}, which needs {_NEEDS_BEAM}: {self.method} "
                "finds one hypothesis"
            )

    @property
    def label(self) -> str:
        """Method, fusion scales and sizes that are not defaults, for the names of result files."""
        fusion = self.fusion
        parts: list[str] = [self.method]
        for name, used, scale in (
            ("ngram", fusion.ngram, fusion.ngram_scale),
            ("lm", fusion.lm, fusion.lm_scale),
            ("ilm", fusion.ilm_scale, fusion.ilm_scale),
            ("hotwords", fusion.hotwords, fusion.hotword_bonus),
            ("bonus", fusion.symbol_bonus, fusion.symbol_bonus),
        ):
            parts += [f"{name}{scale:g}"] * bool(used)
        for name, field_name, methods in (
            ("symbols", "max_symbols_per_frame", ("greedy", "modified_beam")),
            ("beam", "beam_size", _BEAM_METHODS),
            ("refinements", "refinements", ("non_autoregressive",)),
            ("chunk", "chunk", (self.method,)),
            ("left", "left", (self.method,)),
        ):
            size = getattr(self, field_name)
            if self.method in methods and size != getattr(DecodeConfig, field_name):
                parts.append(f"{name}{size}")
        for name, default in (("precision", "float32"), ("metric", "wer")):
            if getattr(self, name) != default:
                parts.append(getattr(self, name))
        return "-".join(parts)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The hypotheses of one utterance, best first.

    heads: the path of the CTC head through each; None for one without, empty if not computed.
    """

    id: str
    reference: str
    texts: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    heads: tuple[HeadPath | None, ...] = ()

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
        return _one_best(CtcGreedySearch(model, silent_symbols=silent))
    transducer = as_transducer(model, f"decode.method={config.method}")
    if transducer.loss_config.durations and config.method not in ("greedy", "modified_beam"):
        raise ValueError(
            f"decode.method is {config.method}, which cannot skip frames: a model of "
            "loss.durations needs decode.method=greedy or modified_beam"
        )
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
            max_symbols_per_frame=config.max_symbols_per_frame or MOST_SYMBOLS,
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
    if config.method == "fast_beam_search":
        return FastBeamSearch(transducer, config.fast_beam, silent_symbols=silent)
    if config.method == "non_autoregressive":
        return _one_best(
            NonAutoregressiveSearch(
                transducer, refinements=config.refinements, silent_symbols=silent
            )
        )
    return _one_best(new_greedy_search(transducer, silent, config.max_symbols_per_frame))


def _one_best(search: Callable[[Tensor, Tensor], list[Hypothesis]]) -> Search:
    return lambda encoded_NTE, lengths: [[best] for best in search(encoded_NTE, lengths)]


def search_batch(model: SpeechModel, batch: Batch, search: Search) -> list[list[Hypothesis]]:
    """Hypotheses of each utterance, best first; the model must be in evaluation mode."""
    return search(*encode_batch(model, batch))


def decode_set(
    model: SpeechModel,
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    config: DecodeConfig,
    language_model: LanguageModel | None = None,
) -> DecodedSet:
    """Decode every utterance of `batches`; other arguments and errors as for `build_search`."""
    utterances: list[Decoded] = []
    audio_seconds = search_seconds = 0.0
    model.eval()
    search = build_search(model, config, tokenizer, language_model)
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
        )
        for utterance, reference, found in zip(batch.ids, batch.texts, hypotheses, strict=True)
    ]
