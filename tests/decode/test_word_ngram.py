"""Word n-gram models in the search over letters and pieces, against their definition."""

from __future__ import annotations

import gzip
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.fusion import word_scorer
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.fusion.ngram_files import read_orders, read_word_ngram
from pruned_rnnt.decode.fusion.word_ngram import BEGIN, END, WordNgram
from pruned_rnnt.decode.fusion.word_scorer import WordNgramScorer
from tests.decode.search_model import encoded, make_model, modified_beam_search

# Log-probabilities to the base 10, then the logarithm of the back-off weight.
ARPA = """\
\\data\\
ngram 1=6
ngram 2=3
ngram 3=2

\\1-grams:
-99 <s> -0.3
-0.7 </s>
-0.5 ab -0.2
-0.6 abc -0.1
-1.2 b
-2.0 <unk>

\\2-grams:
-0.3 <s> ab -0.4
-0.5 ab abc -0.6
-0.9 b b

\\3-grams:
-0.2 <s> ab abc
-0.4 ab abc </s>

\\end\\
"""
WORDS = ["ab", "abc", "b", END]
PROBABILITY = {
    ("</s>",): -0.7,
    ("ab",): -0.5,
    ("abc",): -0.6,
    ("b",): -1.2,
    ("<s>", "ab"): -0.3,
    ("ab", "abc"): -0.5,
    ("b", "b"): -0.9,
    ("<s>", "ab", "abc"): -0.2,
    ("ab", "abc", "</s>"): -0.4,
}
BACK_OFF = {
    ("<s>",): -0.3,
    ("ab",): -0.2,
    ("abc",): -0.1,
    ("<s>", "ab"): -0.4,
    ("ab", "abc"): -0.6,
}
TEXTS = ["ab abc", "ab b", "b"]
LETTERS = ["<blk>", "<sos/eos>", "<unk>", "\u2581", "a", "b", "c"]
PIECES = ["<blk>", "<sos/eos>", "<unk>", "\u2581ab", "\u2581b", "c", "\u2581", "a", "b"]
UNKNOWN = 0.01


def backoff_probability(*words: str) -> float:
    """P(last word | the others) by the definition of back-off models."""
    if words in PROBABILITY:
        return float(10 ** PROBABILITY[words])
    return float(10 ** BACK_OFF.get(words[:-1], 0.0)) * backoff_probability(*words[1:])


def probability(model: WordNgram, *words: str) -> float:
    ids = {word: i for i, word in enumerate((*model.words, END))}
    history = model.start(1)
    for word in words[:-1]:
        history = model.after(history, torch.tensor([ids[word]]))
    word_Q = torch.tensor([ids[words[-1]]])
    return float(model.between(history, word_Q, word_Q + 1))


@pytest.fixture
def arpa(tmp_path: Path) -> Path:
    path = tmp_path / "words.arpa.gz"
    path.write_bytes(gzip.compress(ARPA.encode()))
    return path


def test_backoff_model_has_the_probabilities_of_its_definition(arpa: Path) -> None:
    model = WordNgram(read_orders(arpa))
    assert model.words == ["ab", "abc", "b"]
    for before in itertools.chain([()], itertools.product(WORDS[:3], repeat=2)):
        for word in WORDS:
            words = (BEGIN, *before, word)
            expected = backoff_probability(*words[-3:])
            assert probability(model, *before, word) == pytest.approx(expected, rel=1e-9)


def test_words_between_two_have_the_sum_of_their_probabilities(arpa: Path) -> None:
    model = WordNgram(read_orders(arpa), TEXTS)
    history = model.after(model.start(1), torch.tensor([0]))
    for first, stop in itertools.combinations(range(5), 2):
        found = model.between(history, torch.tensor([first]), torch.tensor([stop]))
        singles = [probability(model, "ab", (*model.words, END)[i]) for i in range(first, stop)]
        assert float(found) == pytest.approx(sum(singles), rel=1e-9)


def test_texts_share_each_history_with_the_model(arpa: Path) -> None:
    alone, adapted = WordNgram(read_orders(arpa)), WordNgram(read_orders(arpa), TEXTS, caution=1.0)
    assert adapted.words == alone.words
    # Unigrams of the texts: ab 2, abc 1, b 2, </s> 3, so 8 words, 4 of them different.
    unigram = {
        word: count / 12 + 4 / 12 * backoff_probability(word)
        for word, count in zip(WORDS, (2, 1, 2, 3), strict=True)
    }
    # The beginning has two words, ab twice and b once; its back-off model is P(w | <s>).
    for word, count in (("ab", 2), ("abc", 0), ("b", 1)):
        excess = backoff_probability(BEGIN, word) - 10**-0.3 * backoff_probability(word)
        expected = count / 5 + 2 / 5 * (excess + 10**-0.3 * unigram[word])
        assert probability(adapted, word) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("caution", [1.0, 6.0])
