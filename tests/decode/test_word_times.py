"""Times of tokens and words from the frames of symbols."""

from __future__ import annotations

import math

import pytest

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.calibration import Calibration, ConfidenceMap, SymbolTimes
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.word_times import (
    ctm_text,
    timed_tokens,
    timed_words,
    unit_spans,
    word_parts,
    word_spans,
)


def test_symbols_of_one_frame_share_it() -> None:
    names = ["a", "b", "c"]
    tokens = timed_tokens(names, [0, 1, 2, 1], [1, 3, 3, 4], [math.log(0.5), 0.0, -1.0, -2.0])
    assert [token.token for token in tokens] == ["a", "b", "c", "b"]
    assert [token.start for token in tokens] == pytest.approx([0.04, 0.12, 0.14, 0.16])
    assert [token.end for token in tokens] == pytest.approx([0.08, 0.14, 0.16, 0.2])
    expected = [0.5, 1.0, math.exp(-1), math.exp(-2)]
    assert [token.confidence for token in tokens] == pytest.approx(expected, abs=1e-4)


def test_times_count_from_the_beginning() -> None:
    path = (["a", "b"], [0, 1, 1], [2, 2, 9], [-0.1] * 3)
    for begin in (0.0, 12.34):
        tokens = timed_tokens(*path, begin=begin)
        assert [round(token.start - begin, 4) for token in tokens] == [0.08, 0.1, 0.36]
        assert [round(token.end - begin, 4) for token in tokens] == [0.1, 0.12, 0.4]


def test_words_last_from_their_first_symbol_to_the_next_word() -> None:
    tokenizer = train_tokenizer(["one two", "two one"], TokenizerConfig(kind="char"))
    symbols = tokenizer.encode("one two")
    assert len(symbols) == 8
    frames = [0, 2, 3, 5, 10, 11, 12, 20]
    log_probs = [-0.1] * 4 + [-0.2] * 4
    tokens = timed_tokens(tokenizer.symbols, symbols, frames, log_probs)
    first, second = timed_words(tokenizer, tokens)
    (_, cut) = timed_words(tokenizer, tokens, seconds=0.9)
    assert (first.word, first.start, first.end) == ("one", 0.0, 0.4)
    assert (second.word, second.start, second.end) == ("two", 0.4, 1.04)
    assert (cut.start, cut.end) == (0.4, 0.9)
    assert first.confidence == pytest.approx(math.exp(-0.4), abs=1e-4)
    assert second.confidence == pytest.approx(math.exp(-0.8), abs=1e-4)


def test_the_frames_of_the_head_are_used() -> None:
    head = HeadPath((4, 6), (-0.5, -1.5))
    tokens = timed_tokens(["a", "b"], [0, 1], [0, 1], [-0.1, -0.2], head)
    assert [(token.start, token.end) for token in tokens] == [(0.16, 0.2), (0.24, 0.28)]
    assert [(token.log_prob, token.head_log_prob) for token in tokens] == [
        (-0.1, -0.5),
        (-0.2, -1.5),
    ]


def test_a_calibration_moves_the_borders_of_words() -> None:
    tokenizer = train_tokenizer(["one two", "two one"], TokenizerConfig(kind="word"))
    one, two = tokenizer.encode("one two")
    before, after = [0.0] * len(tokenizer), [0.0] * len(tokenizer)
    before[one], before[two], after[one], after[two] = 0.3, 0.1, 0.2, 0.4
    calibration = Calibration(
        times=SymbolTimes(before=tuple(before), after=tuple(after)),
        confidence=ConfidenceMap(bias=-1.0, path=0.5, head=1.0),
        source="dev",
    )
    symbols, log_probs = [one, two, one], [math.log(0.8)] * 3
    head = HeadPath((5, 15, 50), (math.log(0.9), math.log(0.5), math.log(0.9)))
    tokens = timed_tokens(tokenizer.symbols, symbols, [0, 1, 2], log_probs, head)
    words = timed_words(tokenizer, tokens, 2.15, calibration)
    # "one" would end at 0.4 and "two" starts at 0.5; after "two", which ends at 1.0, is a pause.
    # The first word would start before the audio, and the last one end after it.
    assert [(w.start, w.end) for w in words] == [(0.0, 0.45), (0.45, 1.0), (1.7, 2.15)]
    expected = [1 / (1 + math.exp(1 - 0.5 * math.log(4) - math.log(odds))) for odds in (9, 1, 9)]
    assert [w.confidence for w in words] == pytest.approx(expected, abs=1e-4)
    moved = timed_words(tokenizer, tokens, 2.15, calibration, begin=0.1)
    assert moved[0].start == 0.1


