"""Copies of ONNX files with int8 weights or in half precision."""

from __future__ import annotations

import logging
from pathlib import Path


def write_int8(source: Path, target: Path) -> None:
    """Write a copy whose matrix products and embeddings have int8 weights, with a scale per column.

    Everything else stays float32.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    # The exporter stores float types of values that quantisation replaces.
    del model.graph.value_info[:]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # It recommends a pre-processing step that has no effect here.
    try:
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            # Seven bits: without VNNI instructions, sums of eight-bit products overflow.
            reduce_range=True,
        )
    finally:
        root.setLevel(level)


def write_fp16(source: Path, target: Path) -> None:
    """Write a copy that computes in half precision, with float32 inputs and outputs."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
