"""The filter of training utterances: texts whose symbols need not be counted are kept rightly."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from lhotse import MonoCut, SupervisionSegment
from lhotse.supervision import AlignmentItem

from pruned_rnnt.config.load import from_dict, load_config, to_dict
from pruned_rnnt.data.input.filters import CutFilter, FilterConfig, cut_text, encoder_frames
from pruned_rnnt.data.input.sampler import LatticeBound, LatticeSize
from pruned_rnnt.data.input.speech_dataset import aligned_words
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.train.experiment import ExperimentConfig

# The last has one character for three of its normal form.
WORDS = ["a", "one", "two", "three", "seventeen", "caf\u00e9", "\u2026"]


def cut(text: str, seconds: float, language: str) -> MonoCut:
    segment = SupervisionSegment(
        id="a", recording_id="a", start=0, duration=seconds, text=text, language=language
    )
    return MonoCut(id="a", start=0, duration=seconds, channel=0, supervisions=[segment])


@pytest.mark.parametrize("kind", ["char", "bpe", "word"])
@pytest.mark.parametrize("languages", [(), ("en",)])
@pytest.mark.parametrize("ctc", [False, True])
def test_reasons_are_those_of_the_counted_symbols(
    kind: Any, languages: tuple[str, ...], ctc: bool
) -> None:
    config = TokenizerConfig(kind=kind, vocab_size=28, languages=languages)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 50, config)
    chooses, found = random.Random(0), Counter[str | None]()
    cut_filter = CutFilter(FilterConfig(max_symbols=20), tokenizer, ctc=ctc)
    for _ in range(2000):
        text = " ".join(chooses.choices(WORDS, k=chooses.randint(1, 8)))
        example = cut(text, round(chooses.uniform(0.2, 2.0), 2), "en")
        encoded = tokenizer.encode(text, "en")
        symbols, blanks = len(encoded), sum(a == b for a, b in pairwise(encoded)) if ctc else 0
        expected = None
        if symbols > 20:
            expected = "more than 20 symbols"
        elif encoder_frames(round(example.duration * 100), 4) <= symbols + blanks:
            expected = "too short for its symbols"
        assert cut_filter.reason(example) == expected
        found[expected] += 1
    assert found[None] > 20
    if kind != "word":
        assert min(found.values()) > 20
        assert len(found) == 3


def test_ctc_needs_a_frame_between_equal_symbols() -> None:
    tokenizer = train_tokenizer(["aaaa bbbb"], TokenizerConfig(kind="char"))
    repeated, varied = cut("a" * 16, 1.0, ""), cut("ab" * 8, 1.0, "")
    for ctc in (False, True):
        cut_filter = CutFilter(FilterConfig(), tokenizer, ctc=ctc)
        assert cut_filter.reason(varied) is None
        assert cut_filter.reason(repeated) == ("too short for its symbols" if ctc else None)


@pytest.mark.parametrize(
    ("kind", "settings", "factor"),
    [
        ("conformer", [], 4),
        ("zipformer", [], 4),
        ("fastconformer", [], 8),
        ("fastconformer", ["loss.kind=ctc"], 8),
        ("fastconformer", ["loss.ctc_scale=0"], 4),
        ("fastconformer", ["loss.ctc_scale=0", "loss.rnnt_type=modified"], 8),
        ("fastconformer", ["data.filters.subsampling_factor=4"], 4),
    ],
)
def test_the_factor_is_that_of_the_encoder(kind: str, settings: list[str], factor: int) -> None:
    """A saved configuration has the number, which it keeps."""
    encoder = [f"model.encoder.kind={kind}", "data.features=waveform"]
    config = load_config(ExperimentConfig, None, [*encoder, *settings])
    assert config.data.filters.subsampling_factor == factor
    assert from_dict(ExperimentConfig, to_dict(config), "saved") == config


def test_words_are_in_the_order_of_the_text() -> None:
    late, early = (
        SupervisionSegment(
            id=text,
            recording_id="a",
            start=start,
            duration=1.0,
            text=text,
            alignment={"word": [AlignmentItem(word, start, 0.2) for word in text.split()]},
        )
        for text, start in (("good day", 2.0), ("hello all", 0.0))
    )
    spoken = MonoCut(id="a", start=0, duration=3.0, channel=0, supervisions=[late, early])
    assert " ".join(word.word for word in aligned_words(spoken)) == cut_text(spoken)


def test_most_texts_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(["one two"], TokenizerConfig(kind="char"))
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    assert CutFilter(FilterConfig(), tokenizer).reason(cut("one two", 2.0, "en")) is None


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_bound_on_the_lattice_is_that_of_the_counted_symbols(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer([" ".join(WORDS)] * 50, TokenizerConfig(kind=kind, vocab_size=28))
    size = LatticeSize(lambda cut: len(tokenizer.encode(cut_text(cut))), 4)
    bound = LatticeBound(size, 500)
    chooses, found = random.Random(0), Counter[str | None]()
    cut_filter = CutFilter(FilterConfig(), tokenizer, too_large=bound.is_exceeded_by)
    for _ in range(500):
        example = cut(" ".join(chooses.choices(WORDS, k=chooses.randint(1, 5))), 2.0, "")
        expected = "lattice larger than max_lattice" if size.nodes(example) > 500 else None
        assert cut_filter.reason(example) == expected
        found[expected] += 1
    assert min(found.values()) > 20
    # Symbols of short texts need not be counted, which takes as long as parsing a line.
    monkeypatch.setattr(Tokenizer, "encode", lambda *arguments: pytest.fail("counted"))
    assert cut_filter.reason(cut("one", 2.0, "")) is None
