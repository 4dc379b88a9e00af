"""The filter of training utterances: texts whose symbols need not be counted are kept rightly."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from lhotse import MonoCut, SupervisionSegment

from pruned_rnnt.data.input.filters import CutFilter, FilterConfig, encoder_frames
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer

# The last has one character for three of its normal form.
WORDS = ["a", "one", "two", "three", "seventeen", "caf\u00e9", "\u2026"]


def cut(text: str, seconds: float, language: str) -> MonoCut:
    segment = SupervisionSegment(
        id="a", recording_id="a", start=0, duration=seconds, text=text, language=language
    )
    return MonoCut(id="a", start=0, duration=seconds, channel=0, supervisions=[segment])


@pytest.mark.parametrize("kind", ["char", "bpe", "word"])
@pytest.mark.parametrize("languages", [(), ("en",)])
def test_reasons_are_those_of_the_counted_symbols(kind: Any, languages: tuple[str, ...]) -> None:
    config = TokenizerConfig(kind=kind, vocab_size=28, languages=languages)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 50, config)
    chooses, found = random.Random(0), Counter[str | None]()
    cut_filter = CutFilter(FilterConfig(max_symbols=20), tokenizer)
    for _ in range(2000):
        text = " ".join(chooses.choices(WORDS, k=chooses.randint(1, 8)))
        example = cut(text, round(chooses.uniform(0.2, 2.0), 2), "en")
        symbols = len(tokenizer.encode(text, "en"))
        expected = None
        if symbols > 20:
            expected = "more than 20 symbols"
        elif encoder_frames(round(example.duration * 100), 4) <= symbols:
            expected = "too short for its symbols"
        assert cut_filter.reason(example) == expected
        found[expected] += 1
    assert found[None] > 20
    if kind != "word":
        assert min(found.values()) > 20
        assert len(found) == 3


def test_most_texts_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(["one two"], TokenizerConfig(kind="char"))
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    assert CutFilter(FilterConfig(), tokenizer).reason(cut("one two", 2.0, "en")) is None
