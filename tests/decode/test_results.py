"""Error counts, and the exact text of result files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pruned_rnnt.decode.scoring import error_statistics
from pruned_rnnt.decode.scoring.error_rates import (
    ErrorCounts,
    Transcript,
    confidence_interval,
    count_errors,
)
from pruned_rnnt.decode.scoring.error_statistics import lost_runs
from pruned_rnnt.run import results
from pruned_rnnt.run.icefall_files import write_icefall_files
from tests.report.run_folders import write_decoded


def transcript(utterance: str, reference: str, hypothesis: str) -> Transcript:
    return Transcript(
        id=utterance, reference=tuple(reference.split()), hypothesis=tuple(hypothesis.split())
    )


EXAMPLE = [
    transcript("utt-2", "one two three", "one too three"),
    transcript("utt-1", "four five", "four"),
    transcript("utt-3", "six", "six seven eight"),
    transcript("utt-4", "a b c d", "x y c d"),
    transcript("utt-5", "", ""),
]

RECOGS = """\
utt-1:\tref=['four', 'five']
utt-1:\thyp=['four']
utt-2:\tref=['one', 'two', 'three']
utt-2:\thyp=['one', 'too', 'three']
utt-3:\tref=['six']
utt-3:\thyp=['six', 'seven', 'eight']
utt-4:\tref=['a', 'b', 'c', 'd']
utt-4:\thyp=['x', 'y', 'c', 'd']
utt-5:\tref=[]
utt-5:\thyp=[]
"""

# ruff: noqa: W291 - the heading of the details ends in two spaces.
ERRS = """\
%WER = 60.00
Errors: 2 insertions, 1 deletions, 3 substitutions, over 10 reference words (6 correct)
Search below for sections starting with PER-UTT DETAILS:, SUBSTITUTIONS:, DELETIONS:, \
INSERTIONS:, PER-WORD STATS:

PER-UTT DETAILS: corr or (ref->hyp)  
utt-1:\tfour (five->*)
utt-2:\tone (two->too) three
utt-3:\tsix (*->seven eight)
utt-4:\t(a b->x y) c d
utt-5:\t

SUBSTITUTIONS: count ref -> hyp
1   two -> too
1   b -> y
1   a -> x

DELETIONS: count ref
1   five

INSERTIONS: count hyp
1   seven
1   eight

PER-WORD STATS: word  corr tot_errs count_in_ref count_in_hyp
y   0 1 0 1
x   0 1 0 1
two   0 1 1 0
too   0 1 0 1
seven   0 1 0 1
five   0 1 1 0
eight   0 1 0 1
b   0 1 1 0
a   0 1 1 0
three   1 0 1 1
six   1 0 1 1
one   1 0 1 1
four   1 0 1 1
d   1 0 1 1
c   1 0 1 1
"""


def test_files_are_as_icefall_writes_them(tmp_path: Path) -> None:
    rate = write_icefall_files(tmp_path / "new", "test-greedy", "greedy_search", EXAMPLE)
    assert rate == 60.0
    assert (tmp_path / "new/recogs-test-greedy.txt").read_text() == RECOGS
    assert (tmp_path / "new/errs-test-greedy.txt").read_text() == ERRS
    summary = (tmp_path / "new/wer-summary-test-greedy.txt").read_text()
    assert summary == "settings\tWER\ngreedy_search\t60.0\n"


def test_characters_are_counted_without_spaces(tmp_path: Path) -> None:
    characters = [transcript("a", "你好 世界", "你 世界吗").characters()]
    assert characters[0].reference == ("你", "好", "世", "界")
    assert str(count_errors(characters)) == "50.00% [2 / 4, 1 ins, 1 del, 0 sub]"
    assert write_icefall_files(tmp_path, "test-x", "greedy", characters, "CER") == 50.0
    assert (tmp_path / "errs-test-x.txt").read_text().startswith("%CER = 50.00\n")
    assert (tmp_path / "wer-summary-test-x.txt").read_text() == "settings\tCER\ngreedy\t50.0\n"


def test_texts_too_long_to_align_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_statistics, "_MOST_CELLS", 9)
    assert write_icefall_files(tmp_path, "test-x", "greedy", EXAMPLE) == 60.0
    lines = (tmp_path / "errs-test-x.txt").read_text().splitlines()
    assert lines[1] == ERRS.splitlines()[1]
    assert "utt-4:\ttoo long to align" in lines
    assert "utt-3:\tsix (*->seven eight)" in lines
    assert lost_runs(transcript("a", "a b c d e", "a b")) == []


def test_hypotheses_are_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the other files must not lose what takes a whole decoding to make again."""

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(results, "write_icefall_files", fail)
    with pytest.raises(OSError, match="full"):
        write_decoded(tmp_path, EXAMPLE)
    (path,) = (tmp_path / "results").glob("nbest-*.jsonl")
    assert len(path.read_text().splitlines()) == len(EXAMPLE)


def test_no_reference_words(tmp_path: Path) -> None:
    only_empty = [transcript("a", "", "word")]
    assert math.isnan(write_icefall_files(tmp_path, "test-x", "greedy_search", only_empty))
    assert (tmp_path / "errs-test-x.txt").read_text().startswith("%WER = nan\n")
    assert count_errors(only_empty).rate == math.inf
    assert count_errors([transcript("a", "", "")]).rate == 0.0
    assert all(math.isnan(end) for end in confidence_interval(only_empty))


@pytest.mark.parametrize(
    ("reference", "hypothesis", "insertions", "deletions", "substitutions"),
    [
        ("a b c", "a b c", 0, 0, 0),
        ("a b c", "", 0, 3, 0),
        ("", "a b", 2, 0, 0),
        ("a b c", "a x c", 0, 0, 1),
        ("a b c", "b c d", 1, 1, 0),
        ("a", "b c", 1, 0, 1),
    ],
)
def test_counts(
    reference: str, hypothesis: str, insertions: int, deletions: int, substitutions: int
) -> None:
    counts = count_errors([transcript("u", reference, hypothesis)])
    assert counts == ErrorCounts(
        insertions=insertions,
        deletions=deletions,
        substitutions=substitutions,
        reference_words=len(reference.split()),
    )


def test_counts_add_up() -> None:
    halves = count_errors(EXAMPLE[:2]) + count_errors(EXAMPLE[2:])
    assert halves == count_errors(EXAMPLE)
    assert str(halves) == "60.00% [6 / 10, 2 ins, 1 del, 3 sub]"


def test_no_interval_begins_below_zero() -> None:
    words = ("one", "two", "three")
    right = [Transcript(id=str(n), reference=words, hypothesis=words) for n in range(30)]
    wrong = Transcript(id="30", reference=words, hypothesis=words[:2])
    lower, upper = confidence_interval([*right, wrong], replications=500)
    assert lower == 0.0
    assert upper > 0.0


def test_confidence_interval_holds_the_rate_and_narrows_with_data() -> None:
    def width(copies: int) -> float:
        lower, upper = confidence_interval(EXAMPLE * copies, replications=500)
        assert lower <= 0.6 <= upper
        return upper - lower

    assert 0 < width(30) < width(2)