def test_probabilities_of_texts_alone_sum_to_one(caution: float) -> None:
    model = WordNgram(texts=TEXTS, caution=caution)
    for before in itertools.chain([()], itertools.product(WORDS[:3], repeat=2)):
        total = sum(probability(model, *before, word) for word in WORDS)
        # What is missing are <s> and <unk>, which share the rest of the unigrams.
        assert 0.7 < total <= 1.0 + 1e-9


def follow(scorer: WordNgramScorer, symbols: list[int]) -> tuple[Tensor, Tensor]:
    """The scores of the next symbols, and the total with that of the end."""
    state = scorer.start(2, torch.device("cpu"))
    total = torch.zeros(2)
    for symbol in symbols:
        total += scorer.scores(state)[:, symbol]
        symbols_R = torch.tensor([symbol, symbol])
        state = scorer.advance(state, symbols_R, torch.tensor([True, True]))
    return scorer.scores(state), total + scorer.final(state)


def test_letters_of_a_text_have_the_score_of_its_words(arpa: Path) -> None:
    model = WordNgram(read_orders(arpa))
    scorer = WordNgramScorer(model, LETTERS, scale=0.5, unknown=UNKNOWN)
    known = [backoff_probability(*w) for w in ((BEGIN, "ab"), (BEGIN, "ab", "abc"))]
    # An unknown word of n letters has 4 choices n + 1 times: three letters and the end.
    words = [
        (1 - UNKNOWN) * p + UNKNOWN * 0.25 ** (n + 1) for p, n in zip(known, (2, 3), strict=True)
    ]
    expected = 0.5 * (math.log(words[0]) + math.log(words[1]) + math.log((1 - UNKNOWN) * 10**-0.4))
    _, total = follow(scorer, [3, 4, 5, 3, 4, 5, 6])
    torch.testing.assert_close(total, torch.full((2,), expected))


def test_pieces_and_letters_have_the_same_score(arpa: Path) -> None:
    model = WordNgram(read_orders(arpa), TEXTS)
    letters = WordNgramScorer(model, LETTERS, scale=1.0, unknown=UNKNOWN)
    pieces = WordNgramScorer(model, PIECES, scale=1.0, unknown=UNKNOWN)
    _, expected = follow(letters, [3, 4, 5, 6, 3, 5, 3, 6, 5])  # abc b cb
    for symbols in ([3, 5, 4, 6, 5, 8], [6, 7, 8, 5, 6, 8, 6, 5, 8]):
        torch.testing.assert_close(follow(pieces, symbols)[1], expected)


def test_probabilities_of_next_letters_sum_to_one(arpa: Path) -> None:
    model = WordNgram(read_orders(arpa))
    scorer = WordNgramScorer(model, LETTERS, scale=1.0, unknown=UNKNOWN)
    for symbols in ([3, 4], [3, 4, 5], [3, 6, 6], [3, 4, 5, 3, 4, 5]):
        scores, _ = follow(scorer, symbols)
        # The next word's first symbol is the boundary, which carries 1 - P(end).
        state = scorer.start(1, torch.device("cpu"))
        for symbol in symbols:
            state = scorer.advance(state, torch.tensor([symbol]), torch.tensor([True]))
        letters = scores[0, 4:7].exp().sum()
        closed, _ = scorer._close(state)
        assert float(letters + (closed - state[3]).exp()) == pytest.approx(1.0, abs=1e-5)


