"""The layers of an ONNX graph whose weights can be quantised, by the names of their modules.

Axes: K inputs and N outputs of a matrix product.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pruned_rnnt.model.rounded_weights import LEAST_INPUTS, LEAST_WEIGHTS

_SCOPES = "pkg.torch.onnx.name_scopes"
# Smaller weights are not worth a scale.
_LEAST_STORED = 256
# Which input of a node is the weight, and the axis that gets a scale for each of its rows.
_WEIGHT_INPUT = {"MatMul": 1, "Conv": 1, "Gather": 0}
_CHANNEL_AXIS = {"MatMul": 1, "Conv": 0, "Gather": 0}


class Layer(NamedTuple):
    """A node with a constant weight.

    name: of the node: that of its module, such as `encoder.layers.0.feedforward_in.3`.
    weight: name of the initialiser.
    values: the weight.
    channel_axis: of the weight, with a scale for each index.
    kind: `computed`: a matrix product, which runtimes have in low precision; `stored`: another
        layer, of which only the file has weights of eight bits.
    """

    name: str
    weight: str
    values: npt.NDArray[np.float32]
    channel_axis: int
    kind: Literal["computed", "stored"]


def layers(model: Any) -> list[Layer]:
    """The layers of a model (`onnx.ModelProto`) in their order; a shared weight counts once."""
    from onnx import numpy_helper

    weights = {each.name: each for each in model.graph.initializer}
    found: dict[str, Layer] = {}
    for node in model.graph.node:
        place = _WEIGHT_INPUT.get(node.op_type)
        name = "" if place is None else node.input[place]
        if place is None or name in found or name not in weights or node.domain:
            continue
        values = numpy_helper.to_array(weights[name])
        if values.dtype != np.float32 or values.ndim < 2 or values.size < _LEAST_STORED:
            continue
        is_computed = (
            node.op_type == "MatMul"
            and values.ndim == 2
            and values.size >= LEAST_WEIGHTS
            and len(values) >= LEAST_INPUTS
        )
        axis = values.ndim - 1 if node.op_type == "MatMul" else _CHANNEL_AXIS[node.op_type]
        kind: Literal["computed", "stored"] = "computed" if is_computed else "stored"
        found[name] = Layer(node.name, name, values, axis, kind)
    return list(found.values())


def tidy(model: Any) -> None:
    """Name nodes after their modules, drop the exporter's notes, and write Gemm as MatMul and Add.

    The notes and inferred types are up to a third of the file of a small model. Quantisation knows
    MatMul alone; onnxruntime joins MatMul and Add again.
    """
    graph = model.graph
    # The types are inferred again when the model is loaded.
    del graph.value_info[:]
    del graph.metadata_props[:]
    _name_by_module(graph)
    for each in _graphs(graph):
        for value in (*each.input, *each.output, *each.initializer):
            del value.metadata_props[:]
            value.doc_string = ""
        for node in each.node:
            del node.metadata_props[:]
            node.doc_string = ""
    _split_gemm(graph)


def shorten_names(model: Any) -> None:
    """Give values short names, and nodes none but those of `layers`.

    Quantisation makes many nodes, whose names are a twentieth of the file of a small model.
    """
    graph = model.graph
    kept = {"", *(value.name for value in (*graph.input, *graph.output))}
    unused = (name for name in map(str, count()) if name not in kept)
    short: defaultdict[str, str] = defaultdict(lambda: next(unused))

    def renamed(name: str) -> str:
        return name if name in kept else short[name]

    for each in _graphs(graph):
        for value in (*each.input, *each.output, *each.initializer):
            value.name = renamed(value.name)
        for node in each.node:
            node.input[:] = [renamed(name) for name in node.input]
            node.output[:] = [renamed(name) for name in node.output]
            if node.op_type not in _WEIGHT_INPUT:
                node.name = ""


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those of its conditions and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _name_by_module(graph: Any) -> None:
    used = {node.name for node in graph.node}
    for node in graph.node:
        if node.op_type not in (*_WEIGHT_INPUT, "Gemm"):
            continue
        notes = {note.key: note.value for note in node.metadata_props}
        try:
            scopes = ast.literal_eval(notes.get(_SCOPES, "[]"))
        except (SyntaxError, ValueError):
            continue
        modules = [scope for scope in scopes[:-1] if scope]
        if not modules:
            continue
        name, number = modules[-1], 1
        while name in used:
            number += 1
            name = f"{modules[-1]}#{number}"
        used.add(name)
        node.name = name


def _split_gemm(graph: Any) -> None:
    from onnx import helper, numpy_helper

    weights = {each.name: each for each in graph.initializer}
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    nodes = []
    for node in graph.node:
        values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        plain = all(values.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        weight = node.input[1] if node.op_type == "Gemm" else ""
        if weight not in weights or values.get("transA", 0) or not plain or readers[weight] > 1:
            nodes.append(node)
            continue
        if values.get("transB", 0):
            matrix = np.ascontiguousarray(numpy_helper.to_array(weights[weight]).T)
            weights[weight].CopyFrom(numpy_helper.from_array(matrix, weight))
        has_bias = len(node.input) > 2
        product = f"{node.output[0]}_product" if has_bias else node.output[0]
        inputs = list(node.input[:2])
        nodes.append(helper.make_node("MatMul", inputs, [product], name=node.name))
        if has_bias:
            bias = [product, node.input[2]]
            nodes.append(helper.make_node("Add", bias, node.output, name=f"{node.name}_bias"))
    del graph.node[:]
    graph.node.extend(nodes)