def test_calibrated_words_stay_in_order() -> None:
    """Also where a word that reaches far covers two short ones after it."""
    calibration = Calibration(
        times=SymbolTimes(before=(0.0, 0.0, 0.0), after=(0.7, 0.04, 0.1)),
        confidence=None,
        source="dev",
    )
    tokens = timed_tokens(["▁a", "▁b", "▁c"], [0, 1, 2], [25, 26, 31], [-0.1] * 3)
    parts = word_parts(tokens, 5.0, calibration)
    times = [time for part in parts for time in (part.start, part.end)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("seconds", "frames", "expected"),
    [
        # The room before the fourth word is more than the two covered ones need.
        (5.0, [25, 26, 26, 60], [(1.0, 1.53), (1.53, 1.73), (1.73, 1.93), (2.4, 3.2)]),
        (5.0, [25, 26, 26, 48], [(1.0, 1.53), (1.53, 1.725), (1.725, 1.92), (1.92, 2.72)]),
        # No room behind the second word: the third one, which is not covered, shares its own.
        (5.0, [25, 26, 37, 60], [(1.0, 1.53), (1.53, 1.73), (1.73, 1.93), (2.4, 3.2)]),
        (1.67, [25, 26, 26], [(1.0, 1.53), (1.53, 1.6), (1.6, 1.67)]),
    ],
)
def test_covered_words_have_the_room_before_the_next_one(
    seconds: float, frames: list[int], expected: list[tuple[float, float]]
) -> None:
    calibration = Calibration(
        times=SymbolTimes(before=(0.0, -0.02, -0.02, 0.0), after=(1.0, 0.22, 0.22, 0.8)),
        confidence=None,
        source="dev",
    )
    names = ["▁a", "▁b", "▁c", "▁d"]
    symbols = list(range(len(frames)))
    tokens = timed_tokens(names, symbols, frames, [-0.1] * len(frames))
    parts = word_parts(tokens, seconds, calibration)
    for part, span in zip(parts, expected, strict=True):
        assert (part.start, part.end) == pytest.approx(span)
    lines = ctm_text("x", [("w", part.start, part.end, 0.5) for part in parts]).splitlines()
    assert [float(line.split()[2]) for line in lines] == pytest.approx([s for s, _ in expected])


def test_words_of_a_calibration_with_negative_lengths_stay_in_order() -> None:
    calibration = Calibration(
        times=SymbolTimes(before=(-0.4, 0.1), after=(0.1, 0.2)), confidence=None, source="dev"
    )
    tokens = timed_tokens(["▁a", "▁b"], [0, 1], [25, 34], [-0.1] * 2)
    first, second = word_parts(tokens, 5.0, calibration)
    assert first.start < first.end <= second.start < second.end


def test_no_ctm_line_is_a_comment() -> None:
    assert ctm_text(";;a b", [(";;c", 0.0, 1.0, 0.5)]) == "__a_b 1 0.000 1.000 ;;c 0.5000\n"


