"""ONNX models that recognise a given text in any audio, to compare how programs write symbols."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pruned_rnnt.data.tokens.tokenizer import BLANK_ID, Tokenizer
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME
from pruned_rnnt.system.usage_errors import ExportError


def write_folder(folder: Path, kind: str, tokenizer: Tokenizer, symbols: Sequence[int]) -> None:
    """An exported folder whose model emits `symbols`; kind: ctc or transducer."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(tokenizer)
    frames = [BLANK_ID]
    for symbol in symbols:
        frames += [symbol, BLANK_ID]
    scores = np.full((1, len(frames), size), -30.0, dtype=np.float32)
    scores[0, range(len(frames)), frames] = 0.0
    if kind == "ctc":
        _write_scores(folder / "model.onnx", scores, ("log_probs", "log_probs_len"), _CTC, size)
    else:
        names = ("encoder_out", "encoder_out_lens")
        _write_scores(folder / "encoder.onnx", scores, names, {"model_type": "zipformer2"}, size)
        _write_decoder(folder / "decoder.onnx", size)
        _write_joiner(folder / "joiner.onnx", size)
    tokenizer.save(folder)
    settings = {
        "kind": kind,
        "streaming": False,
        "sample_rate": 16000,
        "feature_dim": 80,
        "shortest_seconds": 0.1,
        "model_type": "transducer",
        "languages": list(tokenizer.languages),
        "byte_tokens": tokenizer.has_bytes,
        "precisions": ["fp32"],
    }
    (folder / SETTINGS_NAME).write_text(json.dumps(settings), encoding="utf-8")
    from pruned_rnnt.export import sherpa_script

    (folder / "recognise.py").write_bytes(Path(sherpa_script.__file__ or "").read_bytes())


_CTC = {"model_type": "zipformer2_ctc"}


def _write_scores(
    path: Path,
    scores_NTV: npt.NDArray[np.float32],
    names: tuple[str, str],
    metadata: dict[str, str],
    size: int,
) -> None:
    """Outputs the scores for any features; they depend on these by a factor of 0."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=1),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Add", ["scores", "nothing"], [names[0]]),
        helper.make_node("Mul", ["x_lens", "no_frames"], ["none"]),
        helper.make_node("Add", ["none", "frames"], [names[1]]),
    ]
    constants = {
        "zero": np.zeros((), dtype=np.float32),
        "scores": scores_NTV,
        "no_frames": np.zeros((), dtype=np.int64),
        "frames": np.array([scores_NTV.shape[1]]),
    }
    inputs = [("x", TensorProto.FLOAT, ["N", "T", 80]), ("x_lens", TensorProto.INT64, ["N"])]
    outputs = [
        (names[0], TensorProto.FLOAT, ["N", "U", size]),
        (names[1], TensorProto.INT64, ["N"]),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    _save(path, nodes, inputs, outputs, tensors, {**metadata, "vocab_size": str(size)})


def _write_decoder(path: Path, size: int) -> None:
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Cast", ["y"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["floats", "axis"], ["sum"], keepdims=1),
        helper.make_node("MatMul", ["sum", "zeros"], ["decoder_out"]),
    ]
    tensors = [
        numpy_helper.from_array(np.array([1]), "axis"),
        numpy_helper.from_array(np.zeros((1, size), dtype=np.float32), "zeros"),
    ]
    inputs = [("y", TensorProto.INT64, ["N", 2])]
    outputs = [("decoder_out", TensorProto.FLOAT, ["N", size])]
    metadata = {"vocab_size": str(size), "context_size": "2"}
    _save(path, nodes, inputs, outputs, tensors, metadata)


def _write_joiner(path: Path, size: int) -> None:
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Add", ["encoder_out", "decoder_out"], ["logit"])]
    inputs = [(name, TensorProto.FLOAT, ["N", size]) for name in ("encoder_out", "decoder_out")]
    outputs = [("logit", TensorProto.FLOAT, ["N", size])]
    _save(path, nodes, inputs, outputs, [], {"joiner_dim": str(size)})


def _save(
    path: Path,
    nodes: list[Any],
    inputs: list[tuple[str, int, list[Any]]],
    outputs: list[tuple[str, int, list[Any]]],
    tensors: list[Any],
    metadata: dict[str, str],
) -> None:
    import onnx
    from onnx import helper

    values = [[helper.make_tensor_value_info(*each) for each in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "spelling", *values, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"model_author": "tests", "version": "1", **metadata})
    onnx.save(model, path)


def sherpa_result(folder: Path, kind: str, audio: npt.NDArray[np.float32]) -> Any:
    """The result of sherpa-onnx itself, without recognise.py: text and tokens."""
    import sherpa_onnx

    tokens = str(folder / "tokens.txt")
    if kind == "ctc":
        recogniser = sherpa_onnx.OfflineRecognizer.from_zipformer_ctc(
            model=str(folder / "model.onnx"), tokens=tokens
        )
    elif kind == "transducer":
        files = {n: str(folder / f"{n}.onnx") for n in ("encoder", "decoder", "joiner")}
        recogniser = sherpa_onnx.OfflineRecognizer.from_transducer(**files, tokens=tokens)
    else:
        raise ExportError(f"no such kind: {kind}")
    stream = recogniser.create_stream()
    stream.accept_waveform(16000, audio)
    recogniser.decode_stream(stream)
    return stream.result
