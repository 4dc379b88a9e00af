"""A graph in torch beside its ONNX file, and how much their outputs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.onnx_folder import file_name


def onnx_session(path: Path, threads: int) -> Any:
    """An onnxruntime session of the file on the CPU; 0 threads: onnxruntime decides."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Pair:
    """A graph in torch and its file in onnxruntime, on the same inputs."""

    def __init__(self, graph: Graph, folder: Path, precision: str) -> None:
        self.graph = graph
        self.file = file_name(graph.name, precision)
        self.session = onnx_session(folder / self.file, torch.get_num_threads())
        self.largest = dict.fromkeys(graph.output_names, 0.0)

    @torch.inference_mode()
    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run both and record the largest differences; returns torch's outputs."""
        outputs = self.graph.module(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        feeds = {
            name: value.numpy() for name, value in zip(self.graph.input_names, inputs, strict=True)
        }
        names = self.graph.output_names
        for name, mine, other in zip(names, outputs, self.session.run(None, feeds), strict=True):
            difference = np.abs(mine.numpy().astype(np.float64) - other)
            self.largest[name] = max(self.largest[name], float(difference.max(initial=0.0)))
        return outputs
