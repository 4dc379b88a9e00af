"""The quality of word confidences: how well they predict which words are correct."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pruned_rnnt.decode.scoring.error_statistics import align_words

# Confidences of 0 and 1 count as these; more digits are not printed.
_LEAST, _MOST = 1e-4, 1 - 1e-4


def right_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """For each word of the hypothesis, whether the best alignment has it in the reference."""
    pairs = align_words(reference, hypothesis)
    return [expected == found for expected, found in pairs if found is not None]


def normalised_cross_entropy(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """1 for perfect confidences, 0 for those no more informative than the share of correct words.

    The measure of NIST's evaluations (Siu, Gish and Richardson 1997): how much of the entropy of
    'this word is correct' the confidences explain; negative if they mislead. NaN if all words, or
    none, are correct.
    """
    count, total = sum(right), len(right)
    if count in (0, total):
        return math.nan
    share = count / total
    most = -count * math.log(share) - (total - count) * math.log(1 - share)
    bounded = [min(max(confidence, _LEAST), _MOST) for confidence in confidences]
    entropy = -sum(
        math.log(confidence if is_right else 1 - confidence)
        for confidence, is_right in zip(bounded, right, strict=True)
    )
    return 1 - entropy / most
