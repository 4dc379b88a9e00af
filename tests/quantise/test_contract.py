"""Quantised files stay within a bound of the error rate, or are refused.

The files are real, of a graph built by hand; errors are counted by which of its layers a file has
in integers, because such a graph recognises nothing. `tests/export` measures trained models.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from pruned_rnnt.decode.scoring.error_rates import ErrorCounts
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME
from pruned_rnnt.export.precision import QUANTISED, QuantisedPrecision, tidy, write_quantised
from pruned_rnnt.export.readme import _quantised
from pruned_rnnt.quantise import contract
from pruned_rnnt.quantise.contract import Contract, MeasuredSet, QuantisedFiles
from pruned_rnnt.quantise.measurements import FileErrors, Utterance
from pruned_rnnt.system.usage_errors import ExportError
from tests.export.matrix_models import rows, write_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SET = MeasuredSet("calls dev", [Utterance("a", torch.zeros(9, 80), "one two")])
FP32_ERRORS, WORDS = 200, 2000


class Export:
    """A folder with quantised files, and the numbers of errors of each kind of file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.errors_of_layer: dict[str, int] = {}
        self.lines: list[str] = []
        write_model(folder / "encoder.onnx", outlier=True)
        model = onnx.load(folder / "encoder.onnx")
        tidy(model)
        onnx.save(model, folder / "encoder.onnx")
        for precision in QUANTISED:
            target = folder / f"encoder.{precision}.onnx"
            write_quantised(precision, folder / "encoder.onnx", target)
        (folder / SETTINGS_NAME).write_text('{"kind": "transducer"}')
        monkeypatch.setattr(contract, "file_errors", self.count)
        monkeypatch.setattr(contract, "recorded_runs", lambda *_: {"encoder": [{"x": rows(20)}]})

    def count(self, folder: Path, precision: str, _: object) -> FileErrors:
        name = "encoder.onnx" if precision == "fp32" else f"encoder.{precision}.onnx"
        floats = floats_of(folder / name)
        more = sum(n for layer, n in self.errors_of_layer.items() if layer not in floats)
        errors = FP32_ERRORS + more
        counts = ErrorCounts(substitutions=errors, reference_words=WORDS)
        half = errors // 2
        return FileErrors(counts, (half, errors - half), (WORDS // 2, WORDS // 2))

    def apply(self, precision: QuantisedPrecision, increase: float | None = None) -> QuantisedFiles:
        bound = Contract(calibration=SET, measured=SET, increase=increase, report=self.lines.append)
        (result,) = bound.apply(self.folder, [precision])
        return result


def floats_of(path: Path) -> Collection[str]:
    return {node.name for node in onnx.load(path).graph.node if node.op_type == "MatMul"}


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    return Export(tmp_path, monkeypatch)


@pytest.mark.parametrize(("precision", "allowed"), [("int8", 2), ("int4", 6)])
def test_files_within_the_default_bound_stay_as_they_are(
    export: Export, precision: QuantisedPrecision, allowed: int
) -> None:
    """1% of 200 errors for int8, 3% for int4."""
    export.errors_of_layer = {"first": allowed}
    result = export.apply(precision)
    assert result.kept == ()
    assert (result.errors, result.fp32_errors) == (200 + allowed, 200)
    assert result.difference == pytest.approx(allowed / WORDS)
    assert not export.lines
    assert not floats_of(export.folder / f"encoder.{precision}.onnx")
    export.errors_of_layer = {"second": allowed + 1}
    assert [layer.name for layer in export.apply(precision).kept] == ["second"]


@pytest.mark.parametrize("precision", QUANTISED)
def test_the_most_sensitive_layer_has_higher_precision(
    export: Export, precision: QuantisedPrecision
) -> None:
    export.errors_of_layer = {"second": 50, "first": 1}
    result = export.apply(precision)
    assert [(layer.graph, layer.name) for layer in result.kept] == [("encoder", "second")]
    assert floats_of(export.folder / f"encoder.{precision}.onnx") == {"second"}
    assert result.errors == 201
    smaller = result.fp32_bytes / result.bytes
    assert 1 < smaller < 4 if precision == "int8" else 4 < smaller < 5.5
    assert any(
        "251 errors with 0 layers in higher precision, fp32 200" in line for line in export.lines
    )
    shown = "\n".join(result.lines())
    assert (
        f"{precision}: kept in higher precision: encoder second (quantised alone, it changes"
        in shown
    )
    stored = json.loads((export.folder / SETTINGS_NAME).read_text())
    assert stored["kind"] == "transducer"
    assert stored["quantisation"][precision]["kept"][0]["name"] == "second"
    metadata = onnx.load(export.folder / f"encoder.{precision}.onnx").metadata_props
    values = {each.key: each.value for each in metadata}
    assert json.loads(values["quantisation"])["fp32_errors"] == 200
    assert values["model_type"] == "test"


def test_refused_if_too_few_layers_remain(export: Export) -> None:
    """Two of the four layers are more than half of the weights."""
    export.errors_of_layer = {"first": 50}
    with pytest.raises(ExportError, match=r"raises the error rate on calls dev from 10\.00% to"):
        export.apply("int8")
    assert "quantisation" not in json.loads((export.folder / SETTINGS_NAME).read_text())
    assert export.apply("int8", increase=0.25).errors == 250


def test_a_bound_below_one_error_is_said(export: Export) -> None:
    assert not any("one error more" in line for line in export.apply("int8").lines())
    lines = list(export.apply("int8", increase=0.004).lines())
    assert any("one error more than fp32 is already above the bound" in line for line in lines)


def test_nothing_to_measure_is_refused(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "file_errors", lambda *_: FileErrors(ErrorCounts(), (0,), (0,)))
    with pytest.raises(ExportError, match="--measure: calls dev has no words"):
        export.apply("int8")


def test_a_model_that_recognises_nothing_is_refused(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = ErrorCounts(deletions=9, reference_words=10)
    monkeypatch.setattr(contract, "file_errors", lambda *_: FileErrors(counts, (9,), (10,)))
    with pytest.raises(ExportError, match="make 9 errors in 10 words of calls dev"):
        export.apply("int8")


def test_the_unit_of_the_errors_is_named(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    found = export.count(export.folder, "fp32", None)._replace(unit="characters")
    monkeypatch.setattr(contract, "file_errors", lambda *_: found)
    result = export.apply("int8")
    assert f"errors in {WORDS} characters of calls dev" in next(iter(result.lines()))
    results = json.loads((export.folder / SETTINGS_NAME).read_text())["quantisation"]
    assert f"| {WORDS:,} characters |" in _quantised(["int8"], results)
