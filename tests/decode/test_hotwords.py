"""Hotword rewards against a count of the phrases in a sequence."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.fusion.build import FusionConfig, build_scorers
from pruned_rnnt.decode.fusion.hotwords import Hotword, HotwordScorer, read_hotwords
from tests.decode.search_model import VOCAB, encoded, make_model, modified_beam_search

CPU = torch.device("cpu")
PHRASES = {(1, 2): 1.0, (1, 2, 3): 0.5, (2, 3, 1, 4): 2.0, (4,): 0.25, (3, 3): 1.5}


def hotwords(phrases: dict[tuple[int, ...], float]) -> list[Hotword]:
    return [Hotword(symbols=symbols, bonus=bonus) for symbols, bonus in phrases.items()]


def total_by_count(
    symbols: tuple[int, ...], phrases: dict[tuple[int, ...], float] = PHRASES
) -> float:
    return sum(
        bonus * len(phrase)
        for phrase, bonus in phrases.items()
        for start in range(len(symbols))
        if symbols[start : start + len(phrase)] == phrase
    )


def steps(scorer: HotwordScorer, symbols: tuple[int, ...]) -> list[float]:
    """The score of each symbol of a sequence, and that of its end."""
    state = scorer.start(1, CPU)
    added = []
    for symbol in symbols:
        added.append(float(scorer.scores(state)[0, symbol]))
        state = scorer.advance(state, torch.tensor([symbol]), torch.tensor([True]))
    return [*added, float(scorer.final(state))]


@pytest.mark.slow
def test_total_is_the_bonus_of_the_phrases() -> None:
    scorer = HotwordScorer(hotwords(PHRASES), VOCAB)
    for symbols in itertools.product(range(1, VOCAB), repeat=6):
        assert sum(steps(scorer, symbols)) == pytest.approx(total_by_count(symbols), abs=1e-5)


def test_total_with_negative_bonuses_and_equal_phrases() -> None:
    generator = random.Random(0)
    for _ in range(200):
        lists = [
            (tuple(generator.choices((1, 2, 3), k=generator.randint(1, 3))), bonus)
            for bonus in generator.choices((-2.0, -0.5, 1.0, 1.5), k=4)
        ]
        best = {phrase: max(b for other, b in lists if other == phrase) for phrase, _ in lists}
        scorer = HotwordScorer([Hotword(symbols=s, bonus=bonus) for s, bonus in lists], VOCAB)
        symbols = tuple(generator.choices((1, 2, 3), k=8))
        assert sum(steps(scorer, symbols)) == pytest.approx(total_by_count(symbols, best), abs=1e-5)


def test_a_negative_bonus_counts_at_the_end_of_its_phrase() -> None:
    scorer = HotwordScorer(hotwords({(1, 2): -1.5, (2,): 0.5}), VOCAB)
    assert steps(scorer, (1, 3)) == pytest.approx([0.0, 0.0, 0.0])
    assert steps(scorer, (1, 2)) == pytest.approx([0.0, -2.5, 0.0])


def test_bonuses_are_immediate_and_subtracted_again() -> None:
    scorer = HotwordScorer(hotwords({(1, 2, 3): 1.5}), VOCAB)
    assert steps(scorer, (1, 2, 3, 4)) == pytest.approx([1.5, 1.5, 1.5, 0.0, 0.0])
    assert steps(scorer, (1, 2, 4)) == pytest.approx([1.5, 1.5, -3.0, 0.0])
    assert steps(scorer, (1, 1, 2)) == pytest.approx([1.5, 0.0, 1.5, -3.0])


def test_a_phrase_that_begins_another_counts_once() -> None:
    scorer = HotwordScorer(hotwords({(1,): 5.0, (1, 2): 1.0}), VOCAB)
    assert steps(scorer, (1, 3)) == pytest.approx([6.0, -1.0, 0.0])
    assert steps(scorer, (1, 2)) == pytest.approx([6.0, 1.0, 0.0])


def test_search_prefers_hotwords() -> None:
    model = make_model(seed=4)
    frames, lengths = encoded([8, 6, 0])
    plain = modified_beam_search(model, frames, lengths, beam_size=4)
    bonus = {(4, 2): 20.0}
    scorer = HotwordScorer(hotwords(bonus), VOCAB)
    boosted = modified_beam_search(model, frames, lengths, beam_size=4, scorers=[scorer])
    assert (4, 2) not in itertools.pairwise(plain[0][0].symbols)
    assert (4, 2) in itertools.pairwise(boosted[0][0].symbols)
    assert boosted[2][0].symbols == ()
    for n, length in enumerate(lengths.tolist()):
        (alone,) = modified_beam_search(
            model,
            frames[n : n + 1, :length],
            lengths[n : n + 1],
            beam_size=4,
            scorers=[HotwordScorer(hotwords(bonus), VOCAB)],
        )
        assert alone[0].symbols == boosted[n][0].symbols
        assert alone[0].score == pytest.approx(boosted[n][0].score, abs=1e-4)


# Of Latin, Thai and Chinese letters, digits, signs and bytes; their places by the definition.
NAMES = ["a", "\u2581", "\u2581b", "\u4e16", "1", "\u2581\u0e01", "<0xE4>", "<0x96>", "<0x62>"]
PLACE_AFTER = {"a": 1, "\u2581": 0, "\u2581b": 1, "\u4e16": 2, "\u2581\u0e01": 2}
PLACE_AFTER |= {"<0xE4>": 2, "<0x62>": 1}


def test_phrases_that_may_not_begin_anywhere() -> None:
    generator = random.Random(0)
    for _ in range(200):
        best: dict[tuple[int, tuple[int, ...]], float] = {}
        for bonus in (-0.5, 1.0, 1.5, 2.0):
            place = generator.choice([0, 1, 2])
            phrase = generator.choices(range(len(NAMES)), k=generator.randint(1, 3))
            best[place, tuple(phrase)] = bonus
        words = [Hotword(symbols=s, bonus=bonus, place=p) for (p, s), bonus in best.items()]
        scorer = HotwordScorer(words, len(NAMES), NAMES)
        symbols = tuple(generator.choices(range(len(NAMES)), k=10))
        places = [0]
        for symbol in symbols:
            places.append(PLACE_AFTER.get(NAMES[symbol], max(places[-1], 1)))
        expected = sum(
            bonus * len(phrase)
            for (place, phrase), bonus in best.items()
            for start in range(len(symbols))
            if places[start] >= place and symbols[start : start + len(phrase)] == phrase
        )
        assert sum(steps(scorer, symbols)) == pytest.approx(expected, abs=1e-5)


MIXED = ["我昨天在NBA看了比赛", "他买了iPhone手机和5G手机", "手机", "ฉันดูNBAทุกวัน", "「NHK」を見る"]
MIXED += ["start the NBA, eNBA", "手机 xNBA", "在2023NBA", "iPhone"]


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ("NBA", [3, 0, 0, 3, 0, 4, 0, 3, 0]),  # 4: with the mark of a word's start
        ("iPhone", [0, 6, 0, 0, 0, 0, 0, 0, 7]),
        ("iPhone手机", [0, 8, 0, 0, 0, 0, 0, 0, 0]),
        ("5G手机", [0, 4, 0, 0, 0, 0, 0, 0, 0]),
        ("手机", [0, 4, 3, 0, 0, 0, 3, 0, 0]),
        ("NHK", [0, 0, 0, 0, 3, 0, 0, 0, 0]),
        ("art", [0] * 9),
    ],
)
def test_each_occurrence_in_a_script_without_spaces_counts_once(
    tmp_path: Path, phrase: str, expected: list[float], byte_fallback: bool
) -> None:
    config = TokenizerConfig(kind="char", byte_fallback=byte_fallback)
    # With bytes, the letters that occur once in these texts are in bytes.
    tokenizer = train_tokenizer([*MIXED, "在看了手机「ดู5" * 20], config)
    path = tmp_path / "hotwords.txt"
    path.write_text(phrase, encoding="utf-8")
    words = FusionConfig(hotwords=str(path), hotword_bonus=1.0)
    (scorer,) = build_scorers(words, tokenizer)
    assert isinstance(scorer, HotwordScorer)
    found = [sum(steps(scorer, tuple(tokenizer.encode(text)))) for text in MIXED]
    if not byte_fallback:  # bytes are several symbols
        assert found == pytest.approx(expected)
    assert [total > 0 for total in found] == [total > 0 for total in expected]


@pytest.mark.parametrize("quoted", ["「手机」", "“手机”", "(手机)"])
def test_a_phrase_that_begins_with_a_sign_may_stand_after_any_letter(
    tmp_path: Path, quoted: str
) -> None:
    tokenizer = train_tokenizer([f"NHK{quoted} 在NBA"] * 5, TokenizerConfig(kind="char"))
    path = tmp_path / "hotwords.txt"
    path.write_text(f"{quoted}\nNBA\n", encoding="utf-8")
    scorer = HotwordScorer(read_hotwords(path, tokenizer, 1.0), len(tokenizer), tokenizer.symbols)
    # The sign does not hide the place of the phrase behind it.
    for text, expected in ((f"NHK{quoted}", 4), (f"在{quoted[0]}NBA", 3)):
        assert sum(steps(scorer, tuple(tokenizer.encode(text)))) == pytest.approx(expected)


def test_phrases_in_bytes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TokenizerConfig(kind="char", byte_fallback=True)
    tokenizer = train_tokenizer(["NEW YORK"] * 5, config)
    path = tmp_path / "hotwords.txt"
    path.write_text("NEW YORK\t:2.5\n")
    assert [hotword.bonus for hotword in read_hotwords(path, tokenizer, 1.5)] == [2.5]
    assert not caplog.records
    # Another white space is part of the phrase.
    path.write_text("NEW\nnew\nYORK\u3000:x\nYORK:2\n", encoding="utf-8")
    assert len(read_hotwords(path, tokenizer, 1.5)) == 4
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("hotwords have characters that the model can only write in bytes")
    assert "training texts (3): " in message
    assert "hotwords.txt:2: 'new' has characters in bytes: 'n', 'e', 'w'; it knows 'NEW' | " in (
        message
    )
    assert "hotwords.txt:4: 'YORK:2' has characters in bytes: ':', '2'; a bonus needs" in message


def test_file_of_phrases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_tokenizer(["new york", "work"], TokenizerConfig(kind="char", vocab_size=30))
    path = tmp_path / "hotwords.txt"
    path.write_text("new york\n\nwork :2.5\n")
    first, second = read_hotwords(path, tokenizer, 1.5)
    assert first == Hotword(symbols=tuple(tokenizer.encode("new york")), bonus=1.5)
    assert second == Hotword(symbols=tuple(tokenizer.encode("work")), bonus=2.5)
    path.write_text("new\nwork :much\n")
    with pytest.raises(ValueError, match=r"hotwords\.txt:2: bonus 'much'"):
        read_hotwords(path, tokenizer, 1.5)
    path.write_text("Zürich\n")
    lacking = (
        r"hotwords\.txt:1: 'Zürich' has characters that the model lacks: 'Z', 'ü', 'i', 'c', 'h'$"
    )
    with pytest.raises(ValueError, match=lacking):
        read_hotwords(path, tokenizer, 1.5)
    path.write_text("NEW YORK :2.5\n")
    with pytest.raises(ValueError, match=r"'O', 'R', 'K'; it knows 'new york'$"):
        read_hotwords(path, tokenizer, 1.5)
    path.write_text("new york:2.5\n")
    advice = r"lacks: ':', '2', '\.', '5'; a bonus needs a space before its colon"
    with pytest.raises(ValueError, match=advice):
        read_hotwords(path, tokenizer, 1.5)
    for bonus in ("nan", "inf", "-inf", "1e30", "2,5"):
        path.write_text(f"new\nwork :{bonus}\n")
        with pytest.raises(ValueError, match=rf"hotwords\.txt:2: bonus '{bonus}' is not a number"):
            read_hotwords(path, tokenizer, 1.5)
    path.write_text("new\n" + "work " * 10**6)
    with pytest.raises(
        ValueError, match=r"hotwords\.txt:2: phrase longer than 1000 bytes"
    ) as error:
        read_hotwords(path, tokenizer, 1.5)
    assert len(str(error.value)) < 300
    path.write_bytes(b"new\n\xffwork\n")
    with pytest.raises(ValueError, match=r"hotwords\.txt:2 is not UTF-8"):
        read_hotwords(path, tokenizer, 1.5)
    path.write_bytes(b"\xef\xbb\xbfnew\r\n" + b"work" * 250)
    assert [len(hotword.symbols) for hotword in read_hotwords(path, tokenizer, 1.5)] == [4, 1001]
    path.write_text("\n")
    assert read_hotwords(path, tokenizer, 1.5) == []
    assert "hotwords.txt has no hotwords" in caplog.text
    with pytest.raises(FileNotFoundError, match=r"no hotwords at .*absent\.txt"):
        read_hotwords(tmp_path / "absent.txt", tokenizer, 1.5)


def test_more_phrases_than_the_table_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(["new york", "work"], TokenizerConfig(kind="char", vocab_size=30))
    path = tmp_path / "hotwords.txt"
    path.write_text("new\n" * 10)
    monkeypatch.setattr("pruned_rnnt.decode.fusion.hotwords._MAX_ENTRIES", 12 * len(tokenizer))
    with pytest.raises(ValueError, match=r"hotwords\.txt:4: the phrases up to here take 16 rows"):
        read_hotwords(path, tokenizer, 1.5)


def test_long_lists_of_latin_phrases_of_a_model_with_chinese_letters(tmp_path: Path) -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))
    tokenizer = train_tokenizer([f"{letters} ab"] * 2, TokenizerConfig(kind="char"))
    path = tmp_path / "hotwords.txt"
    path.write_text("ab" * 450 + "\n")
    count = len(read_hotwords(path, tokenizer, 1.5))
    # As many phrases as a table of 2 GB has without the mark of a word's start.
    path.write_text(("ab" * 450 + "\n") * (2**29 // (901 * len(tokenizer))))
    assert len(read_hotwords(path, tokenizer, 1.5)) == count * (2**29 // (901 * len(tokenizer)))
    assert count == 2


@pytest.mark.parametrize(
    "name", ["hotword_bonus", "ngram_scale", "lm_scale", "ilm_scale", "symbol_bonus"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_scales_are_finite(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} .*, got {value}"):
        FusionConfig(**{name: float(value)})


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_phrases_without_spaces_match_inside_a_sentence(tmp_path: Path, kind: str) -> None:
    texts = ["\u4f60\u597d\u4e16\u754c", "\u4e16\u754c\u5f88\u5927", "\u6211\u7231\u4e16\u754c"]
    tokenizer = train_tokenizer(texts, TokenizerConfig(kind=kind, vocab_size=13))
    path = tmp_path / "hotwords.txt"
    path.write_text("\u4e16\u754c\n", encoding="utf-8")
    phrases = [hotword.symbols for hotword in read_hotwords(path, tokenizer, 1.0)]
    for text in texts:
        ids = tuple(tokenizer.encode(text))
        assert any(
            ids[place : place + len(phrase)] == phrase
            for phrase in phrases
            for place in range(len(ids))
        )
