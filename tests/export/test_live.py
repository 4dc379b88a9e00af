"""Audio that comes piece by piece gives the features and the text of the whole."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from tiny_encoders import tiny_conformer, tiny_zipformer

from pruned_rnnt.data.audio.audio_file import FloatArray
from pruned_rnnt.data.audio.load_audio import audio_features
from pruned_rnnt.data.tokens.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.transducer_model import ModelConfig, TransducerModel
from pruned_rnnt.transcribe.live import LiveRecogniser, transcribe_raw
from pruned_rnnt.usage_errors import ExportError


def sound(seconds: float) -> FloatArray:
    rng = np.random.default_rng(0)
    time = np.arange(int(16000 * seconds)) / 16000
    sweep = 0.3 * np.sin(2 * np.pi * np.cumsum(300 + 2000 * np.abs(np.sin(3 * time))) / 16000)
    return (sweep + 0.01 * rng.standard_normal(len(time))).astype(np.float32)


def make_model(
    tokenizer: Tokenizer, causal: bool = True, encoder: EncoderConfig | None = None
) -> TransducerModel:
    torch.manual_seed(0)
    encoder = encoder or tiny_conformer(causal=causal)
    config = ModelConfig(encoder=encoder, predictor=PredictorConfig(dim=8), joiner_dim=16)
    model = TransducerModel(config, len(tokenizer)).eval()
    with torch.no_grad():
        for parameter in model.joiner.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))


@pytest.mark.parametrize(
    ("read_size", "encoder"), [(3200, None), (1001, None), (3200, tiny_zipformer(causal=True))]
)
def test_text_of_pieces_is_that_of_the_whole(
    tokenizer: Tokenizer, read_size: int, encoder: EncoderConfig | None
) -> None:
    live = LiveRecogniser(make_model(tokenizer, encoder=encoder), tokenizer)
    integers = (sound(3.0) * 32768).clip(-32768, 32767).astype(np.int16)
    source = io.BytesIO(integers.tobytes())
    source.read = lambda size, read=source.read: read(read_size)  # type: ignore[method-assign]
    text = "".join(transcribe_raw(live, source))
    features = audio_features(integers.astype(np.float32) / 32768)
    found = live.stream.recognise(features[None], torch.tensor([len(features)]))[0]
    assert len(found.symbols) > 20
    assert "".join(text.split()) == "".join(tokenizer.decode(found.symbols).split())


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", [None, tiny_zipformer(causal=True)])
def test_the_gpu_hears_the_same_stream(tokenizer: Tokenizer, encoder: EncoderConfig | None) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        live = LiveRecogniser(make_model(tokenizer, encoder=encoder).to(device), tokenizer)
        texts.append(live.accept(sound(3.0)) + live.finish())
    assert len(texts[0]) > 20
    assert texts[0] == texts[1]


def test_a_long_pause_starts_a_new_line(tokenizer: Tokenizer) -> None:
    live = LiveRecogniser(make_model(tokenizer), tokenizer)
    one = tokenizer.encode("one")
    assert live._show(one) == "one"
    assert live._show([-1] * 24) == ""
    assert live._show([-1]) == "\n"
    assert live._show([-1] * 40) == ""
    assert live._show(tokenizer.encode("two")) == "two"


def test_a_model_that_sees_the_future_cannot_stream(tokenizer: Tokenizer) -> None:
    with pytest.raises(ExportError, match="not causal"):
        LiveRecogniser(make_model(tokenizer, causal=False), tokenizer)