def test_spans_of_words() -> None:
    assert word_spans(["▁a", "b", "▁c", "▁", "d"]) == [(0, 2), (2, 3), (3, 5)]
    assert word_spans(["b", "c"]) == [(0, 2)]
    assert word_spans([]) == []
    assert unit_spans(["▁a", "b", "▁今", "日", "は。", "c"]) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    thai = ["▁พ", *"รุ่งนี้"]
    spans = unit_spans(thai)
    assert ["".join(thai[i:j]) for i, j in spans] == ["▁พ", "รุ่", "ง", "นี้"]


@pytest.mark.parametrize(
    "written",
    [
        "น้ำ ดำ ท ำ".replace(" ำ", "ำ").split(),  # Thai am
        ["ນ້ຳ", "ດຳ"],  # Lao am
        ["เร", "า", "ไป", "แก่"],  # Thai vowels before their consonant
        ["ເຮົ", "າ"],
        ["ភា", "សា", "ខ្មែ", "រ"],  # Khmer
        ["ပ", "တ္တ", "မြား"],  # Burmese
        ["ꦲ", "ꦏ꧀ꦱ", "ꦫ"],  # Javanese
        ["ᬅ", "ᬓ᭄ᬱ", "ᬭ"],  # Balinese
    ],
)
def test_a_written_character_is_one_unit(written: list[str]) -> None:
    symbols = list("".join(written))
    spans = unit_spans(symbols)
    found = ["".join(symbols[i:j]) for i, j in spans]
    assert found == written
    in_bytes = [f"<0x{byte:02X}>" for byte in "".join(written).encode()]
    found = ["".join(in_bytes[i:j]) for i, j in unit_spans(in_bytes)]
    assert found == ["".join(f"<0x{byte:02X}>" for byte in each.encode()) for each in written]


@pytest.mark.parametrize(("step", "words"), [(1, 1), (30, 3)])
def test_a_long_phrase_without_spaces_is_divided(step: int, words: int) -> None:
    partly_bytes = ["▁今", "<0xE6>", "<0x97>", "<0xA5>", "は"]
    latin_bytes = ["▁a", "<0xC3>", "<0xA4>", "b"]
    for names, count in (
        (["▁今", "日", "は"], words),
        (["▁a", "b", "c"], 1),
        (partly_bytes, words),
        (latin_bytes, 1),
        (["▁今", "<0xE6>", "は"], words - (words > 1)),  # no character: it continues the one before
    ):
        frames = [step * n for n in range(len(names))]
        tokens = timed_tokens(names, range(len(names)), frames, [-0.1] * len(names))
        assert len(word_parts(tokens)) == count


def test_a_calibration_with_a_head_is_not_used_without_its_path() -> None:
    """p of the path alone would be as if the head doubted every word."""
    tokens = timed_tokens(["▁a"], [0], [25], [math.log(0.9)])
    for head, confidence in ((0.0, 0.1098), (1.0, 0.9)):
        calibration = Calibration(
            times=None, confidence=ConfidenceMap(bias=-4.29, path=1.0, head=head), source="dev"
        )
        (part,) = word_parts(tokens, 5.0, calibration)
        assert part.confidence == pytest.approx(confidence, abs=1e-4)


def test_symbols_last_as_long_as_their_durations() -> None:
    """Those of duration 0 share the frame on which they stay; those of a head have one frame."""
    path = ([0, 1, 2, 1], [1, 3, 3, 5], [0.0] * 4)
    tokens = timed_tokens(["a", "b", "c"], *path, durations=(2, 0, 1, 4))
    assert [t.start for t in tokens] == pytest.approx([0.04, 0.12, 0.14, 0.2])
    assert [t.end for t in tokens] == pytest.approx([0.12, 0.14, 0.16, 0.36])
    head = HeadPath((1, 3, 4, 5), (0.0,) * 4)
    tokens = timed_tokens(["a", "b", "c"], *path, head, durations=(2, 0, 1, 4))
    assert [t.end for t in tokens] == pytest.approx([0.08, 0.16, 0.2, 0.24])
