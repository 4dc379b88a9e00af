"""The n-gram automaton against the definition of ARPA models, word by word."""

from __future__ import annotations

import gzip
import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from lhotse import CutSet

from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.fusion.build import FusionConfig, build_scorers
from pruned_rnnt.decode.fusion.ngram import NgramScorer
from pruned_rnnt.decode.fusion.ngram_files import read_texts, symbol_bigrams
from pruned_rnnt.decode.search.states import TokenScorer
from tests.decode.search_model import encoded, make_model, modified_beam_search
from tests.tiny_corpus import make_corpus

# <x> is not in the n-gram models: it counts as <unk>.
SYMBOLS = ["<blk>", "<sos/eos>", "<unk>", "a", "b", "c", "d", "<x>"]
WORDS = ["a", "b", "c", "d"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Entries = dict[tuple[str, ...], tuple[float, float]]


def random_model(seed: int, order: int) -> Entries:
    """Log-probabilities and back-off weights to the base 10, not normalised.

    Some n-grams lack their beginning or their end among the shorter ones, as pruned models do.
    """
    rng = random.Random(seed)

    def entry() -> tuple[float, float]:
        return round(rng.uniform(-3, -0.1), 3), round(rng.uniform(-1, 0.2), 3)

    entries: Entries = {(word,): entry() for word in ("<unk>", "<s>", "</s>", *WORDS)}
    # A word that is not a symbol of the recogniser.
    entries[("other",)] = entry()
    for length in range(2, order + 1):
        for ngram in itertools.product(["<s>", *WORDS, "other"], repeat=length - 1):
            for word in (*WORDS, "</s>", "<unk>"):
                if "<s>" not in ngram[1:] and rng.random() < 0.9 / length:
                    entries[(*ngram, word)] = entry()
    return entries


def write(entries: Entries, path: Path) -> Path:
    order = max(map(len, entries))
    by_order = [{n: e for n, e in entries.items() if len(n) == k + 1} for k in range(order)]
    lines = ["\\data\\"]
    lines += [f"ngram {k}={len(found)}" for k, found in enumerate(by_order, start=1)]
    for k, found in enumerate(by_order, start=1):
        lines += ["", f"\\{k}-grams:"]
        for ngram, (log_prob, back_off) in found.items():
            weight = f"\t{back_off}" if k < order else ""
            lines.append(f"{log_prob}\t{' '.join(ngram)}{weight}")
    lines += ["", "\\end\\", ""]
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def score(entries: Entries, words: tuple[str, ...], order: int) -> float:
    """log p of the last word after the others, by the definition."""
    words = words[-order:]
    if words in entries:
        return entries[words][0] * math.log(10)
    if len(words) == 1:
        return entries[("<unk>",)][0] * math.log(10)
    weight = entries[words[:-1]][1] if words[:-1] in entries and len(words) <= order else 0.0
    return weight * math.log(10) + score(entries, words[1:], order)


def walk(scorer: TokenScorer, texts: list[tuple[int, ...]], device: str) -> list[list[float]]:
    """The score of each symbol of the texts, and of their ends; all rows at once."""
    state = scorer.start(len(texts), torch.device(device))
    totals: list[list[float]] = [[] for _ in texts]
    for place in range(max(map(len, texts)) + 1):
        scores_RV, final_R = scorer.scores(state), scorer.final(state)
        assert scores_RV.shape == (len(texts), len(SYMBOLS))
        symbols = [text[place] if place < len(text) else 0 for text in texts]
        emits = torch.tensor([place < len(text) for text in texts], device=device)
        for row, text in enumerate(texts):
            if place < len(text):
                totals[row].append(float(scores_RV[row, text[place]]))
            elif place == len(text):
                totals[row].append(float(final_R[row]))
        new = scorer.advance(state, torch.tensor(symbols, device=device), emits)
        state = tuple(torch.where(emits, a, b) for a, b in zip(new, state, strict=True))
    return totals


def texts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [
        tuple(rng.choices([2, 3, 4, 5, 6, 7], [1, 9, 9, 9, 9, 1], k=k % 9)) for k in range(count)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_scores_are_those_of_the_definition(order: int, device: str, tmp_path: Path) -> None:
    entries = random_model(order, order)
    scorer = NgramScorer(write(entries, tmp_path / "lm.arpa.gz"), SYMBOLS, 0.5)
    known = {*WORDS, "<unk>"}
    examples = texts(60)
    for text, found in zip(examples, walk(scorer, examples, device), strict=True):
        names = [SYMBOLS[symbol] for symbol in text]
        words = ("<s>", *(name if name in known else "<unk>" for name in names), "</s>")
        expected = [0.5 * score(entries, words[: end + 1], order) for end in range(1, len(words))]
        assert found == pytest.approx(expected, abs=1e-4)


def test_back_off_weights_below_a_highest_order_without_entries(tmp_path: Path) -> None:
    entries = random_model(3, 3)
    path = write({**entries, ("a",) * 4: (-1.0, 0.0)}, tmp_path / "lm.arpa")
    path.write_text(
        path.read_text().replace("ngram 4=1", "ngram 4=0").replace("-1.0\ta a a a\n", "")
    )
    examples = texts(30)
    for text, found in zip(
        examples, walk(NgramScorer(path, SYMBOLS, 1.0), examples, "cpu"), strict=True
    ):
        names = [SYMBOLS[symbol] for symbol in text]
        words = ("<s>", *(name if name in {*WORDS, "<unk>"} else "<unk>" for name in names), "</s>")
        expected = [score(entries, words[: end + 1], 4) for end in range(1, len(words))]
        assert found == pytest.approx(expected, abs=1e-4)


def bigram_probability(one: str, other: str, lines: list[str]) -> float:
    """By the formula of `symbol_bigrams`."""
    pairs = [pair for line in lines for pair in itertools.pairwise(["<s>", *line, "</s>"])]
    after = [b for a, b in pairs if a == one]
    symbols = {b for _, b in pairs} | {"<unk>"}
    singles = [b for _, b in pairs] + ["<unk>", *symbols]
    single = singles.count(other) / len(singles)
    kinds = len(set(after))
    if not after:
        return single
    return (after.count(other) + kinds * single) / (len(after) + kinds)


def test_bigrams_of_texts_are_smoothed_probabilities() -> None:
    lines = ["abac", "ab", "cab", "d"]
    scorer = NgramScorer(symbol_bigrams(lines), SYMBOLS, 1.0)
    state = scorer.start(1, torch.device("cpu"))
    names = [*SYMBOLS[2:7], "</s>"]
    for before, symbol in (("<s>", 3), ("a", 4), ("b", 5), ("c", 6), ("d", 3)):
        found = [*scorer.scores(state)[0, 2:7].tolist(), float(scorer.final(state)[0])]
        expected = [math.log(bigram_probability(before, each, lines)) for each in names]
        assert found == pytest.approx(expected, abs=1e-5)
        assert sum(map(math.exp, found)) == pytest.approx(1.0, abs=1e-5)
        state = scorer.advance(state, torch.tensor([symbol]), torch.tensor([True]))


def test_bigrams_of_training_texts_are_subtracted(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["ab ba", "abba"], TokenizerConfig(kind="char"))
    path = tmp_path / "texts.txt"
    path.write_text("ab ba\nabba\n")
    config = FusionConfig(bigram_texts=str(path), bigram_scale=0.3)
    (scorer,) = build_scorers(config, tokenizer)
    names = tokenizer.symbols
    texts = [[names[n] for n in tokenizer.encode(text)] for text in ("ab ba", "abba")]
    plain = NgramScorer(symbol_bigrams(texts), names, 1.0)
    states = [each.start(1, torch.device("cpu")) for each in (scorer, plain)]
    for symbol in tokenizer.encode("ba ab"):
        for found, expected in (
            (scorer.scores(states[0]), plain.scores(states[1])),
            (scorer.final(states[0]), plain.final(states[1])),
        ):
            torch.testing.assert_close(found, -0.3 * expected)
        states = [
            each.advance(state, torch.tensor([symbol]), torch.tensor([True]))
            for each, state in zip((scorer, plain), states, strict=True)
        ]
    with pytest.raises(FileNotFoundError, match=r"decode\.fusion\.bigram_texts: .* nothing"):
        build_scorers(FusionConfig(bigram_texts=str(tmp_path / "absent")), tokenizer)


def test_a_prepared_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = PreparedFolder.cuts

    def cuts(self: PreparedFolder, split: str, *, lazy: bool = False) -> CutSet:
        reads.append(split)
        return read(self, split, lazy=lazy)

    corpus = make_corpus(tmp_path / "corpus", train=12)
    expected = {cut.supervisions[0].text for cut in PreparedFolder(corpus).cuts("train")}
    monkeypatch.setattr(PreparedFolder, "cuts", cuts)
    texts = read_texts(corpus, "word_texts")
    assert len(texts) == len(expected) < 12
    assert set(texts) == expected
    assert read_texts(corpus, "bigram_texts") == texts
    assert reads == ["train"]
    make_corpus(corpus, train=2, words=("one", "two", "three"))
    assert len(read_texts(corpus, "word_texts")) <= 2
    assert reads == ["train", "train"]


@pytest.mark.gpu
def test_a_search_captures_the_automaton(tmp_path: Path) -> None:
    symbols = SYMBOLS[:5]
    path = write(random_model(3, 3), tmp_path / "lm.arpa")
    model = make_model()
    frames, lengths = encoded([70, 41, 65])
    options = {"beam_size": 4, "num_best": 4}
    expected = modified_beam_search(
        model, frames, lengths, scorers=[NgramScorer(path, symbols, 0.3)], **options
    )
    model = model.cuda()
    for _ in range(2):
        found = modified_beam_search(
            model, frames.cuda(), lengths, scorers=[NgramScorer(path, symbols, 0.3)], **options
        )
        for one, other in zip(found, expected, strict=True):
            assert [h.symbols for h in one] == [h.symbols for h in other]
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no model\n", r"broken\.arpa:1 is not an ARPA file: ends without"),
        ("\\data\\\n\\1-grams:\n-1 a b c\n\\end\\\n", r"arpa:3 .* needs a probability and 1 words"),
        ("\\data\\\n\\1-grams:\nx a\n\\end\\\n", r"arpa:3 .*could not convert"),
        ("\\data\\\n\\1-grams:\nnan a\n\\end\\\n", r"arpa:3 .*not finite"),
        ("\\data\\\n\\1-grams:\n-inf a\n\\end\\\n", r"arpa:3 .*not finite: write -99"),
        ("\\data\\\n\\2-grams:\n", r"arpa:2 .*needs \\1-grams:"),
        ("\\data\\\n\\end\\\n", "no n-grams"),
        ("\\data\\\n\\1-grams:\n-1 other\n\\end\\\n", "has 0 of 8 symbols"),
    ],
)
def test_broken_files_are_errors(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.arpa"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        NgramScorer(path, SYMBOLS, 1.0)
    path.write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(ValueError, match="is not an ARPA file"):
        NgramScorer(path, SYMBOLS, 1.0)
    path.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 20)  # no such kind of block
    with pytest.raises(ValueError, match=r"broken\.arpa:0 is not an ARPA file: .*decompressing"):
        NgramScorer(path, SYMBOLS, 1.0)
    path.write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
    with pytest.raises(ValueError, match="binary of kenlm; name the ARPA file"):
        NgramScorer(path, SYMBOLS, 1.0)
    with pytest.raises(FileNotFoundError, match=r"absent\.arpa"):
        NgramScorer(tmp_path / "absent.arpa", SYMBOLS, 1.0)
