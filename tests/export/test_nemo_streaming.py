"""Causal models of NeMo in sherpa-onnx's streams: the same texts as our greedy search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.nemo_graphs import nemo_stream
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx, exported_graphs
from pruned_rnnt.export.readme import use_of_export
from pruned_rnnt.export.tdt_features import sherpa_features
from pruned_rnnt.export.verify import Pair, run_recognise, verify
from pruned_rnnt.interop.nemo.imported_model import import_model
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.system.usage_errors import ExportError
from tests.export.test_nemo_export import make_ctc_model, make_model, tokenizer  # noqa: F401
from tests.export.test_tdt_export import audio  # noqa: F401
from tests.interop.test_parakeet import written
from tests.tiny_models import tiny_fastconformer, tiny_model

CAUSAL: dict[str, Any] = {"causal": True, "feature_norm": "none", "layers": 2, "kernel_size": 5}


def new_model(kind: str, tokenizer: Tokenizer, features: list[Tensor]) -> SpeechModel:  # noqa: F811
    """Its symbols depend on the frames of these features (T, F), and on the symbols before."""
    if kind == "ctc":
        return make_ctc_model(tokenizer, features, 37, **CAUSAL)
    model = make_model(tokenizer, (), features, **CAUSAL)
    with torch.no_grad():
        # Frames emit any number of symbols up to ten: after some symbols the blank wins.
        model.joiner.decoder_proj.weight.mul_(8)
        model.predictor.embedding.weight.mul_(4)  # type: ignore[operator, union-attr]
        model.joiner.output_linear.bias[0] += 2
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nemo", "ctc"])
def test_sherpa_onnx_finds_our_texts(
    kind: str,
    tokenizer: Tokenizer,  # noqa: F811
    audio: list[Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    features = [sherpa_features(read_audio(path), as_nemo=True) for path in audio[:2]]
    model = new_model(kind, tokenizer, features)
    options = OnnxOptions(streaming=True, chunk=3, left=6)
    graphs = export_onnx(ModelFile(model, tokenizer), tmp_path, options, "tests")
    (plain,) = verify(model, tokenizer, graphs, tmp_path, audio)
    assert plain.exact, "\n".join(plain.lines())
    texts = [pair.ours.split() for pair in plain.texts]
    assert len({word for text in texts for word in text}) > 5
    assert len(texts[0]) > 30
    if kind == "nemo":
        assert plain.differences["encoder.onnx outputs"] < 1e-4
        assert any(len(text) % 10 for text in texts), "all frames emit the most symbols, or none"
    # `transcribe` leaves out control symbols.
    recogniser = pruned_rnnt.load(tmp_path)
    expected = [" ".join(pair.ours.replace("<sos/eos>", " ").split()) for pair in plain.texts]
    assert [" ".join(recogniser.transcribe(path).text.split()) for path in audio] == expected

    name = "encoder" if kind == "nemo" else "model"
    properties = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).metadata_props
    metadata = {each.key: each.value for each in properties}
    sizes = {
        "window_size": 24,
        "chunk_shift": 24,
        "subsampling_factor": 8,
        "vocab_size": model.vocab_size - 1,
        "cache_last_channel_dim1": 2,
        "cache_last_channel_dim2": 6,
        "cache_last_channel_dim3": 16,
    }
    assert {key: int(metadata[key]) for key in sizes} == sizes
    settings = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert settings["streaming"]
    assert (settings["chunk_frames"], settings["chunk_seconds"]) == (3, 0.24)
    readme = use_of_export(tmp_path, "onnx")
    assert "sherpa-onnx --tokens=tokens.txt" in readme
    assert "sherpa-onnx 2.0 or later" in readme
    assert "A chunk has 3 frames (0.24 s)" in readme
    # Times count frames of 80 ms.
    (line, *_) = run_recognise(tmp_path, audio[:1])
    frames = np.array(line["timestamps"]) / 0.08
    np.testing.assert_allclose(frames, frames.round(), atol=0.02)
    assert 2.0 < max(line["timestamps"]) < line["audio_seconds"] + settings["tail_seconds"]

    # sherpa-onnx batches streams of any age.
    pair, module = Pair(graphs[0], tmp_path, "fp32"), nemo_stream(model, 3, 6).module
    torch.manual_seed(0)
    states = module.start(2)
    for _ in range(4):
        outputs = pair.run(*module.inputs(torch.randn(2, 24, 80) - 6, states))
        states = module.advance((), outputs)
    young = module.start(1)
    mixed = tuple(torch.cat((new, old[1:])) for new, old in zip(young, states, strict=True))
    assert mixed[2].tolist() == [0, 96]
    chunk_NTF = torch.randn(2, 24, 80) - 6
    together = pair.run(*module.inputs(chunk_NTF, mixed))
    alone = pair.run(*module.inputs(chunk_NTF[:1], young))
    torch.testing.assert_close(together[0][:1], alone[0], rtol=0, atol=1e-4)
    assert max(pair.largest.values()) < 1e-3


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_have_the_outputs_of_whole_utterances(chunk: int, tmp_path: Path) -> None:
    model = import_model(written("nemo_causal", tmp_path)).model
    model.encoder.set_chunks(chunk, 8)
    bins = model.encoder.config.num_mel_bins
    features_NTF = torch.randn(2, 8 * 4 * 5, bins) - 6
    encoder, *_ = exported_graphs(model, OnnxOptions(streaming=True, chunk=chunk, left=8))
    module = encoder.module
    states, found = module.start(2), []
    with torch.inference_mode():
        encoded_NTE, _ = model.encode(features_NTF, torch.tensor([160, 160]))
        for chunk_NTF in features_NTF.split(8 * chunk, dim=1):
            outputs = module(*module.inputs(chunk_NTF, states))
            states = module.advance((), outputs)
            found.append(outputs[0])
        expected = module.output(encoded_NTE[:, :20])
    torch.testing.assert_close(torch.cat(found, module.frame_axis), expected, rtol=0, atol=1e-5)


def test_what_cannot_stream_is_refused() -> None:
    causal = tiny_fastconformer(**CAUSAL)
    tdt = tiny_model(causal, durations=(0, 1, 2))
    for model, options, message in (
        (tdt, OnnxOptions(streaming=True), "sherpa-onnx cannot stream TDT models"),
        (tiny_model(causal), OnnxOptions(streaming=True, left=-1), "--left is -1, needs a whole"),
        (tiny_model(causal), OnnxOptions(streaming=True, chunk=751), r"\(80 ms\) from 1 to 750"),
        (tiny_model(causal), OnnxOptions(left=8), "--chunk and --left need --streaming"),
    ):
        with pytest.raises(ExportError, match=message):
            exported_graphs(model, options)


def test_differences_are_listed() -> None:
    model = tiny_model(tiny_fastconformer(**CAUSAL))
    decode = DecodeConfig(max_symbols_per_frame=10)
    (line,) = differences(model, decode, streaming=True)
    assert "frames 5 ms later, and energies of at least" in line
    assert "7.6 kHz" in next(differences(model, decode))
