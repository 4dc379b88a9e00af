"""The scripts that measure live streams."""

from __future__ import annotations

import numpy as np
import pytest

from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.transcribe.endpoints import EndpointConfig, Reason
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.stream import FinalText
from scripts import stream_speed
from scripts.stream_endpoints import Found, Joined, Utterance, decode, join, measure
from tests.tiny_models import tiny_conformer, tiny_model
from tests.transcribe.random_model import sound


def utterance(*words: str) -> Utterance:
    """One second of sound for each word, which lasts from 0.2 to 0.8 s of it."""
    times = [AlignedWord(word=word, start=n + 0.2, duration=0.6) for n, word in enumerate(words)]
    return Utterance(sound(float(len(words))), times)


def found(text: str, end: float, reason: Reason = "pause") -> Found:
    return Found(FinalText(text=text, words=(), start=0.0, end=end, reason=reason), end + 0.1)


def joined() -> Joined:
    """Words that end at 1.8, 5.8 and 8.8 s."""
    return join([utterance("one", "two"), utterance("three", "four"), utterance("five")], (2, 2), 0)


def test_utterances_are_joined_with_pauses() -> None:
    stream = joined()
    assert len(stream.samples_S) == 16000 * (2 + 2 + 2 + 2 + 1 + 2)
    assert stream.ends == pytest.approx([1.8, 5.8, 8.8])
    assert [word.start for word in stream.utterances[1]] == pytest.approx([4.2, 5.2])


def test_endpoints_of_known_texts() -> None:
    # The first pause has its endpoint, the second one has it only after the first word of the next
    # utterance, and one utterance is in two texts.
    own = [
        found("one two", 2.5),
        found("three", 5.4),
        found("four five", 9.5),
        found("", 10.0, "end"),
    ]
    measured = measure([joined()], [own], 0.5)
    assert measured.errors.errors == 0
    assert (measured.pauses, measured.found) == (2, 1)
    assert measured.latencies == pytest.approx([2.6 - 1.8])
    assert (measured.utterances, measured.cut) == (3, 1)
    assert str(measured) == (
        "WER 0.00%, latency p50 800, p90 800, p99 800 ms, 1 of 2 pauses found, "
        "1 of 3 utterances cut"
    )


def test_scripts_run() -> None:
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))
    recogniser = Recogniser(tiny_model(tiny_conformer(causal=True), len(tokenizer)), tokenizer)
    finals = decode(recogniser, [joined(), joined()], EndpointConfig(pause=0.2))
    assert len(finals) == 2
    assert finals[0][-1].final.reason == "end"
    assert finals[0] == finals[1]
    speed = stream_speed.measure(recogniser, 3, seconds=0.5, packet=0.1)
    assert len(speed.steps) == 5
    assert speed.seconds == pytest.approx(0.5)
    assert np.isfinite(speed.factor)
