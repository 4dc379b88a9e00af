"""Runs of words that a hypothesis leaves out, and the lines about them."""

from __future__ import annotations

import pytest

from pruned_rnnt.decode.decode_output import lost_lines
from pruned_rnnt.decode.scoring.error_rates import Transcript
from pruned_rnnt.decode.scoring.error_statistics import lost_runs


def transcript(reference: str, hypothesis: str) -> Transcript:
    return Transcript(
        id="u1", reference=tuple(reference.split()), hypothesis=tuple(hypothesis.split())
    )


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("a b c d e f", "a e f", [(1, 4)]),
        ("a b c d e f", "a b e f", []),
        ("a b c d e f", "", [(0, 6)]),
        ("a b c d e f g h", "d h", [(0, 3), (4, 7)]),
        ("a b c", "x y z", []),
        ("* * * b", "b", [(0, 3)]),
        ("", "a", []),
    ],
)
def test_runs(reference: str, hypothesis: str, expected: list[tuple[int, int]]) -> None:
    found = lost_runs(transcript(reference, hypothesis))
    assert [(run.start, run.stop) for run in found] == expected


def test_lines_name_the_utterance_and_its_words() -> None:
    def lines(*transcripts: Transcript) -> list[str]:
        lost = [(each, run) for each in transcripts for run in lost_runs(each)]
        return lost_lines(lost, sum(len(each.reference) for each in transcripts))

    assert lines(transcript("a b", "a")) == []
    first, line = lines(transcript("a b c d e", "a"), transcript("f g h i j", "f g h i j"))
    assert first == ("lost speech: 1 runs of 3 or more words without text, 1000.0 in 10,000 words")
    assert line == "  u1: 4 words after the first 1: b c d e"
