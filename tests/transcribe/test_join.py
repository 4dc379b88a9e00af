"""Overlapping windows are joined at words that agree in text and time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.transcribe import joined_path
from pruned_rnnt.transcribe.joined_path import (
    Join,
    JoinedPath,
    SegmentPlace,
    TimedUnit,
    join,
)


def units(text: str, begin: float = 0.0, seconds: float = 0.5) -> list[TimedUnit]:
    """Words of equal length from `begin` on; each is one symbol."""
    found = []
    for index, word in enumerate(text.split()):
        start = begin + index * seconds
        found.append(TimedUnit((sum(map(ord, word)),), index + 1, start, start + seconds))
    return found


def joined(first: str, second: str, begin: float, shift: float = 0.0) -> str:
    """The text of two windows; the second one starts at `begin` seconds."""
    one, other = units(first), units(second, begin + shift)
    keep, skip = join(one, other, begin, 0.5 * len(one))
    return " ".join([*first.split()[:keep], *second.split()[skip:]])


@pytest.mark.parametrize("shift", [0.0, -0.2, 0.3])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a b c d e f", "d e f g h"),
        # Words at the edges are wrong, and one more is lost or invented there.
        ("a b c d e x", "y e f g h"),
        ("a b c d e f", "f e f g h"),
    ],
)
def test_words_of_both_windows_join_them(first: str, second: str, shift: float) -> None:
    assert joined(first, second, 1.5, shift) == "a b c d e f g h"


def test_a_repeated_word_joins_at_its_own_time() -> None:
    assert joined("no no no yes no", "no yes no no", 1.0) == "no no no yes no no"


def test_the_longest_row_of_agreeing_words_decides() -> None:
    # "no" is in the middle of the overlap, but it stands alone.
    one, other = units("x x x no b c d"), units("y no z b c d e", 0.5)
    assert join(one, other, 0.5, 3.0) == (5, 4)


def test_without_agreement_the_middle_divides() -> None:
    assert joined("a b c d", "w x y z", 1.0) == "a b c x y z"
    assert joined("", "a b", 0.0) == "a b"
    assert joined("a b", "", 1.0) == "a b"


def test_the_same_word_at_another_time_does_not_agree() -> None:
    one, other = units("go a b c"), units("d e go", 1.0)
    assert join(one, other, 1.0, 2.0) == (3, 1)


def symbols_of_windows(names: Sequence[str], windows: int) -> list[int]:
    """The joined symbols of windows of 6 s that share 2 s: a symbol every 0.2 s, some wrong."""
    tokenizer: Any = SimpleNamespace(symbols=names)
    path = JoinedPath(tokenizer, with_words=False)
    for window in range(windows):
        begin = 400 * window
        symbols = [(begin // 20 + n) * 7 % (len(names) - 1) + 1 for n in range(30)]
        symbols[window % 30] = 1
        found = Hypothesis(
            symbols=tuple(symbols),
            frames=tuple(range(0, 150, 5)),
            score=0.0,
            symbol_scores=(-0.1,) * 30,
        )
        path.append(found, None, SegmentPlace(begin, 200 if window else 0, 600))
    return list(path.symbols)


@pytest.mark.parametrize(
    "names", [[*"<abcdefghijk"], ["<", *"abc", "\u2581d", *"efgh", "\u2581i", *"jk"]]
)
def test_a_join_takes_the_same_time_at_any_place_of_a_recording(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(first: Sequence[TimedUnit], *rest: Any) -> Join:
        seen.append(len(first))
        return join(first, *rest)

    monkeypatch.setattr(joined_path, "join", counted)
    found = symbols_of_windows(names, 40)
    assert max(seen) <= 2 * seen[0] < 30
    # The words before make no difference.
    monkeypatch.setattr(JoinedPath, "_first_shared", lambda *_: 0)
    assert symbols_of_windows(names, 40) == found
    assert max(seen) > 100


@pytest.mark.parametrize("text", ["คำ" * 50, "កម្ម" * 25], ids=["Thai", "Khmer"])
def test_written_characters_are_compared_whole(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(first: Sequence[TimedUnit], *rest: Any) -> Join:
        seen.append(first[0].symbols[0])
        return join(first, *rest)

    monkeypatch.setattr(joined_path, "join", noted)
    tokenizer: Any = SimpleNamespace(symbols=[*text, "▁"])
    found = Hypothesis(
        symbols=tuple(range(100)),
        frames=tuple(range(0, 500, 5)),
        score=0.0,
        symbol_scores=(-0.1,) * 100,
    )
    places = range(1000, 1100, 10)
    for begin in places:
        path = JoinedPath(tokenizer, with_words=True)
        path.append(found, None, SegmentPlace(0, 0, 2000))
        path.append(found, None, SegmentPlace(begin, 2000 - begin, 2000))
    assert len(seen) == len(places)
    for place in seen:
        assert text[place] in "คកម"
        assert text[place - 1] != "\u17d2"


@pytest.mark.parametrize(
    "text",
    [
        "きょうはよいてんきですあしたもはれるでしょうやまへいきますうみもみえますのでたのしみです",
        "วันนี้อากาศดีมากพรุ่งนี้ก็จะแจ่มใสเราจะไปภูเขากันและทะเลก็มองเห็นได้",
        "one two three four five six seven eight nine ten red blue green",
    ],
)
def test_text_of_a_script_without_spaces_is_joined_by_symbols(text: str) -> None:
    tokenizer = train_tokenizer([text], TokenizerConfig(kind="char"))
    symbols = tokenizer.encode(text)
    frames = [10 + n * (1150 // len(symbols)) for n in range(len(symbols))]
    path = JoinedPath(tokenizer, with_words=True)
    for begin, end in ((0, 20), (16, 36), (32, 50)):
        own = [n for n, frame in enumerate(frames) if 25 * begin <= frame < 25 * end]
        found = Hypothesis(
            symbols=tuple(symbols[n] for n in own),
            frames=tuple(frames[n] - 25 * begin for n in own),
            score=0.0,
            symbol_scores=(-0.1,) * len(own),
        )
        overlap = 400 if begin else 0
        path.append(found, None, SegmentPlace(100 * begin, overlap, 100 * (end - begin)))
    assert path.symbols == symbols
    assert all(part.end - part.start < 4 for part in path.word_parts())
