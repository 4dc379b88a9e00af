"""The layers of a graph, ranked by what changes if one of them alone is quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.export.precision import (
    QUANTISED,
    QuantisedPrecision,
    layers,
    rounded_weight,
    write_quantised,
)
from pruned_rnnt.quantise.measurements import layer_errors
from tests.export.matrix_models import relative_error, rows, run, write_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_layer_with_an_outlier_comes_first(tmp_path: Path, precision: QuantisedPrecision) -> None:
    path = tmp_path / "model.onnx"
    write_model(path, outlier=True)
    errors = layer_errors(path, precision, [{"x": rows(30)}, {"x": rows(20)}])
    assert next(iter(errors)) == "second"
    assert errors["second"] > 3 * errors["first"]


def write_rounded(precision: QuantisedPrecision, path: Path, target: Path, name: str) -> None:
    """Write a float32 copy with the rounded weight of a layer."""
    model = onnx.load(path)
    (layer,) = (each for each in layers(model) if each.name == name)
    (weight,) = (each for each in model.graph.initializer if each.name == layer.weight)
    rounded = rounded_weight(precision, layer)
    weight.CopyFrom(onnx.numpy_helper.from_array(rounded, layer.weight))
    onnx.save(model, target)


@pytest.mark.parametrize("precision", QUANTISED)
def test_errors_are_those_of_files_with_one_layer_quantised(
    tmp_path: Path, precision: QuantisedPrecision
) -> None:
    path, alone = tmp_path / "model.onnx", tmp_path / "alone.onnx"
    write_model(path)
    names = [layer.name for layer in layers(onnx.load(path))]
    errors = layer_errors(path, precision, [{"x": rows()}])
    assert sorted(errors) == sorted(names)
    for name in names:
        if precision == "int8":
            write_quantised(precision, path, alone, [other for other in names if other != name])
        else:  # whose other layers would have eight bits
            write_rounded(precision, path, alone, name)
        expected = relative_error(run(alone, rows()), run(path, rows()))
        assert errors[name] == pytest.approx(expected, rel=0.05)
