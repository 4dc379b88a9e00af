"""A model for PyTorch: one file for this package, and `torch.export` programs that run without it.

model.pt                               for `pruned_rnnt.load`
encoder.pt2 decoder.pt2 joiner.pt2     for `torch.export.load`; the graphs of the ONNX files, but
                                       no decoder if the predictor is recurrent; model.pt2 alone
                                       for a model of a CTC head alone; none for a FastConformer and
                                       an encoder of the transformers library
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from pruned_rnnt.export.graphs import decoder, export_program, joiner
from pruned_rnnt.export.model_file import FILE_NAME, ModelFile, save_model
from pruned_rnnt.export.onnx_folder import OnnxOptions, encoder_graph
from pruned_rnnt.export.stream_sizes import stream_sizes
from pruned_rnnt.model.ensemble_encoder import has_encoder
from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.transformers_encoder import TransformersEncoder
from pruned_rnnt.system.usage_errors import ExportError


def export_torch(parts: ModelFile, folder: Path, options: OnnxOptions, source: str) -> None:
    """Write the folder; arguments and errors as for `export_onnx`, but without precisions.

    Raises:
        ExportError: also for a left context that is not a multiple of the chunk.
    """
    model = parts.model
    if has_encoder(model.encoder, FastConformer, TransformersEncoder):
        if options.streaming or options.chunk or options.left:
            raise ExportError(
                f"model.encoder.kind is {model.config.encoder.kind}, of which --format torch "
                "writes model.pt alone: leave out --streaming, --chunk and --left"
            )
        save_model(parts, folder / FILE_NAME, source)
        return  # there is no graph of these encoders by itself
    encoder = encoder_graph(model.eval(), options)
    if options.streaming:
        chunk, left = stream_sizes(model, options.chunk, options.left)
        if options.left and left % chunk:
            raise ExportError(
                f"--left is {left}, but --format torch needs a multiple of the chunk of {chunk} "
                "frames, because model.pt decodes files, too"
            )
        parts = parts._replace(stream_sizes=(options.chunk, options.left))
    save_model(parts, folder / FILE_NAME, source)
    graphs = [encoder]
    if isinstance(model, TransducerModel):
        graphs.append(joiner(model))
        if isinstance(model.predictor, StatelessPredictor):
            graphs.append(decoder(model))
    for graph in graphs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.export.save(export_program(graph), folder / f"{graph.name}.pt2")
