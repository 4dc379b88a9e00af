"""Check an exported folder: onnxruntime against torch, and sherpa-onnx against our search.

Axes: N batch, T feature frames, F mel bins, U symbols, H context size.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_file import open_audio, read_audio
from pruned_rnnt.data.audio.features import SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, WORD_START, Tokenizer
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.export.differences import SHERPA_MAX_NEMO_SYMBOLS
from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.nemo_graphs import (
    LstmDecoderGraph,
    StreamingNemoGraph,
    TdtDecoderGraph,
    TdtEncoderGraph,
    has_nemo_layout,
    has_normalised_features,
)
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME, file_name, onnx_session
from pruned_rnnt.export.streaming_graphs import StreamingEncoderGraph
from pruned_rnnt.export.tdt_features import has_floor, sherpa_features
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel
from pruned_rnnt.system.optional_packages import ONNX_PACKAGES, VERIFY_PACKAGES, require
from pruned_rnnt.system.usage_errors import ExportError

# For float32 outputs; a larger difference means that the graph computes something else.
TOLERANCE = 1e-3
_BYTE = re.compile(rb"<0x[0-9A-F]{2}>")


@torch.inference_mode()
def converted_features(encoder: Graph, feature_TF: Tensor) -> Tensor:
    """(T, F) features of sherpa-onnx after the conversion in the encoder's graph."""
    assert isinstance(encoder.module, TdtEncoderGraph | StreamingNemoGraph)
    converted_NTF: Tensor = encoder.module.features(feature_TF.T[None])
    return converted_NTF[0]


@dataclass(frozen=True)
class TextPair:
    """The texts of one audio file: from our greedy search, and from sherpa-onnx."""

    file: str
    ours: str
    exported: str


@dataclass(frozen=True)
class Verification:
    """Results of one precision.

    differences: largest absolute difference of each output from torch, by `FILE OUTPUT`.
    texts: of each audio file.
    own_features: for a TDT model, how many texts equal those of our search on the features of
        training, of which the exported ones are conversions; None for others.
    real_time_factor: seconds of computation per second of audio in sherpa-onnx, one thread.
    notes: recordings that were left out or changed, and why.
    """

    precision: str
    differences: dict[str, float]
    texts: tuple[TextPair, ...]
    real_time_factor: float
    own_features: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[TextPair, ...]:
        return tuple(pair for pair in self.texts if pair.ours != pair.exported)

    @property
    def exact(self) -> bool:
        """True if texts are equal, and outputs within float32 rounding."""
        return not self.differing and max(self.differences.values()) <= TOLERANCE

    def lines(self) -> Iterator[str]:
        """The report that is printed."""
        yield from self.notes
        for name, difference in self.differences.items():
            yield f"{name}: largest difference from torch {difference:.2g}"
        same = len(self.texts) - len(self.differing)
        yield (
            f"sherpa-onnx {self.precision}: {same} of {len(self.texts)} texts equal those of our "
            f"greedy search, real-time factor {self.real_time_factor:.4f}"
        )
        if self.own_features is not None:
            yield (
                "sherpa-onnx computes other features for such models: "
                f"{self.own_features} of {len(self.texts)} texts equal those of our greedy search "
                "on the features of training"
            )
        for pair in self.differing:
            yield f"  {pair.file}\n    ours:        {pair.ours}\n    sherpa-onnx: {pair.exported}"


