"""ONNX models of two matrix products, a convolution and a linear layer, built by hand.

Axes: N rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH = 64


def write_model(path: Path, *, outlier: bool = False) -> None:
    """x (N, 64) -> y (N, 64): `first`, relu, `second`; `third` is a Gemm; `conv` a convolution.

    Args:
        outlier: `second` has one huge weight in each column, for an input that is always zero.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    first, second, third = (rng.standard_normal((WIDTH, WIDTH)) / 8 for _ in range(3))
    if outlier:
        first[:, 0] = 0
        second[0] = 1000
    weights = {
        "first_weight": first,
        "second_weight": second,
        "third_weight": third.T,
        "third_bias": rng.standard_normal(WIDTH),
        "conv_weight": rng.standard_normal((32, 1, 16)),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "first_weight"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "second_weight"], ["c"], name="second"),
        helper.make_node("Gemm", ["c", "third_weight", "third_bias"], ["d"], name="g", transB=1),
        helper.make_node("Unsqueeze", ["d", "one"], ["e"], name="unsqueeze"),
        helper.make_node("Conv", ["e", "conv_weight"], ["y"], name="conv", strides=[16]),
    ]
    note = nodes[3].metadata_props.add()
    note.key, note.value = "pkg.torch.onnx.name_scopes", "['', 'joiner', 'joiner.third', 'linear']"
    graph = helper.make_graph(
        nodes,
        "matrices",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32, 4])],
        [
            *(
                numpy_helper.from_array(value.astype(np.float32), name)
                for name, value in weights.items()
            ),
            numpy_helper.from_array(np.array([1]), "one"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {"model_type": "test"})
    onnx.save(model, path)


def run(path: Path, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The output of the file."""
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0], dtype=np.float64)


def relative_error(found: npt.NDArray[np.float64], exact: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def rows(number: int = 50) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((number, WIDTH)).astype(np.float32)
