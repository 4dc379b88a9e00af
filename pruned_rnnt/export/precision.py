"""Copies of ONNX files with weights of eight or four bits, or in half precision.

Axes: K inputs and N outputs of a matrix product, B blocks of its inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pruned_rnnt.export.onnx_layers import Layer, layers, shorten_names
from pruned_rnnt.model.rounded_weights import INT4_BLOCK, INT4_LEVELS, INT8_LARGEST

QuantisedPrecision = Literal["int8", "int4"]
QUANTISED: tuple[QuantisedPrecision, ...] = ("int8", "int4")
# Weights that are stored in eight bits, but computed with as float32.
_STORED_LARGEST = 127


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
    """Write a copy that computes in half precision, with float32 inputs and outputs."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


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
