"""Files with weights of eight and four bits compute nearly the same, and are smaller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pruned_rnnt.export.precision import (
    QUANTISED,
    QuantisedPrecision,
    layers,
    rounded_weight,
    shorten_names,
    tidy,
    write_fp16,
    write_quantised,
)
from tests.export.matrix_models import relative_error, rows, run, write_model

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# Of outputs of three layers with random weights; measured 0.02 and 0.15.
TOLERANCE = {"int8": 0.05, "int4": 0.25}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file as `write_onnx` writes it."""
    path = tmp_path / "model.onnx"
    write_model(path)
    model = onnx.load(path)
    tidy(model)
    onnx.save(model, path)
    return path


def test_tidy_names_layers_and_keeps_outputs(tmp_path: Path, path: Path) -> None:
    write_model(tmp_path / "before.onnx")
    assert relative_error(run(path, rows()), run(tmp_path / "before.onnx", rows())) < 1e-5
    model = onnx.load(path)
    assert [(each.name, each.kind) for each in layers(model)] == [
        ("first", "computed"),
        ("second", "computed"),
        ("joiner.third", "computed"),
        ("conv", "stored"),
    ]
    assert not any(node.metadata_props for node in model.graph.node)


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_files(path: Path, precision: QuantisedPrecision) -> None:
    target = path.with_suffix(f".{precision}.onnx")
    write_quantised(precision, path, target)
    error = relative_error(run(target, rows()), run(path, rows()))
    assert 1e-4 < error < TOLERANCE[precision]
    assert path.stat().st_size / target.stat().st_size > (3 if precision == "int8" else 4.5)
    kinds = {node.op_type for node in onnx.load(target).graph.node}
    assert ("MatMulInteger" if precision == "int8" else "MatMulNBits") in kinds
    assert "MatMul" not in kinds
    metadata = {each.key: each.value for each in onnx.load(target).metadata_props}
    assert metadata["model_type"] == "test"


@pytest.mark.parametrize("precision", QUANTISED)
def test_kept_layers_have_higher_precision(path: Path, precision: QuantisedPrecision) -> None:
    target = path.with_suffix(".kept.onnx")
    write_quantised(precision, path, target, ["second"])
    floats = [node.name for node in onnx.load(target).graph.node if node.op_type == "MatMul"]
    assert floats == ["second"]
    names = [layer.name for layer in layers(onnx.load(path))]
    write_quantised(precision, path, target, names)
    assert (run(target, rows()) == run(path, rows())).all()
    write_quantised(precision, path, target, names, as_float=False)
    # Matrix products have eight bits, the convolution is float32.
    assert 1e-4 < relative_error(run(target, rows()), run(path, rows())) < 0.01
    assert path.stat().st_size / target.stat().st_size > 3


def test_half_precision_keeps_positions_of_long_inputs(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 20]>
        positions (float[N, 64] x) => (float[N, 64] y) <int64 zero = {0}, int64 one = {1}>
        {
            counts = Shape <start = 0, end = 1> (x)
            count = Squeeze (counts)
            places = Range (zero, count, one)
            floats = Cast <to = 1> (places)
            column = Unsqueeze (floats, one)
            angles = Mul (column, frequencies)
            sines = Sin (angles)
            products = MatMul (x, weight)
            y = Add (products, sines)
        }
        """
    )
    rng = np.random.default_rng(0)
    for name, shape in (("weight", (64, 64)), ("frequencies", (1, 64))):
        values = rng.random(shape, dtype=np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for node in model.graph.node:
        node.name = node.output[0]
    path, half = tmp_path / "model.onnx", tmp_path / "half.onnx"
    onnx.save(model, path)
    write_fp16(path, half)
    types = {each.name: each.data_type for each in onnx.load(half).graph.initializer}
    assert types["weight"] == onnx.TensorProto.FLOAT16
    for number in (50, 5000):
        assert 1e-5 < relative_error(run(half, rows(number)), run(path, rows(number))) < 1e-3


def test_short_names_change_no_output(tmp_path: Path, path: Path) -> None:
    """Inputs, outputs and layers keep their names, also where a short name is taken."""
    model = onnx.load(path)
    model.graph.input[0].name = "0"
    for node in model.graph.node:
        node.input[:] = ["0" if name == "x" else name for name in node.input]
    onnx.save(model, tmp_path / "long.onnx")
    shorten_names(model)
    onnx.save(model, tmp_path / "short.onnx")
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["0", "y"]
    assert [layer.name for layer in layers(model)] == ["first", "second", "joiner.third", "conv"]
    values = {name for node in model.graph.node for name in (*node.input, *node.output)}
    assert max(map(len, values)) <= 2
    assert {node.name for node in model.graph.node if node.op_type == "Relu"} == {""}
    outputs = [
        onnxruntime.InferenceSession(
            tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"]
        ).run(None, {"0": rows()})[0]
        for name in ("long", "short")
    ]
    assert (outputs[0] == outputs[1]).all()


def test_names_inside_of_conditions_stay_connected(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    branches (bool flag, float[2] x) => (float[2] y) {
        doubled = Add(x, x)
        y = If (flag) <
            then_branch = one () => (float[2] inside) { inside = Neg(doubled) },
            else_branch = two () => (float[2] inside) { inside = Identity(doubled) }
        >
    }"""
    model = onnx.parser.parse_model(text)
    shorten_names(model)
    onnx.checker.check_model(model)
    onnx.save(model, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    x = np.array([1, 2], dtype=np.float32)
    for flag, sign in ((True, -2), (False, 2)):
        assert (session.run(None, {"flag": np.array(flag), "x": x})[0] == sign * x).all()


def test_rounded_weight_is_that_of_the_file(path: Path) -> None:
    """A product with the identity shows the weight of four bits."""
    model = onnx.load(path)
    (weight,) = (layer for layer in layers(model) if layer.name == "first")
    target = path.with_suffix(".first.onnx")
    others = [layer.name for layer in layers(model) if layer.name != "first"]
    write_quantised("int4", path, target, others)
    (initialiser,) = (i for i in model.graph.initializer if i.name == weight.weight)
    rounded = rounded_weight("int4", weight)
    initialiser.CopyFrom(onnx.numpy_helper.from_array(rounded, weight.weight))
    expected = path.with_suffix(".expected.onnx")
    onnx.save(model, expected)
    identity = np.eye(64, dtype=np.float32)
    assert relative_error(run(target, identity), run(expected, identity)) < 1e-3
    assert relative_error(run(target, identity), run(path, identity)) > 5e-3
