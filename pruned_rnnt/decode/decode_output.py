"""What `decode` writes and prints of a set's utterances, besides error rates.

The hypotheses of a search are JSON lines: texts, scores, tokens and words with times, one line per
utterance:

    {"id": ..., "reference": ..., "audio": {"frames", "mean"}, "hypotheses": [
        {"text": ..., "score": ..., "tokens": [{"token", "start", "end", "score"}, ...],
         "words": [{"word", "start", "end", "confidence"}, ...]}, ...]}

`language` of the reference and `found_language`, the tag of the best hypothesis, are there if they
are known. `audio` identifies the audio (`Audio`). Times are seconds from the start of the
utterance. Scores are natural log-probabilities, including fusion. The best hypothesis comes first.

Lost runs of words, text without tokens, and languages are lines for the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pruned_rnnt.data.input.batch import Audio
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.decode.decode_set import Decoded
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.scoring.error_rates import (
    MetricChoice,
    Transcript,
    errors_by_language,
    language_lines,
)
from pruned_rnnt.decode.scoring.error_statistics import LEAST_WORDS
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import FRAME_SECONDS, timed_tokens, timed_words

_SHOWN = 8


def hypothesis_lines(
    utterances: Iterable[Decoded],
    tokenizer: Tokenizer,
    calibration: Calibration | None = None,
    audio: Mapping[str, Audio] | None = None,
    frame_seconds: float = FRAME_SECONDS,
) -> Iterator[dict[str, Any]]:
    """The line of each utterance, in their order.

    Args:
        calibration: of the model.
        audio: of the utterances, by id.
        frame_seconds: of an encoder frame.
    """
    shared: dict[str, Any] = {"names": tokenizer.symbols, "frame_seconds": frame_seconds}
    for utterance in utterances:
        found = (audio or {}).get(utterance.id)
        yield {
            "id": utterance.id,
            "reference": utterance.reference,
            **_languages(utterance),
            **({"audio": found._asdict()} if found is not None else {}),
            "hypotheses": [
                {"text": text, **_details(hypothesis, head, tokenizer, calibration, **shared)}
                for text, hypothesis, head in zip(
                    utterance.texts, utterance.hypotheses, utterance.heads, strict=True
                )
            ],
        }


def _languages(utterance: Decoded) -> dict[str, str]:
    values = {"language": utterance.language, "found_language": utterance.found_language}
    return {name: code for name, code in values.items() if code}


def _details(
    found: Hypothesis,
    head: HeadPath | None,
    tokenizer: Tokenizer,
    calibration: Calibration | None,
    *,
    names: list[str],
    frame_seconds: float,
) -> dict[str, Any]:
    tokens = timed_tokens(
        names,
        found.symbols,
        found.frames,
        found.symbol_scores,
        head,
        durations=found.durations,
        frame_seconds=frame_seconds,
    )
    words = timed_words(tokenizer, tokens, calibration=calibration)
    return {
        "score": round(found.score, 4),
        "tokens": [
            {"token": t.token, "start": t.start, "end": t.end, "score": round(t.log_prob, 4)}
            for t in tokens
        ],
        "words": [
            {"word": w.word, "start": w.start, "end": w.end, "confidence": w.confidence}
            for w in words
        ],
    }


def unknown_lines(utterances: Sequence[Decoded], tokenizer: Tokenizer) -> list[str]:
    """A line about the parts of the references that no hypothesis can have; none without any."""
    parts = [tokenizer.unknown_parts(utterance.reference) for utterance in utterances]
    counts = Counter(part for own in parts for part in own)
    if not counts:
        return []
    shown = ", ".join(f"{part} {count:,}" for part, count in counts.most_common(_SHOWN))
    more = ", ..." if len(counts) > _SHOWN else ""
    return [
        f"{sum(map(bool, parts)):,} of {len(parts):,} references have text without a token "
        f"({shown}{more}), which counts as an error"
    ]


def lost_lines(lost: Sequence[tuple[Transcript, range]], words: int) -> list[str]:
    """A line about runs of words without text, and one for each of the longest; or none.

    words: of all references.
    """
    if not lost:
        return []
    longest = sorted(lost, key=lambda pair: -len(pair[1]))[:_SHOWN]
    return [
        f"lost speech: {len(lost):,} runs of {LEAST_WORDS} or more words without text, "
        f"{10_000 * len(lost) / words:.1f} in 10,000 words",
        *(
            f"  {each.id}: {len(run)} words after the first {run.start}: "
            + " ".join(each.reference[run.start : min(run.stop, run.start + _SHOWN)])
            + (" ..." if len(run) > _SHOWN else "")
            for each, run in longest
        ),
    ]


def language_table(
    utterances: Sequence[Decoded], tokenizer: Tokenizer, metric: MetricChoice
) -> list[str]:
    """The lines of the table of languages; none unless there are several, or tags."""
    languages = {utterance.language for utterance in utterances}
    if len(languages) < 2 and not (tokenizer.languages and any(languages)):
        return []
    found = errors_by_language(
        ((each.transcript, each.language, each.found_language) for each in utterances),
        has_tags=bool(tokenizer.languages),
    )
    return language_lines(found, metric)
