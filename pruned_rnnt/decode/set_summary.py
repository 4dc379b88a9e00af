"""What `decode` prints of a set besides its error rate: lost runs of words, languages, and text
without tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import Decoded
from pruned_rnnt.decode.scoring.error_statistics import LEAST_WORDS
from pruned_rnnt.decode.scoring.headline import MetricChoice, errors_by_language, language_lines
from pruned_rnnt.decode.scoring.wer import Transcript

_SHOWN = 8


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
