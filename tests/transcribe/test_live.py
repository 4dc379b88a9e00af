"""Live transcription gives the text of the whole audio, whatever the size of its pieces."""

from __future__ import annotations

import io

import numpy as np
import pytest

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.live import _Shown, transcribe_raw
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.stream_group import step
from tests.tiny_models import tiny_conformer, tiny_model
from tests.transcribe.random_model import sound


@pytest.mark.parametrize("read_size", [3200, 1001])
@pytest.mark.parametrize("endpoints", [EndpointConfig(longest=1.0), EndpointConfig(longest=0)])
def test_lines_are_the_final_texts(read_size: int, endpoints: EndpointConfig) -> None:
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))
    recogniser = Recogniser(tiny_model(tiny_conformer(causal=True), len(tokenizer)), tokenizer)
    integers = (sound(3.0) * 32768).clip(-32768, 32767).astype(np.int16)
    source = io.BytesIO(integers.tobytes())
    source.read = lambda size, read=source.read: read(read_size)  # type: ignore[method-assign]
    shown = "".join(transcribe_raw(recogniser.stream(endpoints=endpoints), source, print))
    stream = recogniser.stream(endpoints=endpoints)
    stream.accept_waveform(integers)
    stream.finish()
    while step([stream]):
        pass
    texts = [final.text for final in stream.take_finals() if final.text]
    assert len(texts) == 1 if endpoints.longest == 0 else len(texts) > 1
    assert "".join(shown.split()) == "".join("".join(texts).split())
    assert shown.endswith("\n")
    assert len(shown) > 20


def test_line_goes_on_after_a_text_that_is_final_for_its_length() -> None:
    shown = _Shown()
    assert shown.up_to("one two thr") == "one two thr"
    assert shown.end("one two") == ""
    assert shown.up_to("three") == "ee"
    assert shown.end("three four") == " four\n"
    assert shown.end("") == ""
    assert shown.up_to("five") == "five"