def test_characters_in_bytes_are_letters(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("caf\u00e9 b\ncafe b\n\u65e5 b\n", encoding="utf-8")
    model = read_word_ngram("", str(tmp_path / "texts.txt"))
    names = [*LETTERS, "e", "f", *(f"<0x{byte:02X}>" for byte in range(256))]

    def total(text: str) -> float:
        spelled = [
            [names.index(letter)] if letter in names else [9 + byte for byte in letter.encode()]
            for letter in text.replace(" ", "\u2581")
        ]
        return float(follow(scorer, [3, *itertools.chain(*spelled)])[1][0])

    scorer = WordNgramScorer(model, names, scale=1.0, unknown=UNKNOWN)
    for text in ("caf\u00e9 b", "\u65e5 b"):  # as likely, apart from the share of unknown words
        assert total(text) == pytest.approx(total("cafe b"), abs=0.01)
    assert total("caf b") < total("cafe b") - 3  # a known word without its last letter
    assert total("\u672c b") == pytest.approx(total("caf b"), abs=1e-4)  # three letters, too
    with_bytes = total("bbb")
    scorer = WordNgramScorer(model, names[:9], scale=1.0, unknown=UNKNOWN)
    # Words in other scripts do not change the score of an unknown one.
    assert with_bytes == pytest.approx(total("bbb"), abs=1e-5)
    capitals = [name.upper() if len(name) == 1 else name for name in names]
    with pytest.raises(ValueError, match=r"the letters 'ABCEF\u2581?' spell 0 of the 4 words"):
        WordNgramScorer(model, capitals, scale=1.0, unknown=UNKNOWN)


def test_search_prefers_the_words_of_the_model(arpa: Path) -> None:
    """With a large scale the search finds words of the model only."""
    scorer = WordNgramScorer(
        WordNgram(read_orders(arpa)),
        ["<blk>", "<sos/eos>", "<unk>", "\u2581", "ab"],
        scale=20.0,
        unknown=1e-6,
    )
    frames, lengths = encoded([6, 5])
    plain = modified_beam_search(make_model(), frames, lengths, beam_size=8)
    fused = modified_beam_search(make_model(), frames, lengths, beam_size=8, scorers=[scorer])
    assert [x[0].symbols for x in plain] != [x[0].symbols for x in fused]


def test_wrong_files_and_settings_are_errors(
    arpa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.arpa"):
        read_word_ngram(str(tmp_path / "absent.arpa"), "")
    with pytest.raises(FileNotFoundError, match=r"word_texts: there is nothing at .*absent\.txt"):
        read_word_ngram(str(arpa), str(tmp_path / "absent.txt"))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.txt has no text"):
        read_word_ngram("", str(tmp_path / "empty.txt"))
    (tmp_path / "broken.arpa").write_text("\\1-grams:\n-0.5 a b c d\n")
    with pytest.raises(ValueError, match=r"broken\.arpa:2 is not an ARPA file: an 1-gram needs"):
        read_word_ngram(str(tmp_path / "broken.arpa"), "")
    (tmp_path / "other.arpa").write_text("no model\n")
    with pytest.raises(ValueError, match=r"other\.arpa:1 is not an ARPA file"):
        read_word_ngram(str(tmp_path / "other.arpa"), "")
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"fusion\.word_texts: .*latin\.txt:2 is not UTF-8"):
        read_word_ngram("", str(tmp_path / "latin.txt"))
    (tmp_path / "pruned.arpa").write_text(ARPA.replace("-1.2 b\n", ""))
    with pytest.raises(ValueError, match=r"pruned\.arpa:16: b is not among the 1-grams"):
        read_word_ngram(str(tmp_path / "pruned.arpa"), "")
    symbols = tmp_path / "symbols.arpa"
    symbols.write_text(re.sub(r"\bb\b", "\u2581b", ARPA))
    with pytest.raises(ValueError, match=r"symbols\.arpa .*of symbols \(6% of them"):
        read_word_ngram(str(symbols), "")
    # A few such words of a corpus are noise.
    symbols.write_text(symbols.read_text().replace("-1.2 \u2581b\n", "-3 \u2581b\n"))
    assert read_word_ngram(str(symbols), "").words
    with pytest.raises(ValueError, match="word_unknown must lie between 0 and 1, got 0"):
        FusionConfig(word_unknown=0)
    model = WordNgram(read_orders(arpa))
    with pytest.raises(ValueError, match="symbols that show where words begin"):
        WordNgramScorer(model, ["<blk>", "a", "b"], scale=1.0, unknown=0.1)
    with pytest.raises(ValueError, match="spell 0 of the 3 words"):
        WordNgramScorer(model, ["<blk>", "\u2581", "A", "B"], scale=1.0, unknown=0.1)
    with pytest.raises(ValueError, match="needs a back-off model or texts"):
        WordNgram()
    monkeypatch.setattr(word_scorer, "_MAX_ENTRIES", 10)
    with pytest.raises(ValueError, match=r"decode\.fusion\.word_ngram: 2 words .* 3 at most"):
        WordNgramScorer(model, ["<blk>", "\u2581", "a", "b"], scale=1.0, unknown=0.1)


def test_the_unknown_word_may_be_in_capitals(arpa: Path, tmp_path: Path) -> None:
    (tmp_path / "capitals.arpa").write_text(ARPA.replace("<unk>", "<UNK>"))
    capitals, model = (read_word_ngram(str(x), "") for x in (tmp_path / "capitals.arpa", arpa))
    assert capitals.words == model.words == ["ab", "abc", "b"]
    first, stop = torch.tensor([0]), torch.tensor([3])
    assert torch.equal(*(x.between(x.start(1), first, stop) for x in (capitals, model)))
