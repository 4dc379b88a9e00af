"""Smaller copies of ONNX files: int8 weights, or half precision."""

from __future__ import annotations

import logging
from pathlib import Path


def write_int8(source: Path, target: Path) -> None:
    """Copy with int8 weights in matrix products, a scale for each column; all else stays float32.

    The decoder's embedding is looked up in int8 too.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    # The exporter notes float types for values which quantisation replaces.
    del model.graph.value_info[:]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # It recommends a pre-processing which changes nothing here.
    try:
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            # Seven bits: without VNNI instructions products of eight bits overflow their sums.
            reduce_range=True,
        )
    finally:
        root.setLevel(level)


def write_fp16(source: Path, target: Path) -> None:
    """Copy which stores and computes in half precision, with float32 inputs and outputs."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
