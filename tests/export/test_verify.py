"""`verify` compares what sherpa-onnx decodes: no digital silence, and other rates at 16 kHz."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pruned_rnnt.cli import export
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export import differences
from pruned_rnnt.export import verify as verification
from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.verify import Pair, TextPair, Verification, _text, verify
from pruned_rnnt.interop.nemo.symbols import symbols_of_json
from pruned_rnnt.system.usage_errors import ExportError
from tests.export.test_ctc_export import audio, corpus, make_model, tokenizer  # noqa: F401
from tests.tiny_models import tiny_conformer


@pytest.mark.slow
def test_silence_and_other_rates(
    tokenizer: Tokenizer,  # noqa: F811
    audio: list[Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    for name in ("onnx", "onnxruntime", "onnxscript", "sherpa_onnx"):
        pytest.importorskip(name)
    soundfile = pytest.importorskip("soundfile")
    # It emits symbols in silence too.
    model = make_model(tiny_conformer(), len(tokenizer))
    folder = tmp_path / "onnx"
    graphs = export_onnx(ModelFile(model, tokenizer), folder, OnnxOptions(), "random")
    silence, telephone = tmp_path / "silence.wav", tmp_path / "telephone.wav"
    soundfile.write(silence, np.zeros(16000, dtype=np.float32), 16000)
    noise = 0.2 * np.random.default_rng(0).standard_normal(16000)
    soundfile.write(telephone, noise * np.repeat([0.1, 1.0, 0.3, 0.7], 4000), 8000)
    (found,) = verify(model, tokenizer, graphs, folder, [silence, audio[0], telephone])
    assert found.exact, "\n".join(found.lines())
    assert [pair.file for pair in found.texts] == [str(audio[0]), str(telephone)]
    assert all(pair.ours for pair in found.texts)
    lines = list(found.lines())
    assert lines[0].startswith(f"{silence}: left out, because it is digital silence")
    assert lines[1].startswith(f"{telephone}: compared at 16 kHz; for its 8,000 Hz")
    with pytest.raises(ExportError, match=r"silence\.wav.* are digital silence"):
        verify(model, tokenizer, graphs, folder, [silence])


def test_texts_of_imported_byte_symbols() -> None:
    names = ["<unk>", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: index for index, name in enumerate(names)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    imported = symbols_of_json(json.dumps({"model": model}).encode()).tokenizer
    assert _text(imported, imported.encode("aöa a日")) == "aöa a日"


@pytest.mark.parametrize(
    ("offset", "values", "difference"),
    [
        (0.0, [1.0, -np.inf], 0.0),
        (0.5, [1.0, -np.inf], 0.5),
        (np.nan, [1.0, 2.0], np.inf),
        (0.0, [1.0, np.nan], np.inf),
        (np.inf, [1.0, 2.0], np.inf),
    ],
)
def test_nan_is_a_difference_and_equal_infinities_are_none(
    offset: float, values: list[float], difference: float, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, kind, [2]) for name in "xy")
    added = onnx.numpy_helper.from_array(np.array([offset], dtype=np.float32), "added")
    body = helper.make_graph([helper.make_node("Add", ["x", "added"], ["y"])], "m", [x], [y])
    body.initializer.append(added)
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(body, opset_imports=opset, ir_version=9), tmp_path / "m.onnx")
    pair = Pair(
        Graph(
            name="m",
            module=torch.nn.Identity(),
            inputs=(),
            input_names=("x",),
            output_names=("y",),
            dynamic_axes=(),
        ),
        tmp_path,
        "fp32",
    )
    pair.run(torch.tensor(values))
    pair.run(torch.zeros(2) if np.isfinite(offset) else torch.tensor(values))
    assert pair.largest == {"y": difference}


@pytest.mark.parametrize(
    ("other_texts", "exact", "line"),
    [
        ((), True, "verified"),
        (("int8",), True, "verified in fp32; int8 differ, as rounding may do: see above"),
        (("int8", "fp32"), False, "NOT VERIFIED: the exported model differs, see above"),
    ],
)
def test_differences_of_rounded_files_are_said_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other_texts: tuple[str, ...],
    exact: bool,
    line: str,
) -> None:
    results = [
        Verification(
            precision=precision,
            differences={"encoder.onnx encoder_out": 0.0},
            texts=(TextPair("a.wav", "two", "ten" if precision in other_texts else "two"),),
            real_time_factor=0.1,
        )
        for precision in ("fp32", "int8")
    ]
    monkeypatch.setattr(verification, "verify", lambda *_: results)
    monkeypatch.setattr(differences, "differences", lambda *_, **__: [])
    options: Any = SimpleNamespace(streaming=False, verify=[Path("a.wav")])
    parts: Any = SimpleNamespace(model=None, tokenizer=None)
    assert export._compare(options, parts, Path(), (), DecodeConfig()) is exact
    assert capsys.readouterr().out.splitlines()[-1] == line
