"""Emission delays of words against their times in the audio."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.emission_delay import (
    WordDelay,
    delay_lines,
    read_delays,
    summary_lines,
    word_delays,
)
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.encoder_kinds import build_encoder, stream_encoder
from pruned_rnnt.system.whole_files import write_lines
from tests.tiny_corpus import make_corpus, trained_run
from tests.tiny_models import tiny_conformer, tiny_zipformer

TOKENIZER = train_tokenizer(["one two three"], TokenizerConfig(kind="char"))
SPOKEN = (
    AlignedWord(word="one", start=0.1, duration=0.3),
    AlignedWord(word="two", start=0.5, duration=0.4),
    AlignedWord(word="three", start=1.0, duration=0.5),
)


def hypothesis(text: str, frames: list[int]) -> Hypothesis:
    symbols = tuple(TOKENIZER.encode(text))
    assert len(symbols) == len(frames)
    return Hypothesis(
        symbols=symbols, frames=tuple(frames), score=0.0, symbol_scores=(0.0,) * len(symbols)
    )


def test_delay_is_from_the_end_of_a_word_to_the_end_of_its_last_frame() -> None:
    # One letter a frame, from frame 5 on: "▁one▁two▁three".
    delays = word_delays(hypothesis("one two three", list(range(5, 19))), SPOKEN, TOKENIZER)
    assert [(d.word, d.frame, d.first, d.last) for d in delays] == [
        ("one", 8, True, False),
        ("two", 12, False, False),
        ("three", 18, False, True),
    ]
    assert [d.seconds for d in delays] == pytest.approx(
        [9 * 0.04 - 0.4, 13 * 0.04 - 0.9, 0.76 - 1.5]
    )


def test_words_of_an_alignment_are_spelt_as_the_tokenizer_does() -> None:
    """Silence is no word."""
    tokenizer = train_tokenizer(["caf\u00e9 two"], TokenizerConfig(kind="char"))
    symbols = tuple(tokenizer.encode("caf\u00e9"))
    found = Hypothesis(
        symbols=symbols, frames=tuple(range(len(symbols))), score=0.0, symbol_scores=()
    )
    spoken = [
        AlignedWord(word="", start=0.0, duration=0.1),
        AlignedWord(word="cafe\u0301", start=0.1, duration=0.3),
    ]
    (delay,) = word_delays(found, spoken, tokenizer)
    assert (delay.word, delay.first, delay.last) == ("caf\u00e9", True, True)
    assert delay.end == pytest.approx(0.4)


def test_wrong_words_are_left_out() -> None:
    # "two" is missing, "one" is said twice: the second one is an insertion or a substitution.
    delays = word_delays(hypothesis("one one three", list(range(5, 19))), SPOKEN, TOKENIZER)
    assert [(d.word, d.frame) for d in delays] == [("one", 8), ("three", 18)]
    assert word_delays(hypothesis("one", [1, 2, 3, 4]), (), TOKENIZER) == []
    assert word_delays(hypothesis("", []), SPOKEN, TOKENIZER) == []


@pytest.mark.parametrize("config", [tiny_conformer(causal=True), tiny_zipformer(causal=True)])
def test_delay_in_a_stream_waits_for_the_chunk(config: object) -> None:
    """A word is known when the samples of its chunk have arrived."""
    encoder = stream_encoder(build_encoder(config), 8, 16)  # type: ignore[arg-type]
    for frame in (0, 7, 8, 23):
        delay = WordDelay("one", frame, 0.25, False, False)
        chunks = frame // 8 + 1
        frames = (chunks - 1) * encoder.shift + encoder.input_frames
        samples = (frames - 1) * 160 + 280
        assert delay.in_stream(encoder) == pytest.approx(samples / 16000 - 0.25)
        assert delay.in_stream(encoder) > delay.seconds - 0.04


def test_lines_and_file(tmp_path: Path) -> None:
    delays = [WordDelay("one", 9 + n, 0.3, n % 2 == 0, n % 2 == 1) for n in range(10)]
    lines = summary_lines(build_encoder(tiny_conformer(causal=True)), (0, 0), delays)
    assert lines[0] == (
        "emission delay: 10 correct words p50 280, p90 424, p95 442, p99 456 ms; "
        "first words p50 260, p90 388, p95 404, p99 417 ms; "
        "last words p50 300, p90 428, p95 444, p99 457 ms"
    )
    assert lines[1].startswith("in streams of 0.16 s chunks: 10 correct words p50 ")
    inner = [delay._replace(first=False, last=False) for delay in delays]
    for line in summary_lines(build_encoder(tiny_conformer(causal=True)), (0, 0), inner):
        assert "nan" not in line
        assert "first words" not in line
    assert len(lines) == 2
    early = [delay._replace(end=delay.end + 0.5) for delay in delays]
    *_, warning = summary_lines(build_encoder(tiny_conformer(causal=True)), (0, 0), early)
    assert warning.startswith("half of the words come 220 ms or more before they end")
    assert "model.encoder.random_first_chunk=true" in warning
    *_, warning = summary_lines(build_encoder(tiny_zipformer(causal=True)), (0, 0), early)
    assert "train longer, or another seed" in warning
    used_to_it = build_encoder(tiny_conformer(causal=True, random_first_chunk=True))
    assert len(summary_lines(used_to_it, (0, 0), early)) == 2
    sizes = {"causal": True, "random_first_chunk": True, "chunk_sizes": (8, -1)}
    *_, warning = summary_lines(build_encoder(tiny_conformer(**sizes)), (0, 0), early)
    assert "model.encoder.smallest_chunk_steps" in warning
    for own in (delays, early):
        assert len(summary_lines(build_encoder(tiny_conformer()), (0, 0), own)) == 1
    assert summary_lines(build_encoder(tiny_conformer()), (0, 0), []) == []
    # decode.chunk=-1: a whole utterance is no stream.
    assert len(summary_lines(build_encoder(tiny_conformer(causal=True)), (-1, 0), early)) == 1
    path = tmp_path / "delays.jsonl"
    assert read_delays(path) == []
    write_lines(path, delay_lines([("a\u2028b", delay) for delay in delays]))
    assert read_delays(path) == [("a\u2028b", delay) for delay in delays]
    with path.open("a") as file:
        file.write('{"id": "b"}\n')
    with pytest.raises(ValueError, match=r"line 11 is damaged"):
        read_delays(path)


@pytest.mark.slow
def test_decode_writes_the_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    run = trained_run(corpus, tmp_path / "run", "train.steps=1")

    def one_word(*_: object) -> list[WordDelay]:
        return [WordDelay("one", 9, 0.3, True, False)]

    monkeypatch.setattr("pruned_rnnt.cli.decoding.word_delays", one_word)
    assert main(["decode", str(run)]) == 0
    assert "correct words p50 100, p90 100, p95 100, p99 100 ms; " in capsys.readouterr().out
    (path,) = (run / "results").glob("delays-test-greedy-*.jsonl")
    found = read_delays(path)
    assert len({name for name, _ in found}) == len(found) > 1
    assert {delay for _, delay in found} == {WordDelay("one", 9, 0.3, True, False)}
    monkeypatch.setattr("pruned_rnnt.cli.decoding.word_delays", lambda *_: [])
    assert main(["decode", str(run)]) == 0
    assert not path.exists()
    assert "emission delay" not in capsys.readouterr().out
