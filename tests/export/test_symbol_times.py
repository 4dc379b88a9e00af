"""The timestamps of sherpa-onnx are the encoder frames at which our greedy search emits symbols."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.decode.build_search import build_search, build_stream_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.readme import use_of_export
from tests.export.spelling_models import sherpa_result
from tests.pretrained.saved_models import make_model, make_tokenizer
from tests.tiny_models import tiny_conformer
from tests.transcribe.random_model import sound

sherpa_onnx = pytest.importorskip("sherpa_onnx")

from pruned_rnnt.export.sherpa_script import _finish_stream  # noqa: E402

pytestmark = pytest.mark.slow
AUDIO = sound(4.0)


@pytest.mark.parametrize("streaming", [False, True])
def test_times_are_frames_of_emission(streaming: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    encoder = tiny_conformer(causal=streaming)
    model = make_model(tokenizer, encoder)
    export_onnx(ModelFile(model, tokenizer), tmp_path, OnnxOptions(streaming=streaming), "test")
    assert "where the model emitted them" in use_of_export(tmp_path, "onnx")
    features = audio_features(AUDIO)[None]
    if streaming:
        settings = json.loads((tmp_path / "settings.json").read_text())
        files = {n: str(tmp_path / f"{n}.onnx") for n in ("encoder", "decoder", "joiner")}
        tokens = str(tmp_path / "tokens.txt")
        recogniser = sherpa_onnx.OnlineRecognizer.from_transducer(**files, tokens=tokens)
        stream = recogniser.create_stream()
        stream.accept_waveform(16000, AUDIO)
        result = _finish_stream(recogniser, stream, 16000, settings["tail_seconds"])
        search = build_stream_search(model, DecodeConfig(), tokenizer)
        decoder = StreamDecoder(model, search, *encoder.stream_sizes)
        (found,) = decoder.recognise(features, torch.tensor([features.size(1)]))
    else:
        result = sherpa_result(tmp_path, "transducer", AUDIO)
        with torch.inference_mode():
            encoded, lengths = model.encode(features, torch.tensor([features.size(1)]))
            ((found, *_),) = build_search(model, DecodeConfig(), tokenizer)(encoded, lengths)
    assert len(found.symbols) > 10
    # sherpa-onnx also decodes noise at the end of a stream.
    sizes = min(len(found.symbols), len(result.tokens)) - 4
    names = [tokenizer.symbols[symbol] for symbol in found.symbols]
    assert [token.strip() for token in result.tokens[:sizes]] == [
        name.strip(" \u2581") for name in names[:sizes]
    ]
    ours = 0.04 * np.array(found.frames[:sizes])
    np.testing.assert_allclose(result.timestamps[:sizes], ours, atol=1e-3)
