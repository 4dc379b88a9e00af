"""Measurements of quantised ONNX files: their errors on a prepared split, decoded by onnxruntime,
and the change of a graph's output when one of its layers alone is quantised.

For the latter, a copy of the graph, the probe, has both values of each weight, and an input
`quantised` (L) of booleans that chooses between them, so that one onnxruntime session measures all
layers, on inputs that the graph got while utterances were decoded.

Axes: L layers, N utterances, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.decode.scoring.error_rates import (
    ErrorCounts,
    SetErrors,
    Transcript,
    count_errors,
)
from pruned_rnnt.decode.scoring.significance import PairedDifference, paired_difference
from pruned_rnnt.export.nemo_graphs import NEVER
from pruned_rnnt.export.onnx_folder import Feeds, onnx_session
from pruned_rnnt.export.precision import Layer, QuantisedPrecision, layers, rounded_weight
from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser
from pruned_rnnt.transcribe.segments import SegmentConfig

# Runtimes decode an utterance once.
AS_SHERPA = SegmentConfig(lost_speech="ignore")
# Runs of a graph that are kept, evenly spread: between these numbers and twice as many. The
# decoder and the joiner run for one frame at a time; the state of a stream takes much memory.
_RUNS, _RUNS_OF_FRAMES = 12, 512
_FRAME_GRAPHS = ("decoder", "joiner")
# The input of a probe.
_FLAGS = "quantised"


class Utterance(NamedTuple):
    """audio: log-mel features (T, F) on the CPU, or samples (S,) at 16 kHz for models in NeMo's
    layout, whose files have other features."""

    id: str
    audio: Tensor | FloatArray
    text: str


class FileErrors(NamedTuple):
    """Errors of one precision: of the set, and of each utterance; unit: words or characters."""

    counts: ErrorCounts
    errors: tuple[int, ...]
    words: tuple[int, ...]
    unit: str = "words"

    def minus(self, other: FileErrors) -> PairedDifference:
        """This error rate minus that of another precision, by paired bootstrap."""
        return paired_difference(other.errors, self.errors, self.words)


def utterances(batches: Iterable[Batch], *, are_samples: bool = False) -> list[Utterance]:
    """The utterances of batches, without padding.

    Args:
        are_samples: the batches have rows of samples (`FeatureKind`).
    """

    def audio(rows: Tensor) -> Tensor | FloatArray:
        return rows.flatten().numpy() if are_samples else rows

    return [
        Utterance(name, audio(features_TF[:length].clone()), text)
        for batch in batches
        for name, features_TF, length, text in zip(
            batch.ids,
            batch.features_NTF.cpu(),
            batch.feature_lengths_N.tolist(),
            batch.texts,
            strict=True,
        )
        if name not in batch.repeats
    ]


def file_errors(folder: Path, precision: str, measured: Iterable[Utterance]) -> FileErrors:
    """Decode with the files of a precision by greedy search."""
    recogniser = OnnxRecogniser(folder, precision=precision, threads=1, segments=AS_SHERPA)
    return errors_of(
        Transcript(
            id=utterance.id,
            reference=tuple(utterance.text.split()),
            hypothesis=tuple(text_of(recogniser, utterance).split()),
        )
        for utterance in measured
    )


def text_of(recogniser: OnnxRecogniser, utterance: Utterance) -> str:
    """What a recogniser makes of an utterance."""
    (found,) = recogniser.transcribe_each([utterance.audio], words=False)
    if isinstance(found, Exception):
        raise found
    return found.text


def errors_of(transcripts: Iterable[Transcript]) -> FileErrors:
    """The errors of one precision in its transcripts, which are in words; counted in characters
    if the references are written without spaces."""
    transcripts = list(transcripts)
    unit = "words"
    if SetErrors.of(transcripts).metric("auto") == "cer":
        transcripts, unit = [transcript.characters() for transcript in transcripts], "characters"
    each = [count_errors([transcript]) for transcript in transcripts]
    return FileErrors(
        sum(each, ErrorCounts()),
        tuple(counts.errors for counts in each),
        tuple(counts.reference_words for counts in each),
        unit,
    )


class _SpreadRuns:
    """Keeps every second, fourth and so on of the runs, so that their number is bounded."""

    def __init__(self, least: int) -> None:
        self.kept: list[Feeds] = []
        self._least, self._stride, self._seen = least, 1, 0

    def add(self, feeds: Feeds) -> None:
        if self._seen % self._stride == 0:
            self.kept.append(feeds)
        self._seen += 1
        if len(self.kept) == 2 * self._least:
            self.kept = self.kept[::2]
            self._stride *= 2


def recorded_runs(folder: Path, audio: Iterable[Utterance]) -> dict[str, list[Feeds]]:
    """Decode with the float32 files; the inputs of some runs of each graph, by its name.

    The inputs of the decoder and the joiner are joined to one batch.
    """
    found: dict[str, _SpreadRuns] = {}

    def keep(graph: str, feeds: Feeds) -> None:
        if graph not in found:
            found[graph] = _SpreadRuns(_RUNS_OF_FRAMES if graph in _FRAME_GRAPHS else _RUNS)
        found[graph].add(feeds)

    recogniser = OnnxRecogniser(folder, threads=1, on_run=keep, segments=AS_SHERPA)
    for utterance in audio:
        text_of(recogniser, utterance)
    return {
        graph: [_joined(runs.kept)] if graph in _FRAME_GRAPHS else runs.kept
        for graph, runs in found.items()
    }


def _joined(runs: list[Feeds]) -> Feeds:
    return {
        # The states of models in NeMo's layout have the batch as their second axis.
        name: np.concatenate([feeds[name] for feeds in runs], axis=int(name.startswith("states.")))
        for name in runs[0]
    }


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

    model = onnx.load(path)
    found = layers(model)
    _make_probe(model, found, precision)
    session = onnx_session(model.SerializeToString())

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
