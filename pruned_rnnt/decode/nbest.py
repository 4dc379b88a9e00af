"""All hypotheses of a search as JSON lines: texts, scores, tokens and words with times.

One line per utterance:

    {"id": ..., "reference": ..., "audio": {"frames", "mean"}, "hypotheses": [
        {"text": ..., "score": ..., "tokens": [{"token", "start", "end", "score"}, ...],
         "words": [{"word", "start", "end", "confidence"}, ...]}, ...]}

`language` of the reference and `found_language`, the tag of the best hypothesis, are there if they
are known. `audio` identifies the audio (`Audio`). Times are seconds from the start of the
utterance. Scores are natural log-probabilities, including fusion. The best hypothesis comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pruned_rnnt.data.input.batch_identity import Audio
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import Decoded
from pruned_rnnt.decode.frame_times import FRAME_SECONDS
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.decode.word_times import timed_tokens, timed_words


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
