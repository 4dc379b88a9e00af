"""Overlapping windows are joined at words that agree in text and time."""

from __future__ import annotations

import pytest

from pruned_rnnt.transcribe.joined_path import TimedUnit, join


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
