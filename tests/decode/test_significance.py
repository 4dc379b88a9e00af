"""The bootstrap over utterances, compared with direct computations."""

from __future__ import annotations

import itertools
import math

import kaldialign
import numpy as np
import pytest

from pruned_rnnt.decode.scoring.error_rates import Transcript, confidence_interval
from pruned_rnnt.decode.scoring.error_statistics import align_words
from pruned_rnnt.decode.scoring.significance import paired_difference, rate_interval

FIRST, SECOND, WORDS = (2, 0, 3, 1), (1, 0, 1, 2), (4, 5, 6, 3)


def test_difference_equals_a_loop_over_the_same_draws() -> None:
    found = paired_difference(FIRST, SECOND, WORDS, replications=500, seed=3)
    generator = np.random.default_rng(3)
    draws = generator.integers(4, size=(500, 4)).tolist()
    differences = []
    for drawn in draws:
        words = sum(WORDS[n] for n in drawn)
        first, second = (sum(errors[n] for n in drawn) / words for errors in (FIRST, SECOND))
        differences.append(second - first)
    assert found.difference == pytest.approx((4 - 6) / 18)
    assert found.lower == pytest.approx(np.percentile(differences, 2.5))
    assert found.upper == pytest.approx(np.percentile(differences, 97.5))
    smaller = sum(d < -1e-12 for d in differences) / 500
    equal = sum(abs(d) < 1e-12 for d in differences) / 500
    assert found.improved == pytest.approx(smaller + equal / 2)
    assert found.p_value == pytest.approx(min(1.0, 2 * min(smaller + equal, 1 - smaller)))


def test_p_value_approaches_that_of_all_resamples() -> None:
    """All 4^4 samples of four utterances are equally likely."""
    changes = [
        sum(SECOND[n] - FIRST[n] for n in drawn) for drawn in itertools.product(range(4), repeat=4)
    ]
    smaller = sum(change < 0 for change in changes) / len(changes)
    equal = sum(change == 0 for change in changes) / len(changes)
    found = paired_difference(FIRST, SECOND, WORDS, replications=40_000)
    # Four standard deviations of a fraction of 40,000 draws.
    assert found.improved == pytest.approx(smaller + equal / 2, abs=0.01)
    assert found.p_value == pytest.approx(2 * min(smaller + equal, 1 - smaller), abs=0.02)


def test_result_does_not_depend_on_the_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = paired_difference(FIRST, SECOND, WORDS, replications=300)
    monkeypatch.setattr("pruned_rnnt.decode.scoring.significance._DRAWS_AT_ONCE", 41)
    assert paired_difference(FIRST, SECOND, WORDS, replications=300) == whole


def test_equal_systems_do_not_differ() -> None:
    found = paired_difference(FIRST, FIRST, WORDS, replications=100)
    assert found == (0.0, 0.0, 0.0, 0.5, 1.0)


def test_without_reference_words_nothing_is_known() -> None:
    assert all(map(math.isnan, paired_difference((1, 0), (0, 0), (0, 0))))
    assert all(map(math.isnan, paired_difference((), (), ())))
    assert all(map(math.isnan, rate_interval((), ())))
    assert all(map(math.isnan, rate_interval((1, 2), (0, 0))))


def test_numbers_of_utterances_must_agree() -> None:
    with pytest.raises(ValueError, match="got 4, 4 and 3"):
        paired_difference(FIRST, SECOND, WORDS[:3])


def test_interval_of_transcripts_is_close_to_that_of_kaldialign() -> None:
    rng = np.random.default_rng(0)
    transcripts = [
        Transcript(
            id=str(n),
            reference=tuple(rng.choice(list("abc"), size=8)),
            hypothesis=tuple(rng.choice(list("abc"), size=8)),
        )
        for n in range(60)
    ]
    expected = kaldialign.bootstrap_wer_ci(
        [list(each.reference) for each in transcripts],
        [list(each.hypothesis) for each in transcripts],
        replications=10_000,
    )
    # That one assumes a normal distribution.
    limits = expected["ci95min"], expected["ci95max"]
    assert confidence_interval(transcripts) == pytest.approx(limits, abs=0.01)


def test_alignment_has_the_errors_that_are_counted() -> None:
    """The sign of gaps may be a word of a text."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        reference, hypothesis = (
            tuple(rng.choice(["a", "b", "*"], size=rng.integers(6))) for _ in range(2)
        )
        pairs = align_words(reference, hypothesis)
        assert tuple(word for word, _ in pairs if word is not None) == reference
        assert tuple(word for _, word in pairs if word is not None) == hypothesis
        counts = kaldialign.edit_distance(reference, hypothesis)
        assert sum(expected is None for expected, _ in pairs) == counts["ins"]
        assert sum(found is None for _, found in pairs) == counts["del"]
        assert sum(None not in pair and pair[0] != pair[1] for pair in pairs) == counts["sub"]
