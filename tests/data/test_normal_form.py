"""The normal form of texts, and the rules for case, punctuation and spaces."""

# ruff: noqa: RUF001

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pruned_rnnt.data.tokens.text_normalisation import (
    TextConfig,
    language_code,
    normal_form,
    normalise_text,
)
from tests.data.locale_texts import each_locale, sample_texts

ZWNJ, ZWJ = "\u200c", "\u200d"

NORMAL_FORMS = [
    ("  two\twords\n", "two words"),
    ("e\u0301cole", "école"),
    ("Ａ１，ﬁ", "Ａ１，ﬁ"),  # no compatibility mapping
    ("น\u0e49ำ", "น\u0e49ำ"),
    ("\u3000a\u00a0b\u2028c", "a b c"),
    ("co\u00adop \ufeffa\u200bb\u200e", "coop ab"),
    (
        f"می{ZWNJ}خواهم",
        f"می{ZWNJ}خواهم",
    ),
    (f"{ZWNJ}a{ZWNJ} b{ZWNJ}{ZWNJ}c{ZWNJ}", f"a b{ZWNJ}c"),
    (f"क\u094d{ZWJ}ष", f"क\u094d{ZWJ}ष"),
    (f"5{ZWNJ}ساله", f"5{ZWNJ}ساله"),
    (f"❤\ufe0f \U0001f469{ZWJ}\U0001f467", "❤ \U0001f469\U0001f467"),
    ("a\x00b\x07c\ud800", "abc"),
    ("a\u2581b \u2585", "a b"),
    ("\u200b\u00ad", ""),
]


@pytest.mark.parametrize(("text", "expected"), NORMAL_FORMS)
def test_normal_form(text: str, expected: str) -> None:
    assert normal_form(text) == expected


@given(
    st.text(st.one_of(st.characters(), st.sampled_from("=\u0338\u0301aक\u094d \u200c\u200d\u00ad")))
)
def test_normal_form_is_idempotent(text: str) -> None:
    once = normal_form(text)
    assert normal_form(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert once == " ".join(once.split())


REMOVED = [
    # apostrophes
    ("", "Don’t stop, “École”!", "Don't stop École"),
    ("", "'quoted' words' it`s don´t", "quoted words it's don't"),
    ("tr", "1990'da Ankara’ya", "1990'da Ankara'ya"),
    ("", "cafe\u0301'si क\u093f'क", "café'si क\u093f'क"),
    ("uz", "o'zbek tog‘ ma'no ‘salom’", "oʻzbek togʻ maʼno salom"),
    ("", "oʻzbek o'zbek", "oʻzbek o'zbek"),
    # Hebrew geresh and gershayim; single quotes around a word are none
    ("he", "צה\"ל ג'ורג' ר׳", "צה״ל ג׳ורג׳ ר׳"),
    ("he", "'שלום'", "שלום"),
    # Catalan
    ("ca", "col·lecció col.legi COL•LEGI", "col·lecció col·legi COL·LEGI"),
    ("", "col·lecció 达·芬奇", "col·lecció 达 芬奇"),
    ("", "\u0301·l a casa", "\u0301 l a casa"),  # a mark without a letter
    # joiners, soft hyphens
    ("fa", f"می{ZWNJ}خواهم، بله", f"می{ZWNJ}خواهم بله"),
    ("hi", f"क\u094d{ZWJ}ष।", f"क\u094d{ZWJ}ष"),
    ("", f"a,{ZWNJ}b co\u00adop", "a b coop"),
    # emoji
    (
        "",
        f"I ❤\ufe0f you \U0001f469{ZWJ}\U0001f467 1\ufe0f\u20e3 \U0001f44d\U0001f3fd ok",
        "I you 1 ok",
    ),
    # numbers
    ("", "3.5% 1,000 10:30 ٣٫٥ x.y 5.", "3.5 1,000 10:30 ٣٫٥ x y 5"),
    # marks between words, and marks around parts of a word
    ("", "well-known and/or U.S.A. said,then", "well known and or U S A said then"),
    ("", "word(s) (un)likely „a“s", "words unlikely as"),
    ("", "你好，世界！“好”的", "你好 世界 好的"),
    ("", "彼は「はい」とー", "彼ははいとー"),
    # marks of scripts
    ("hy", "ինչո՞ւ", "ինչու"),
    ("bo", "བ\u0f7cད་ཡ\u0f72ག", "བ\u0f7cད་ཡ\u0f72ག"),
    ("ar", "كتــاب؟", "كتاب"),
    ("sd", "۽ ۾", "۽ ۾"),
    ("", "•\u0301a", "a"),
    ("", "?!", ""),
]


@pytest.mark.parametrize(("language", "text", "expected"), REMOVED)
def test_removed_punctuation_splits_no_word(language: str, text: str, expected: str) -> None:
    config = TextConfig(punctuation="remove", language=language)
    assert normalise_text(text, config) == expected
    assert normalise_text(expected, config) == expected


@pytest.mark.parametrize(
    ("case", "language", "text", "expected"),
    [
        ("lower", "tr", "ISPARTA İzmir", "ısparta izmir"),
        ("lower", "az-Latn", "I\u0307I", "iı"),
        ("lower", "", "ISPARTA İzmir", "isparta izmir"),
        ("upper", "tr", "izmir ı", "İZMİR I"),
        ("upper", "", "izmir ı straße", "IZMIR I STRASSE"),
        ("lower", "", "ΟΔΟΣ ẞ", "οδος ß"),
        ("upper", "ka", "აბ ab", "აბ AB"),
        ("keep", "tr", "Iİıi", "Iİıi"),
    ],
)
def test_case_follows_the_language(case: str, language: str, text: str, expected: str) -> None:
    assert normalise_text(text, TextConfig(case=case, language=language)) == expected


def test_spaces() -> None:
    config = TextConfig(punctuation="remove", spaces="remove")
    assert normalise_text("你好， 世界", config) == "你好世界"


@each_locale
@pytest.mark.parametrize("case", ["keep", "lower", "upper"])
@pytest.mark.parametrize("punctuation", ["keep", "remove"])
def test_rules_are_idempotent_for_every_locale(locale: str, case: str, punctuation: str) -> None:
    config = TextConfig(case=case, punctuation=punctuation, language=locale)
    for text in sample_texts(locale):
        once = normalise_text(text, config)
        assert normalise_text(once, config) == once
        assert normalise_text(unicodedata.normalize("NFD", text), config) == once


def test_language_codes() -> None:
    assert [language_code(name) for name in ("zh_CN", " TR ", "", "sr-Latn")] == [
        *("zh-cn", "tr", "", "sr-latn")
    ]
    for wrong in ("<tr>", "a|b", "x" * 36):
        with pytest.raises(ValueError, match="language must be a code like tr"):
            TextConfig(language=wrong)
