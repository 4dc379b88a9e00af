"""Alignments are written in every format, and can be read back."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from lhotse import CutSet, MonoCut, SupervisionSegment
from lhotse.supervision import AlignmentItem

from pruned_rnnt.align.align_command import write_alignments
from pruned_rnnt.align.output import (
    AlignmentPlace,
    AlignmentWriter,
    UndividedWordsError,
    cut_with_alignment,
    file_name,
    textgrid,
)
from pruned_rnnt.align.utterance import AlignedUtterance
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.word_times import (
    TimedToken,
    TimedWord,
    ctm_text,
    timed_tokens,
    timed_words,
)
from pruned_rnnt.run.result_inputs import ResultInputs


def read_textgrid(text: str) -> dict[str, list[tuple[str, float, float]]]:
    """Parse the tiers of a TextGrid; asserts the order that Praat expects."""
    tokens = re.findall(r'"(?:[^"]|"")*"|-?\d+(?:\.\d+)?|<exists>', re.sub(r"\[\d*\]", "", text))
    assert tokens[:2] == ['"ooTextFile"', '"TextGrid"']
    position = 2

    def number() -> float:
        nonlocal position
        position += 1
        return float(tokens[position - 1])

    def string() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1][1:-1].replace('""', '"')

    begin, end = number(), number()
    assert tokens[position] == "<exists>"
    position += 1
    tiers = {}
    for _ in range(int(number())):
        assert string() == "IntervalTier"
        name = string()
        assert (number(), number()) == (begin, end)
        intervals = []
        time = begin
        for _ in range(int(number())):
            start, stop = number(), number()
            assert start == time
            assert stop > start
            time = stop
            intervals.append((string(), start, stop))
        assert time == end
        tiers[name] = intervals
    assert position == len(tokens)
    return tiers


def utterance(name: str = "a/b 1", extra: int = 0) -> AlignedUtterance:
    words = [("one", 0.08, 0.2), ('t"wo', 0.2, 0.52)] + [("three", 0.8, 1.0)] * extra
    return AlignedUtterance(
        id=name,
        text=" ".join(word for word, _, _ in words),
        seconds=1.25,
        tokens=tuple(
            TimedToken(
                symbol=1, token=f"▁{word}", start=start, end=start + 0.04, log_prob=math.log(0.5)
            )
            for word, start, _ in words
        ),
        words=tuple(
            TimedWord(word=word, start=start, end=end, confidence=0.25)
            for word, start, end in words
        ),
        score=-1.0,
    )


def cut(name: str, texts: list[str]) -> MonoCut:
    supervisions = [
        SupervisionSegment(
            id=f"{name}-{i}", recording_id="r", start=0.5 * i, duration=0.5, text=text
        )
        for i, text in enumerate(texts)
    ]
    return MonoCut(id=name, start=3.0, duration=1.25, channel=0, supervisions=supervisions)


def test_textgrid_round_trip_with_gaps() -> None:
    text = textgrid([("words", [("a", 0.1, 0.2), ('"', 0.2, 1.0)]), ("none", [])], 1.5)
    assert read_textgrid(text) == {
        "words": [("", 0.0, 0.1), ("a", 0.1, 0.2), ('"', 0.2, 1.0), ("", 1.0, 1.5)],
        "none": [("", 0.0, 1.5)],
    }
    full = textgrid([("words", [("a", 0.0, 2.0)])], 1.5)
    assert read_textgrid(full) == {"words": [("a", 0.0, 2.0)]}


def test_textgrid_has_no_interval_without_length() -> None:
    """A calibration may leave a word no time, also at the end of the audio."""
    words = [("a", 0.5, 0.5), ("b", 0.5, 0.5), ("c", 0.5, 1.0), ("d", 1.0, 1.0)]
    tiers = read_textgrid(textgrid([("words", words), ("tokens", [("a", 0.4, 1.0)])], 1.0))
    assert [word for word, _, _ in tiers["words"] if word] == ["a", "b", "c", "d"]
    assert tiers["words"][-1] == ("d", 1.0, 1.0001)
    assert tiers["tokens"][-1] == ("", 1.0, 1.0001)


def test_a_length_of_more_digits_leaves_no_empty_interval_at_the_end() -> None:
    for seconds in (1.374625, 1.37464, 1.37466):
        words = [("a", 0.1, 1.3746), ("b", 1.37462, 1.37463)]
        for count in (1, 2):
            tiers = read_textgrid(textgrid([("words", words[:count])], seconds))
            assert [word for word, _, _ in tiers["words"] if word] == ["a", "b"][:count]


def test_textgrid_files(tmp_path: Path) -> None:
    with AlignmentWriter(tmp_path / "x", "textgrid", "dev", {}) as writer:
        writer.add(utterance())
    assert (tmp_path / "x/dev-scores.tsv").read_text() == "a/b 1\t-0.5000\t2\n"
    (path,) = (tmp_path / "x/dev").iterdir()
    assert path.name == f"{file_name('a/b 1')}.TextGrid"
    tiers = read_textgrid(path.read_text(encoding="utf-8"))
    assert [item[0] for item in tiers["words"]] == ["", "one", 't"wo', ""]
    assert [item[0] for item in tiers["confidence"]] == ["", "0.2500", "0.2500", ""]
    assert [item[0] for item in tiers["tokens"] if item[0]] == ["▁one", '▁t"wo']


@pytest.mark.parametrize(
    ("text", "words"), [("one two", 2), ("今天天气", 4), ("ガス one", 3), ("오늘 날씨", 2), ("", 1)]
)
def test_word_score(text: str, words: int) -> None:
    assert replace(utterance(), text=text, score=-6.0).word_score == -6.0 / words


def test_doubtful_texts_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    results = [replace(utterance(f"u{i}"), score=-2.5 * i) for i in range(4)]
    inputs = ResultInputs(split="dev", utterances="", checkpoint="last", model="m", label="")
    place = AlignmentPlace(run=tmp_path, inputs=inputs, output=tmp_path)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("pruned_rnnt").propagate = True
        assert write_alignments(results, place, "ctm", {}, lambda: "digest")
    assert caplog.messages == [
        "u3: the text may not match the audio: score per word -3.75, below -3"
    ]
    shown = capsys.readouterr().out.splitlines()
    assert "aligned 4 utterances, 8 words, 5.0 s, score per word -1.88" in shown[0]
    assert shown[1].startswith("doubtful: 1, with a score per word below -3 in ")
    assert (tmp_path / "dev-scores.tsv").read_text().splitlines()[3] == "u3\t-3.7500\t2"


def test_unfinished_folders_of_processes_differ(tmp_path: Path) -> None:
    inputs = ResultInputs(split="dev", utterances="", checkpoint="last", model="m", label="")
    place = AlignmentPlace(run=tmp_path, inputs=inputs, output=tmp_path)
    with place.unfinished() as first, place.unfinished() as second:
        assert first != second
    assert not list(tmp_path.iterdir())


def test_ctm_lines(tmp_path: Path) -> None:
    with AlignmentWriter(tmp_path, "ctm", "dev", {}) as writer:
        writer.add(utterance("u1"))
        writer.add(utterance("u 2"))
    lines = (tmp_path / "dev-words.ctm").read_text().splitlines()
    assert lines[0] == "u1 1 0.080 0.120 one 0.2500"
    assert lines[3] == 'u_2 1 0.200 0.320 t"wo 0.2500'
    tokens = (tmp_path / "dev-tokens.ctm").read_text(encoding="utf-8").splitlines()
    assert tokens[1] == 'u1 1 0.200 0.040 ▁t"wo 0.5000'


def test_ctm_words_have_a_length_and_do_not_overlap() -> None:
    times = [(0.2264, 0.2374), (0.2374, 0.26), (0.3, 0.3), (0.3, 0.3), (0.3, 0.5), (0.5, 0.5004)]
    lines = ctm_text("a", [("x", start, end, 0.5) for start, end in times]).splitlines()
    fields = [[round(1000 * float(number)) for number in line.split()[2:4]] for line in lines]
    assert all(duration > 0 for _, duration in fields)
    ends = [start + duration for start, duration in fields]
    assert all(end <= start for end, (start, _) in zip(ends, fields[1:], strict=False))
    assert fields[:3] == [[226, 11], [237, 23], [300, 1]]
    assert ends[4] == 500


def test_lhotse_round_trip(tmp_path: Path) -> None:
    cuts = {"u1": cut("u1", ['one t"wo']), "u2": cut("u2", ["one", 't"wo'])}
    with AlignmentWriter(tmp_path, "lhotse", "dev", cuts) as writer:
        writer.add(utterance("u2"))
        writer.add(utterance("u1"))
    second, first = CutSet.from_file(tmp_path / "dev_cuts.jsonl.gz")
    (whole,) = first.supervisions
    assert whole.alignment["word"] == [
        AlignmentItem("one", 0.08, 0.12, 0.25),
        AlignmentItem('t"wo', 0.2, 0.32, 0.25),
    ]
    assert [item.symbol for item in whole.alignment["token"]] == ["▁one", '▁t"wo']
    left, right = second.supervisions
    assert [item.symbol for item in left.alignment["word"]] == ["one"]
    assert [item.symbol for item in left.alignment["token"]] == ["▁one"]
    assert [item.symbol for item in right.alignment["word"]] == ['t"wo']
    assert [item.symbol for item in right.alignment["token"]] == ['▁t"wo']
    assert (second.start, right.start) == (3.0, 0.5)


def test_other_alignments_stay_and_no_word_is_lost() -> None:
    source = cut("u", ["one"])
    source.supervisions[0].alignment = {"phone": [AlignmentItem("w", 0.0, 0.1)]}
    aligned = cut_with_alignment(source, utterance("u", extra=1))
    assert aligned.supervisions[0].alignment["phone"] == [AlignmentItem("w", 0.0, 0.1)]
    assert len(aligned.supervisions[0].alignment["word"]) == 3
    assert "word" not in source.supervisions[0].alignment


def test_supervisions_get_the_words_of_their_text_as_it_was_aligned() -> None:
    source = cut("u", ["one \u200b", 't"wo', "three"])
    aligned = cut_with_alignment(source, utterance("u", extra=1))
    words = [[item.symbol for item in own.alignment["word"]] for own in aligned.supervisions]
    assert words == [["one"], ['t"wo'], ["three"]]
    by_tokenizer = cut("u", ["1/2", "three"])
    aligned = cut_with_alignment(
        by_tokenizer, utterance("u", extra=1), lambda text: text.replace("1/2", 'one t"wo')
    )
    assert [len(own.alignment["word"]) for own in aligned.supervisions] == [2, 1]
    message = r"the 2 supervisions of u are not those of the aligned words, or one of them ends"
    with pytest.raises(UndividedWordsError, match=message):
        cut_with_alignment(by_tokenizer, utterance("u", extra=1))


@pytest.mark.parametrize("step", [2, 10])
@pytest.mark.parametrize("between", [" ", ""])
def test_long_phrases_without_spaces_are_divided_too(step: int, between: str) -> None:
    texts = ["hello world" if between else "そうです", "今日はいいてんきですね"]
    tokenizer = train_tokenizer(texts, TokenizerConfig(kind="char"))
    symbols = tokenizer.encode(between.join(texts))
    frames = [step * n for n in range(len(symbols))]
    tokens = timed_tokens(tokenizer.symbols, symbols, frames, [-0.1] * len(symbols))
    words = timed_words(tokenizer, tokens)
    found = replace(utterance("u"), tokens=tokens, words=words)
    if not between and len(words) == 1:
        with pytest.raises(UndividedWordsError, match="ends within a word"):
            cut_with_alignment(cut("u", texts), found)
        return
    aligned = cut_with_alignment(cut("u", texts), found)
    for text, own in zip(texts, aligned.supervisions, strict=True):
        for kind in ("word", "token"):
            spelt = "".join(item.symbol for item in own.alignment[kind])
            assert spelt.replace("▁", "") == text.replace(" ", "")


@pytest.mark.parametrize("shift", [-0.15, 0.15])
def test_tokens_follow_their_words_wherever_a_calibration_places_these(shift: float) -> None:
    found = utterance("u", extra=1)
    moved = [word._replace(start=word.start + shift) for word in found.words]
    aligned = cut_with_alignment(
        cut("u", ["one", 't"wo three']), replace(found, words=tuple(moved))
    )
    tokens = [[item.symbol for item in own.alignment["token"]] for own in aligned.supervisions]
    assert tokens == [["▁one"], ['▁t"wo', "▁three"]]


def test_tokens_that_are_not_as_many_as_words_are_divided_by_time() -> None:
    """Unknown words in a row share a token."""
    found = utterance("u", extra=1)
    tokens = (found.tokens[0]._replace(token="<en>"), found.tokens[0], found.tokens[2])
    aligned = cut_with_alignment(cut("u", ['one t"wo', "three"]), replace(found, tokens=tokens))
    symbols = [[item.symbol for item in own.alignment["token"]] for own in aligned.supervisions]
    assert symbols == [["<en>", "▁one"], ["▁three"]]


def test_words_that_cannot_be_divided_do_not_end_the_others(tmp_path: Path) -> None:
    cuts = {name: cut(name, texts) for name, texts in (("a", ["x", "y z"]), ("b", ["one two"]))}
    inputs = ResultInputs(split="dev", utterances="", checkpoint="last", model="m", label="")
    place = AlignmentPlace(run=tmp_path, inputs=inputs, output=tmp_path)
    results = [utterance("a"), utterance("b")]
    assert not write_alignments(results, place, "lhotse", cuts, lambda: "digest")
    assert [each.id for each in CutSet.from_file(tmp_path / "dev_cuts.jsonl.gz")] == ["b"]
    assert (tmp_path / "dev-scores.tsv").read_text() == "b\t-0.5000\t2\n"
    assert (tmp_path / "dev-not-aligned.txt").read_text().startswith("a\tthe texts of the 2 super")


@pytest.mark.parametrize(
    ("utterance_id", "name"),
    [
        ("a-b_1.x", "a-b_1.x"),
        ("../a b", ".._a_b"),
        ("é/ü", "é_ü"),
        pytest.param("a" * 237, "a" * 237, id="longest"),
        pytest.param("日" * 100, "日" * 79, id="long"),
    ],
)
def test_file_names(utterance_id: str, name: str) -> None:
    assert len(f"{file_name(utterance_id)}.TextGrid".encode()) <= 255
    assert file_name(utterance_id).startswith(name)
    assert file_name(utterance_id) != file_name(name) or utterance_id == name
