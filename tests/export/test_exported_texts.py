"""The texts of every locale are the same from torch, onnxruntime and sherpa-onnx."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from pruned_rnnt.data.tokens.text_normalisation import normal_form
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME
from pruned_rnnt.export.verify import _text, run_recognise
from tests.data.locale_texts import each_locale, sample_texts
from tests.data.test_locale_tokens import old_tokenizer
from tests.export.spelling_models import sherpa_result, write_folder

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("sherpa_onnx")

AUDIO = np.random.default_rng(0).normal(0, 0.1, 24000).astype(np.float32)
# With bytes the tokens come from another text, so that all characters are bytes.
TOKENS = ("char", "bpe", "bytes", "old")


def tokenizer_of(tokens: str, texts: list[str], language: str) -> Tokenizer:
    if tokens == "old":
        return old_tokenizer(texts)
    if tokens == "bytes":
        config = TokenizerConfig(kind="bpe", byte_fallback=True, languages=(language,))
        return train_tokenizer(["merhaba"] * 9, config)
    return train_tokenizer(texts, TokenizerConfig(kind=tokens))


@each_locale
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", ["ctc", "transducer"])
def test_texts_of_exported_models(locale: str, tokens: str, kind: str, tmp_path: Path) -> None:
    from pruned_rnnt.export.sherpa_script import text_of_tokens
    from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser

    texts = sample_texts(locale)
    texts = texts[:: max(1, len(texts) // 20)]
    text = " ".join(texts)
    tokenizer = tokenizer_of(tokens, texts, "xx")
    symbols = tokenizer.encode(text)
    expected = tokenizer.decode(symbols)
    assert expected == tokenizer.normalise(text)
    assert tokens == "old" or expected == normal_form(text)
    write_folder(tmp_path, kind, tokenizer, symbols)
    assert OnnxRecogniser(tmp_path).transcribe(AUDIO, sampling_rate=16000).text == expected
    result = sherpa_result(tmp_path, kind, AUDIO)
    # It removes spaces before punctuation and between Chinese characters from texts of transducers.
    assert result.text.replace(" ", "") == expected.replace(" ", "")
    settings = json.loads((tmp_path / SETTINGS_NAME).read_text(encoding="utf-8"))
    assert text_of_tokens(result.tokens, settings) == (expected, "")
    assert _text(tokenizer, symbols) == expected


def test_language_tags_of_exported_models(tmp_path: Path) -> None:
    from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser

    text = "merhaba d\u00fcnya \u4f60"
    tokenizer = tokenizer_of("bytes", [], "tr")
    symbols = tokenizer.encode(text, "tr")
    write_folder(tmp_path, "transducer", tokenizer, symbols)
    found = OnnxRecogniser(tmp_path).transcribe(AUDIO, sampling_rate=16000)
    assert (found.text, found.language) == (text, "tr")
    assert sherpa_result(tmp_path, "transducer", AUDIO).text == f"<|tr|> {text}"
    soundfile.write(tmp_path / "a.wav", AUDIO, 16000)
    (line,) = run_recognise(tmp_path, [tmp_path / "a.wav"])
    assert (line["text"], line["language"]) == (text, "tr")
    assert _text(tokenizer, symbols) == text
