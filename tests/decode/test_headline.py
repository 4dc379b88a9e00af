"""Which error rate describes a set, and errors by language."""

from __future__ import annotations

import pytest

from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.decode.scoring.error_rates import (
    SetErrors,
    Transcript,
    errors_by_language,
    language_lines,
)
from tests.data.locale_texts import LOCALES

WITHOUT_SPACES = {"ja", "th", "zh-CN"}


def transcript(reference: str, hypothesis: str = "") -> Transcript:
    return Transcript(
        id="a", reference=tuple(reference.split()), hypothesis=tuple(hypothesis.split())
    )


@pytest.mark.parametrize("locale", LOCALES)
def test_scripts_without_spaces(locale: str) -> None:
    assert written_without_spaces(LOCALES[locale][0]) == (locale in WITHOUT_SPACES)


def test_more_scripts_without_spaces() -> None:
    khmer, lao, burmese = (
        "\u1781\u17d2\u1789\u17bb\u17c6",
        "\u0e82\u0ec9\u0ead\u0e8d",
        "\u1000\u103b",
    )
    assert all(
        map(
            written_without_spaces,
            (khmer, lao, burmese, "iPhone\u624b\u673a\u5145\u7535\u5668\u5f88\u597d"),
        )
    )
    assert not any(
        map(written_without_spaces, ("", "...", "\ud55c\uad6d\uc5b4 \ub9d0", "Wi-Fi \u597d"))
    )


def test_metric_of_a_set() -> None:
    chinese = transcript("\u4f60\u597d\u4e16\u754c", "\u4f60\u597d\u4eba\u754c")
    english = transcript("hello you there", "hello you")
    errors = SetErrors.of([chinese])
    assert errors.metric("auto") == "cer"
    assert (errors.headline("auto").errors, errors.headline("auto").reference_words) == (1, 4)
    assert errors.headline("wer").rate == 1.0
    assert errors.describe("auto").startswith("CER 25.00% [1 / 4, ")
    assert errors.describe("wer").startswith("WER 100.00% [1 / 1, ")
    assert SetErrors.of([english]).metric("auto") == "wer"
    # A tenth without spaces is still a WER, more is not.
    tenth = SetErrors.of([chinese, *[english] * 9])
    assert tenth.metric("auto") == "wer"
    assert (tenth + errors).metric("auto") == "cer"
    assert SetErrors().metric("auto") == "wer"
    both = SetErrors.of([chinese, english])
    assert both == SetErrors.of([chinese]) + SetErrors.of([english])


def test_errors_by_language() -> None:
    rows = [
        (transcript("\u4f60\u597d", "\u4f60"), "zh", "zh"),
        (transcript("a b", "a c"), "en", "de"),
        (transcript("a", "a"), "en", "en"),
        (transcript("x", "x"), "", ""),
    ]
    lines = language_lines(errors_by_language(rows, has_tags=True), "auto")
    assert [line.split("\t") for line in lines[1:]] == [
        ["unknown", "1", "WER", "0.00%", "0.00%", "0.00%", "100.00%"],
        ["en", "2", "WER", "33.33%", "33.33%", "33.33%", "50.00%"],
        ["zh", "1", "CER", "50.00%", "100.00%", "50.00%", "100.00%"],
    ]
    assert language_lines(errors_by_language(rows, has_tags=False), "auto")[1].endswith("\t")
