"""Decode a split: texts, times and real-time factor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pruned_rnnt.data.input.batch import AlignedWord, Batch
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import Search, build_search, score_problem
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import encode_batch
from pruned_rnnt.decode.head_paths import HeadPath, launch_ranked_head_paths
from pruned_rnnt.decode.scoring.error_rates import Transcript
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import SpeechModel


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
    finite: bool = True,
) -> DecodedSet:
    """Decode every utterance of `batches`; other arguments and errors as for `build_search`.

    Args:
        search: a search of your own instead of the configured one.
        finite: raise for a score that is not; otherwise such texts stay as they are.

    Raises:
        ValueError: a score is NaN or infinite; the message names the utterance.
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
        for name, found in zip(batch.ids, hypotheses, strict=True):
            if finite and found and (problem := score_problem(found[0])):
                raise ValueError(f"{name}: {problem}")
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
    texts = [
        [found[rank].symbols if rank < len(found) else () for found in hypotheses]
        for rank in range(ranks)
    ]
    by_rank = launch_ranked_head_paths(model, encoded_NTE, lengths, texts).result()
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
