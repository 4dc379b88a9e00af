"""Copies of ONNX files with weights of eight or four bits, or in half precision; and the layers
whose weights can be quantised, by the names of their modules.

Axes: K inputs and N outputs of a matrix product, B blocks of its inputs.
"""

from __future__ import annotations

import ast
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pruned_rnnt.model.quantisation import (
    INT4_BLOCK,
    INT4_LEVELS,
    INT8_LARGEST,
    LEAST_INPUTS,
    LEAST_WEIGHTS,
)

_SCOPES = "pkg.torch.onnx.name_scopes"
# Smaller weights are not worth a scale.
_LEAST_STORED = 256
# Which input of a node is the weight, and the axis that gets a scale for each of its rows.
_WEIGHT_INPUT = {"MatMul": 1, "Conv": 1, "Gather": 0}
_CHANNEL_AXIS = {"MatMul": 1, "Conv": 0, "Gather": 0}
# What models compute most in, besides tables of embeddings.
_LAYERS = {"Conv", "ConvTranspose", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "RNN"}

QuantisedPrecision = Literal["int8", "int4"]
QUANTISED: tuple[QuantisedPrecision, ...] = ("int8", "int4")
# Weights that are stored in eight bits, but computed with as float32.
_STORED_LARGEST = 127


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


def write_quantised(
    precision: QuantisedPrecision,
    source: Path,
    target: Path,
    keep: Collection[str] = (),
    *,
    as_float: bool = True,
) -> None:
    """Write a copy with integer weights; layers without a kernel have eight bits in the file alone.

    int8: matrix products of seven-bit weights, with a scale per column, and of inputs with a scale
    for each tensor. int4: matrix products of float inputs and four-bit weights, with a scale for
    each 32 inputs. Convolutions and embeddings have eight bits in the file and are float32 in
    memory, for which runtimes convert them when they load the file.

    Args:
        keep: names of layers that have higher precision, see `layers`.
        as_float: these are float32; otherwise their matrix products have eight bits in the file and
            are float32 in memory.
    """
    import onnx

    model = onnx.load(source)
    found = layers(model)
    chosen = [layer for layer in found if layer.name not in keep]
    for layer in found:
        if layer.name not in keep:
            has_eight_bits = layer.kind == "stored"
        else:
            has_eight_bits = layer.kind == "computed" and not as_float
        if has_eight_bits:
            _store_in_eight_bits(model, layer)
    computed = [layer.name for layer in chosen if layer.kind == "computed"]
    if computed and precision == "int8":
        _write_int8(model, target, computed)
        model = onnx.load(target)
    elif computed:
        model = _with_int4(model, computed)
    # Types of values that quantisation replaces, and that loading infers again.
    del model.graph.value_info[:]
    shorten_names(model)
    onnx.save(model, target)


def write_fp16(source: Path, target: Path) -> None:
    """Write a copy that computes in half precision, with float32 inputs and outputs.

    What comes before the first layers stays in float32: half precision has no exact angles of
    positions in long audio, and sums over many frames are beyond its range.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(source)
    kept = _before_layers(model.graph)
    model = convert_float_to_float16(model, keep_io_types=True, node_block_list=kept)
    # The converter rounds each value between two nodes that stay, too.
    rounded = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if _type_of_cast(node) == onnx.TensorProto.FLOAT16
    }
    for node in model.graph.node:
        if _type_of_cast(node) == onnx.TensorProto.FLOAT:
            node.input[0] = rounded.get(node.input[0], node.input[0])
    onnx.save(model, target)


def _before_layers(graph: Any) -> list[str]:
    """The names of the nodes that depend on no layer's output."""
    names = []
    later: set[str] = set()
    weights = {each.name for each in graph.initializer}
    for node in graph.node:
        is_layer = (
            node.op_type in _LAYERS
            or (node.op_type == "Gather" and node.input[0] in weights)
            # The nodes of conditions and loops may be layers.
            or any(each.HasField("g") for each in node.attribute)
        )
        if is_layer or not later.isdisjoint(node.input):
            later.update(node.output)
        elif node.name:
            names.append(node.name)
    return names


def _type_of_cast(node: Any) -> int | None:
    """The type that a Cast gives; None for other nodes."""
    if node.op_type != "Cast":
        return None
    return next(int(each.i) for each in node.attribute if each.name == "to")


def rounded_weight(precision: QuantisedPrecision, layer: Layer) -> npt.NDArray[np.float32]:
    """The float32 values of a layer's integer weight."""
    if layer.kind == "stored":
        integers, scales = _integers(layer, _STORED_LARGEST)
        return (integers * scales).astype(np.float32)
    if precision == "int8":
        integers, scales = _integers(layer, INT8_LARGEST)
        return (integers * scales).astype(np.float32)
    inputs, outputs = layer.values.shape
    padded_KN = np.pad(layer.values, ((0, -inputs % INT4_BLOCK), (0, 0)))
    blocks_BKN = padded_KN.reshape(-1, INT4_BLOCK, outputs)
    lowest_B1N = np.minimum(blocks_BKN.min(axis=1, keepdims=True), 0)
    scale_B1N = (np.maximum(blocks_BKN.max(axis=1, keepdims=True), 0) - lowest_B1N) / INT4_LEVELS
    scale_B1N[scale_B1N == 0] = 1
    zero_B1N = np.round(-lowest_B1N / scale_B1N)
    integers_BKN = np.clip(np.round(blocks_BKN / scale_B1N) + zero_B1N, 0, INT4_LEVELS)
    rounded_BKN = (integers_BKN - zero_B1N) * scale_B1N
    rounded_KN: npt.NDArray[np.float32] = rounded_BKN.reshape(-1, outputs)[:inputs]
    return rounded_KN.astype(np.float32)


def _integers(
    layer: Layer, largest: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Integers of a weight, and a scale for each of its channels."""
    others = tuple(axis for axis in range(layer.values.ndim) if axis != layer.channel_axis)
    scales = np.abs(layer.values).max(axis=others, keepdims=True) / largest
    scales = np.where(scales == 0, 1, scales).astype(np.float32)
    return np.round(layer.values / scales), scales


def _store_in_eight_bits(model: Any, layer: Layer) -> None:
    """Replace a float weight by integers times scales, constants that runtimes multiply once."""
    from onnx import TensorProto, helper, numpy_helper

    integers, scales = _integers(layer, _STORED_LARGEST)
    graph, name = model.graph, layer.weight
    (old,) = (each for each in graph.initializer if each.name == name)
    graph.initializer.remove(old)
    graph.initializer.extend(
        [
            numpy_helper.from_array(integers.astype(np.int8), f"{name}_int8"),
            numpy_helper.from_array(scales, f"{name}_scales"),
        ]
    )
    floats = f"{name}_float"
    graph.node.insert(0, helper.make_node("Mul", [floats, f"{name}_scales"], [name]))
    cast = helper.make_node("Cast", [f"{name}_int8"], [floats], to=TensorProto.FLOAT)
    graph.node.insert(0, cast)


def _write_int8(model: Any, target: Path, names: list[str]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _without_advice():
        quantize_dynamic(
            model,
            target,
            nodes_to_quantize=names,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )


def _with_int4(model: Any, names: list[str]) -> Any:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    others = [node.name for node in model.graph.node if node.name not in names]
    quantizer = MatMulNBitsQuantizer(
        model, bits=4, block_size=INT4_BLOCK, is_symmetric=False, nodes_to_exclude=others
    )
    with _without_advice():
        quantizer.process()
    return quantizer.model.model


@contextmanager
def _without_advice() -> Iterator[None]:
    """The quantisers recommend steps that have no effect here."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
