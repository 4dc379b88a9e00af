"""Live transcription gives the text of the whole audio, whatever the size of its pieces."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.transcribe.live import LiveRecogniser, transcribe_raw
from pruned_rnnt.usage_errors import ExportError
from tests.tiny_models import tiny_conformer, tiny_model, tiny_zipformer
from tests.transcribe.random_model import sound


def make_live(tokenizer: Tokenizer, encoder: EncoderConfig, device: str = "cpu") -> LiveRecogniser:
    return LiveRecogniser(tiny_model(encoder, len(tokenizer)).to(device), tokenizer)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))


@pytest.mark.parametrize(
    ("read_size", "encoder"),
    [
        (3200, tiny_conformer(causal=True)),
        (1001, tiny_conformer(causal=True)),
        (3200, tiny_zipformer(causal=True)),
    ],
)
def test_live_text_equals_that_of_the_whole_audio(
    tokenizer: Tokenizer, read_size: int, encoder: EncoderConfig
) -> None:
    live = make_live(tokenizer, encoder)
    integers = (sound(3.0) * 32768).clip(-32768, 32767).astype(np.int16)
    source = io.BytesIO(integers.tobytes())
    source.read = lambda size, read=source.read: read(read_size)  # type: ignore[method-assign]
    text = "".join(transcribe_raw(live, source))
    features = audio_features(integers.astype(np.float32) / 32768)
    found = live.stream.recognise(features[None], torch.tensor([len(features)]))[0]
    assert len(found.symbols) > 20
    assert "".join(text.split()) == "".join(tokenizer.decode(found.symbols).split())


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", [tiny_conformer(causal=True), tiny_zipformer(causal=True)])
def test_gpu_matches_cpu(tokenizer: Tokenizer, encoder: EncoderConfig) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        live = make_live(tokenizer, encoder, device)
        texts.append(live.accept(sound(3.0)) + live.finish())
    assert len(texts[0]) > 20
    assert texts[0] == texts[1]


def test_long_pause_starts_a_new_line(tokenizer: Tokenizer) -> None:
    live = make_live(tokenizer, tiny_conformer(causal=True))
    one = tokenizer.encode("one")
    assert live._show([one]) == "one"
    assert live._show([[-1]] * 24) == ""
    assert live._show([[-1]]) == "\n"
    assert live._show([[-1]] * 40) == ""
    assert live._show([tokenizer.encode("two")]) == "two"


def test_non_causal_model_raises(tokenizer: Tokenizer) -> None:
    with pytest.raises(ExportError, match="not causal"):
        make_live(tokenizer, tiny_conformer())