def verify(
    model: SpeechModel,
    tokenizer: Tokenizer,
    graphs: Sequence[Graph],
    folder: Path,
    audio: Sequence[Path],
) -> list[Verification]:
    """Check each precision in the folder on audio files.

    Digital silence is left out: recognise.py does not decode it. Files of other rates are compared
    at 16 kHz, because sherpa-onnx has another resampler.

    Args:
        graphs: what `export_onnx` returned for the model.

    Raises:
        MissingPackageError: a package of the `export` extra is not installed.
        ExportError: sherpa-onnx failed, or all files are digital silence.
    """
    require(*ONNX_PACKAGES, *VERIFY_PACKAGES)
    settings = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
    read = [(path, read_audio(path)) for path in audio]
    notes = [
        f"{path}: left out, because it is digital silence, which recognise.py does not decode"
        for path, samples_S in read
        if not samples_S.any()
    ]
    read = [(path, samples_S) for path, samples_S in read if samples_S.any()]
    if not read:
        raise ExportError(
            f"cannot verify {folder}: all audio files ({', '.join(map(str, audio))}) are digital "
            "silence, which recognise.py does not decode: pass recordings of speech"
        )
    audio = [path for path, _ in read]
    samples = [_padded(samples_S, settings) for _, samples_S in read]
    if tail := settings.get("tail_seconds", 0):
        notes.append(
            f"{tail:g} s of quiet noise are appended to each recording, as recognise.py does "
            "(tail_seconds in settings.json); transcribe and decode append none"
        )
    kind = FeatureKind.of_encoder(model.config.encoder)
    features = [kind.of_recording(samples_S) for samples_S in samples]
    # sherpa-onnx emits <unk> of CTC models.
    is_silent = isinstance(model, TransducerModel) and model.vocab_size > UNKNOWN_ID
    silent = [UNKNOWN_ID] if is_silent else []
    ours = [_recognise(model, graphs[0], feature_TF, silent) for feature_TF in features]
    texts = own_texts = [_text(tokenizer, symbols) for symbols in ours]
    is_nemo = has_nemo_layout(model)
    if is_nemo:
        floor = has_floor(is_normalised=has_normalised_features(model))
        as_nemo = isinstance(model, CtcModel) or settings["streaming"]
        features = [
            sherpa_features(samples_S, kind.num_mel_bins, as_nemo=as_nemo, has_floor=floor)
            for samples_S in samples
        ]
        converted = [converted_features(graphs[0], feature_TF) for feature_TF in features]
        ours = [_recognise(model, graphs[0], feature_TF, silent) for feature_TF in converted]
        texts = [_text(tokenizer, symbols) for symbols in ours]
    with tempfile.TemporaryDirectory() as temporary:
        at_16_khz = []
        for index, (path, samples_S) in enumerate(read):
            with open_audio(path) as file:
                rate = file.sampling_rate
            if rate != SAMPLING_RATE:
                notes.append(
                    f"{path}: compared at 16 kHz; for its {rate:,} Hz, recognise.py uses the "
                    "resampler of sherpa-onnx, so that its text may be another"
                )
                path = _written(Path(temporary) / f"{index}.wav", samples_S)
            at_16_khz.append(path)
        recognised_by = {
            precision: run_recognise(folder, at_16_khz, precision)
            for precision in settings["precisions"]
        }
    results = []
    for precision, recognised in recognised_by.items():
        results.append(
            Verification(
                precision=precision,
                differences=_differences(graphs, folder, precision, features, ours),
                texts=tuple(
                    TextPair(str(path), text, " ".join(line["text"].split()))
                    for path, text, line in zip(audio, texts, recognised, strict=True)
                ),
                real_time_factor=sum(line["elapsed_seconds"] for line in recognised)
                / sum(line["audio_seconds"] for line in recognised),
                own_features=sum(
                    text == " ".join(line["text"].split())
                    for text, line in zip(own_texts, recognised, strict=True)
                )
                if is_nemo
                else None,
                notes=tuple(notes),
            )
        )
    return results


