"""How much the output of a graph changes when one of its layers alone is quantised.

A copy of the graph, the probe, has both values of each weight, and an input `quantised` (L) of
booleans that chooses between them, so that one onnxruntime session measures every layer.

Axes: L layers, N utterances, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pruned_rnnt.export.onnx_layers import Layer, layers
from pruned_rnnt.export.precision import QuantisedPrecision, rounded_weight
from pruned_rnnt.export.tdt_graphs import NEVER
from pruned_rnnt.pretrained.onnx_recogniser import Feeds

_FLAGS = "quantised"


def layer_errors(
    path: Path, precision: QuantisedPrecision, inputs: Sequence[Feeds]
) -> dict[str, float]:
    """The relative error of a graph's first output for each layer that is quantised by itself.

    Args:
        path: of the float32 file.
        inputs: of several runs, from calibration audio.

    Returns:
        The norm of the change over the norm of the output, by layer, the largest first.
    """
    import onnx
    import onnxruntime

    model = onnx.load(path)
    found = layers(model)
    _make_probe(model, found, precision)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def outputs(flags_L: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.float64]]:
        found = [
            np.asarray(session.run(None, {**feeds, _FLAGS: flags_L})[0], dtype=np.float64)
            for feeds in inputs
        ]
        # These constants would hide the changes of other logits.
        return [np.where(each <= NEVER, 0.0, each) for each in found]

    exact = outputs(np.zeros(len(found), dtype=np.bool_))
    norm = sum(float(np.square(each).sum()) for each in exact) or 1.0
    errors = {}
    for place, layer in enumerate(found):
        flags_L = np.zeros(len(found), dtype=np.bool_)
        flags_L[place] = True
        changed = outputs(flags_L)
        squares = (
            float(np.square(other - one).sum()) for one, other in zip(exact, changed, strict=True)
        )
        errors[layer.name] = (sum(squares) / norm) ** 0.5
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def _make_probe(model: Any, found: Sequence[Layer], precision: QuantisedPrecision) -> None:
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    flags = helper.make_tensor_value_info(_FLAGS, TensorProto.BOOL, [len(found)])
    graph.input.append(flags)
    readers = {name: node for node in graph.node for name in node.input}
    nodes = []
    for place, layer in enumerate(found):
        index, flag, rounded = (f"probe_{kind}_{place}" for kind in ("index", "flag", "rounded"))
        chosen = f"probe_weight_{place}"
        graph.initializer.extend(
            [
                numpy_helper.from_array(np.array(place), index),
                numpy_helper.from_array(rounded_weight(precision, layer), rounded),
            ]
        )
        nodes.append(helper.make_node("Gather", [_FLAGS, index], [flag]))
        nodes.append(helper.make_node("Where", [flag, rounded, layer.weight], [chosen]))
        node = readers[layer.weight]
        for other in graph.node:
            for position, name in enumerate(other.input):
                if name == layer.weight:
                    other.input[position] = chosen
        if precision == "int8" and layer.kind == "computed":
            nodes += _rounded_input(node, flag, place)
    before = list(graph.node)
    del graph.node[:]
    # The weights first; the conversion of a node's input follows what computes this input.
    graph.node.extend(nodes + before)
    _sort(graph)


def _rounded_input(node: Any, flag: str, place: int) -> list[Any]:
    """Nodes that round the input of a matrix product to eight bits if the flag is set."""
    from onnx import helper

    source, integers, scale, zero, floats, chosen = (
        node.input[0],
        *(f"probe_{kind}_{place}" for kind in ("integers", "scale", "zero", "floats", "input")),
    )
    node.input[0] = chosen
    return [
        helper.make_node("DynamicQuantizeLinear", [source], [integers, scale, zero]),
        helper.make_node("DequantizeLinear", [integers, scale, zero], [floats]),
        helper.make_node("Where", [flag, floats, source], [chosen]),
    ]


def _sort(graph: Any) -> None:
    """Order nodes so that each follows those whose outputs it reads."""
    from graphlib import TopologicalSorter

    maker = {name: place for place, node in enumerate(graph.node) for name in node.output}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for place, node in enumerate(graph.node):
        names = [*node.input, *_read_inside(node)]
        sorter.add(place, *(maker[name] for name in names if name in maker))
    nodes = [graph.node[place] for place in sorter.static_order()]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _read_inside(node: Any) -> list[str]:
    """Names that the sub-graphs of a node read."""
    return [
        name
        for attribute in node.attribute
        if attribute.HasField("g")
        for inner in attribute.g.node
        for name in (*inner.input, *_read_inside(inner))
    ]
