"""The graphs of an exported model, and their export to ONNX and torch.

Axes: N batch or streams, T feature frames, F mel bins, T' encoder frames, E encoder width,
H context size, J joiner width, V vocabulary.

Inputs and outputs are bound by position, in the order that sherpa-onnx expects of transducers:

    encoder    x (N,T,F), x_lens (N)                   -> (N,T',J), lengths (N)
    encoder, streaming: see `streaming_graphs`
    decoder    y (N,H)                                 -> (N,J)
    joiner     encoder_out (N,J), decoder_out (N,J)    -> logits (N,V)

The projections to the joiner's width are part of encoder and decoder. A model of a CTC head alone
is one graph, `model`: the encoder with log-probabilities (N,T',V) as its output. Floats are
float32, all integers int64. Models with durations have other ONNX files, see `nemo_graphs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.export.precision import tidy
from pruned_rnnt.export.streaming_graphs import output_layer, streaming_graph
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from pruned_rnnt.system.usage_errors import ExportError

OPSET = 20
# Range of T that torch.export assumes; ONNX files accept any length of at least one encoder frame.
# The maximum is ten minutes: attention over more would not fit in memory.
MIN_FRAMES, MAX_FRAMES = 17, 60_000
# An ONNX file is one protobuf message, whose size is a signed integer of 32 bits.
_MOST_BYTES = 2**31 - 1


class OfflineEncoderGraph(nn.Module):
    """The encoder, for whole utterances."""

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.projection = output_layer(model)

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        encoded_NTE, lengths = self.encoder(x, x_lens)
        return self.projection(encoded_NTE), lengths


class DecoderGraph(nn.Module):
    """The predictor, for one context."""

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.predictor = model.predictor
        self.projection = model.joiner.decoder_proj

    def forward(self, y: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.predictor(y).squeeze(1))
        return projected


class JoinerGraph(nn.Module):
    """The joiner, for one frame and one context; with durations, their logits are a second output.

    sherpa-onnx applies a softmax to the output. For a HAT model the output is therefore
    log-probabilities, which a log-softmax leaves unchanged.
    """

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.joiner = model.joiner
        self.blank = model.predictor.blank
        self.hat = model.loss_config.hat

    def forward(self, encoder_out: Tensor, decoder_out: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.joiner.duration_linear is not None:
            with_durations: tuple[Tensor, Tensor] = self.joiner.with_durations(
                encoder_out, decoder_out
            )
            return with_durations
        logits: Tensor = self.joiner(encoder_out, decoder_out)
        return joint_log_probs(logits, self.blank, hat=True) if self.hat else logits


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A module with example inputs, and the names and dynamic axes of its inputs and outputs."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    dynamic_axes: tuple[Any, ...]


def offline_encoder(model: SpeechModel) -> Graph:
    batch = torch.export.Dim("N")
    frames = torch.export.Dim("T", min=MIN_FRAMES, max=MAX_FRAMES)
    name, output = _names(model)
    return Graph(
        name=name,
        module=OfflineEncoderGraph(model),
        inputs=(
            torch.zeros(2, 103, model.encoder.config.num_mel_bins),
            torch.tensor([103, 90]),
        ),
        input_names=("x", "x_lens"),
        output_names=(output, f"{output}_lens"),
        dynamic_axes=({0: batch, 1: frames}, {0: batch}),
    )


def _names(model: SpeechModel) -> tuple[str, str]:
    """Of the encoder's graph and of its output."""
    is_ctc = isinstance(model, CtcModel)
    return ("model", "log_probs") if is_ctc else ("encoder", "encoder_out")


def streaming_encoder(model: SpeechModel, chunk_size: int, left_frames: int) -> Graph:
    streams = torch.export.Dim("N")
    module = streaming_graph(model, chunk_size, left_frames)
    bins = model.encoder.config.num_mel_bins
    name, output = _names(model)
    state_axes = tuple({axis: streams} for axis in module.stream_axes)
    return Graph(
        name=name,
        module=module,
        inputs=(torch.zeros(2, module.stream.input_frames, bins), *module.start(2)),
        input_names=("x", *module.state_names),
        output_names=(output, *module.next_names),
        dynamic_axes=({0: streams}, state_axes),
    )


def decoder(model: TransducerModel) -> Graph:
    batch = torch.export.Dim("N")
    _, (context_NH,) = model.predictor.start(2, torch.device("cpu"))
    return Graph(
        name="decoder",
        module=DecoderGraph(model),
        inputs=(context_NH,),
        input_names=("y",),
        output_names=("decoder_out",),
        dynamic_axes=({0: batch},),
    )


def joiner(model: TransducerModel) -> Graph:
    batch = torch.export.Dim("N")
    width = model.config.joiner_dim
    return Graph(
        name="joiner",
        module=JoinerGraph(model),
        inputs=(torch.zeros(2, width), torch.zeros(2, width)),
        input_names=("encoder_out", "decoder_out"),
        output_names=("logit", "duration_logit") if model.loss_config.durations else ("logit",),
        dynamic_axes=({0: batch}, {0: batch}),
    )


@contextmanager
def _one_line_errors(graph: Graph, advice: str = "") -> Iterator[None]:
    """Raise ExportError if torch cannot export a graph, as may be with encoders of one's own."""
    try:
        with warnings.catch_warnings():
            # Exporters warn about their own internals; what they cannot export raises an error.
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, ValueError) as error:
        cause = error.__cause__ or error
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise ExportError(
            f"torch cannot export the {graph.name} for any number of utterances and frames: "
            f"{reason}{advice}"
        ) from error


def export_program(graph: Graph) -> torch.export.ExportedProgram:
    """The graph as a `torch.export` program with the same inputs and dynamic axes.

    Raises:
        ExportError: torch cannot export its modules.
    """
    # With gradients, modules would be traced with their own backward passes.
    with torch.no_grad(), _one_line_errors(graph, "; --format onnx may be able to"):
        return torch.export.export(
            graph.module.eval(),
            graph.inputs,
            dynamic_shapes=graph.dynamic_axes,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def write_onnx(graph: Graph, path: Path) -> None:
    """Write the graph as one ONNX file, with nodes named after modules of the model.

    Raises:
        ExportError: torch cannot export its modules, or they have more than 2 GB of parameters.
    """
    import onnx

    values = (*graph.module.parameters(), *graph.module.buffers())
    size = sum(value.numel() * value.element_size() for value in values)
    if size > _MOST_BYTES:
        raise ExportError(
            f"the {graph.name} has {size / 1e9:.2f} GB of parameters, and an ONNX file can hold "
            f"{_MOST_BYTES / 1e9:.2f} GB: use --format torch"
        )

    with torch.inference_mode(), _one_line_errors(graph):
        program = torch.onnx.export(
            graph.module.eval(),
            graph.inputs,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(graph.input_names),
            output_names=list(graph.output_names),
            dynamic_shapes=graph.dynamic_axes,
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
    tidy(model)
    onnx.save(model, path)