def run_recognise(
    folder: Path,
    audio: Sequence[Path],
    precision: str = "fp32",
    method: str = "greedy_search",
    threads: int = 1,
) -> list[dict[str, Any]]:
    """Run the folder's recognise.py; returns the dictionary that it prints for each file.

    It runs in another process, because sherpa-onnx exits the process on errors.

    Raises:
        ExportError: it failed; the message has the last line of its standard error.
    """
    command = [sys.executable, str(folder / "recognise.py"), *map(str, audio)]
    command += ["--precision", precision, "--method", method, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        messages = done.stderr.strip().splitlines() or ["no message"]
        raise ExportError(
            f"sherpa-onnx failed on {folder} ({precision}) with exit code {done.returncode}: "
            f"{messages[-1]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Pair:
    """A graph in torch and its file in onnxruntime, on the same inputs.

    largest: the largest difference of each output so far.
    """

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
            with np.errstate(invalid="ignore"):
                difference = np.abs(mine.numpy().astype(np.float64) - other)
            # `max` ignores NaN; infinities of one sign are equal, though their difference is NaN.
            difference = np.where(mine.numpy() == other, 0.0, difference)
            difference = np.nan_to_num(difference, nan=np.inf, posinf=np.inf)
            self.largest[name] = max(self.largest[name], float(difference.max(initial=0.0)))
        return outputs


def _written(path: Path, samples_S: FloatArray) -> Path:
    """A new wav file of floats at 16 kHz."""
    import soundfile

    soundfile.write(path, samples_S, SAMPLING_RATE, subtype="FLOAT")
    return path


def _padded(samples_S: FloatArray, settings: Mapping[str, Any]) -> FloatArray:
    """Samples padded as recognise.py does: silence if short, noise for streams."""
    missing = int(settings["shortest_seconds"] * SAMPLING_RATE) + 1 - len(samples_S)
    tail = int(settings.get("tail_seconds", 0) * SAMPLING_RATE)
    noise_S = (1e-3 * np.random.default_rng(0).standard_normal(tail)).astype(np.float32)
    silence_S = np.zeros(max(missing, 0), dtype=np.float32)
    return np.concatenate((samples_S, silence_S, noise_S))


def _text(tokenizer: Tokenizer, symbols: Sequence[int]) -> str:
    """Join symbols as sherpa-onnx does: with control symbols, which `Tokenizer.decode` drops.

    recognise.py removes language tags from its texts.
    """
    names, tags = tokenizer.symbols, set(tokenizer.languages.values())
    parts = [b" " if i in tags else names[i].encode() for i in symbols]
    if tokenizer.has_bytes:
        # Imported tokenizers have them anywhere.
        parts = [bytes.fromhex(p[3:5].decode()) if _BYTE.fullmatch(p) else p for p in parts]
    text = b"".join(parts).decode("utf-8", errors="ignore")
    return " ".join(text.replace(WORD_START, " ").split())


@torch.inference_mode()
def _recognise(
    model: SpeechModel, encoder: Graph, feature_TF: Tensor, silent: Sequence[int]
) -> tuple[int, ...]:
    """Symbols of our greedy search; for a stream, those of its full chunks."""
    is_rnnt_of_nemo = has_nemo_layout(model) and not model.loss_config.durations
    search = new_greedy_search(model, silent, SHERPA_MAX_NEMO_SYMBOLS if is_rnnt_of_nemo else 0)
    if not isinstance(encoder.module, StreamingEncoderGraph):
        encoded_NTE, frames = model.encode(feature_TF[None], torch.tensor([len(feature_TF)]))
        if isinstance(model, CtcModel) and has_nemo_layout(model):
            # sherpa-onnx leaves out a last frame with less audio than the others.
            frames = torch.tensor([len(feature_TF) // model.encoder.subsampling_factor])
        return search(encoded_NTE, frames)[0].symbols
    stream = encoder.module.stream
    decoder = StreamDecoder(model, search, stream.chunk_size, stream.left_frames)
    state, symbols = decoder.start(1), list[int]()
    for chunk_NTF in _chunks(encoder.module, feature_TF):
        state, found, _ = decoder.chunk(chunk_NTF, state)
        symbols += found.result()[0][0].part.symbols
    return tuple(symbols)


def _chunks(module: StreamingEncoderGraph, feature_TF: Tensor) -> Iterator[Tensor]:
    """Chunks (1, input_frames, F); sherpa-onnx runs one only if another frame follows it."""
    stream = module.stream
    for begin in range(0, len(feature_TF) - stream.input_frames, stream.shift):
        yield feature_TF[None, begin : begin + stream.input_frames]


def _differences(
    graphs: Sequence[Graph],
    folder: Path,
    precision: str,
    features: Sequence[Tensor],
    ours: Sequence[tuple[int, ...]],
) -> dict[str, float]:
    """The largest difference of each output over all files, chunks and contexts."""
    pairs = [Pair(graph, folder, precision) for graph in graphs]
    for feature_TF, symbols in zip(features, ours, strict=True):
        encoded = _compare_encoder(pairs[0], feature_TF)
        if len(pairs) == 1:
            continue
        _, decoder, joiner = pairs
        if isinstance(decoder.graph.module, TdtDecoderGraph | LstmDecoderGraph):
            _compare_nemo_search(decoder, joiner, encoded, symbols)
            continue
        encoded = encoded[0]
        predictor = decoder.graph.module.get_submodule("predictor")
        start: Tensor = predictor.start_context(1, torch.device("cpu"))  # type: ignore[operator]
        context_and_symbols_L = torch.cat((start[0], torch.tensor(symbols, dtype=torch.int64)))
        contexts_UH = context_and_symbols_L.unfold(0, start.size(1), 1).contiguous()
        predicted = decoder.run(contexts_UH)[0]
        nodes = min(len(encoded), len(predicted))
        joiner.run(encoded[:nodes], predicted[:nodes])
    return {
        f"{pair.file} {name}": pair.largest[name]
        for pair in pairs
        for name in pair.graph.output_names
    }


def _compare_encoder(encoder: Pair, feature_TF: Tensor) -> Tensor:
    """Run both encoders on one utterance; returns torch's output (N, T', J), or (N, J, T')."""
    module = encoder.graph.module
    if not isinstance(module, StreamingEncoderGraph):
        feature_NTF = feature_TF[None]
        if isinstance(module, TdtEncoderGraph):
            feature_NTF = feature_NTF.transpose(1, 2).contiguous()
        return encoder.run(feature_NTF, torch.tensor([len(feature_TF)]))[0]
    state, frames = module.start(1), []
    for chunk_NTF in _chunks(module, feature_TF):
        outputs = encoder.run(*module.inputs(chunk_NTF, state))
        state = module.advance(state, outputs)
        frames.append(outputs[0])
    return torch.cat(frames, dim=module.frame_axis)


def _compare_nemo_search(
    decoder: Pair, joiner: Pair, encoded_NJT: Tensor, symbols: Sequence[int]
) -> None:
    """Run both decoders and joiners of NeMo's layout on the symbols, which are ids in our order."""
    module = decoder.graph.module
    assert isinstance(module, TdtDecoderGraph | LstmDecoderGraph)
    layers, size = module.state_sizes
    states = [torch.zeros(layers, 1, size), torch.zeros(layers, 1, size)]
    blank = module.vocab_size - 1
    for step, symbol in enumerate([blank, *(symbol - 1 for symbol in symbols)]):
        target = torch.tensor([[symbol]], dtype=torch.int32)
        output_NJ1, _, *states = decoder.run(target, torch.ones(1, dtype=torch.int32), *states)
        frame = min(step, encoded_NJT.size(2) - 1)
        joiner.run(encoded_NJT[:, :, frame : frame + 1].contiguous(), output_NJ1)
