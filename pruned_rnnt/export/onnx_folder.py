"""A folder that sherpa-onnx runs: ONNX files with metadata, tokens and a script.

encoder.onnx decoder.onnx joiner.onnx     and optionally NAME.int8.onnx, .int4, .fp16;
model.onnx                                instead of them: of a model of a CTC head alone
tokens.txt tokens.model                   `SYMBOL ID` lines; SentencePiece model (for hotwords)
settings.json                             streaming or not, chunk, sample rate and more
recognise.py                              transcribes audio with the files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.word_times import FEATURE_SECONDS, frame_seconds
from pruned_rnnt.export.differences import check_predictor, differences
from pruned_rnnt.export.graphs import (
    Graph,
    decoder,
    joiner,
    offline_encoder,
    streaming_encoder,
    write_onnx,
)
from pruned_rnnt.export.model_file import ModelFile, check_tokens
from pruned_rnnt.export.nemo_graphs import (
    TdtEncoderGraph,
    check_tdt_export,
    decoder_and_joiner,
    has_nemo_layout,
    nemo_stream,
    tdt_encoder,
    tdt_metadata,
    tdt_tokens,
)
from pruned_rnnt.export.precision import (
    QUANTISED,
    QuantisedPrecision,
    write_fp16,
    write_quantised,
)
from pruned_rnnt.export.stream_sizes import stream_sizes, tail_seconds
from pruned_rnnt.export.streaming_graphs import StreamingEncoderGraph
from pruned_rnnt.licences.chain import Chain
from pruned_rnnt.model.conformer import Conformer
from pruned_rnnt.model.ensemble_encoder import has_encoder
from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel
from pruned_rnnt.model.transformers_encoder import TransformersEncoder
from pruned_rnnt.model.zipformer import Zipformer
from pruned_rnnt.system.optional_packages import ONNX_PACKAGES, require
from pruned_rnnt.system.usage_errors import ExportError

# Inputs of a graph by name.
Feeds = dict[str, npt.NDArray[Any]]

SETTINGS_NAME = "settings.json"
_RECOGNISE = Path(__file__).with_name("sherpa_script.py")
# sherpa-onnx's name of an encoder that is no Conformer, whose inputs and outputs any encoder has.
_OFFLINE_TYPE = "zipformer2"
# Its name of a whole CTC model, of any encoder.
_CTC_TYPE = "zipformer2_ctc"


@dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    """The files to write.

    streaming: the encoder takes one chunk and explicit state, instead of a whole utterance; for
        causal models.
    chunk, left: encoder frames of a chunk, and of its left context for attention. 0: as
        trained; for a model trained with unlimited left context, left is four chunks.
    int8, int4, fp16: also write files with weights of eight or four bits, or in half precision.
    """

    streaming: bool = False
    chunk: int = 0
    left: int = 0
    int8: bool = False
    int4: bool = False
    fp16: bool = False

    @property
    def quantised(self) -> tuple[QuantisedPrecision, ...]:
        return tuple(name for name in QUANTISED if getattr(self, name))

    @property
    def precisions(self) -> tuple[str, ...]:
        return ("fp32", *self.quantised, *(["fp16"] if self.fp16 else []))


def file_name(graph: str, precision: str) -> str:
    """For example encoder.onnx or encoder.int8.onnx."""
    return f"{graph}.onnx" if precision == "fp32" else f"{graph}.{precision}.onnx"


def encoder_graph(model: SpeechModel, options: OnnxOptions) -> Graph:
    """The encoder graph for these options; of a model of a CTC head alone, the whole model.

    Raises:
        ExportError: streaming for a model that is not causal or keeps no state, or for a CTC model
            of a Conformer; impossible sizes, half precision for a Zipformer, or a FastConformer.
    """
    if has_encoder(model.encoder, FastConformer):
        raise ExportError(
            "model.encoder.kind is fastconformer, which `export --format onnx` does not support "
            "with model.encoder.features=fbank: use --format torch, or export a model of "
            "model.encoder.features=nemo or of loss.durations"
        )
    if has_encoder(model.encoder, TransformersEncoder):
        raise ExportError(
            "model.encoder.kind is transformers, which `export --format onnx` does not support, as "
            "sherpa-onnx has no encoder that reads samples: use --format torch"
        )
    if options.fp16 and has_encoder(model.encoder, Zipformer):
        raise ExportError(
            "--fp16 does not work for a Zipformer: onnxruntime 1.31 crashes when it loads such "
            "files (layout of half-precision convolutions); use --int8, which is smaller and runs"
        )
    is_ctc = isinstance(model, CtcModel)
    if options.streaming and is_ctc and not isinstance(model.encoder, Zipformer):
        raise ExportError(
            "--streaming of a model of loss.kind=ctc needs model.encoder.kind=zipformer: "
            "sherpa-onnx cannot stream CTC models with another encoder"
        )
    sizes = _sizes(model, options)
    if sizes is None:
        return offline_encoder(model)
    if isinstance(model.encoder, Conformer) and model.encoder.config.kernel_size == 1:
        raise ExportError(
            "model.encoder.kernel_size is 1: streaming in sherpa-onnx needs at least 3"
        )
    return streaming_encoder(model, *sizes)


def _sizes(model: SpeechModel, options: OnnxOptions) -> tuple[int, int] | None:
    """Encoder frames of a chunk and of its left context; None for whole utterances."""
    if not options.streaming:
        if options.chunk or options.left:
            raise ExportError("--chunk and --left need --streaming")
        return None
    chunk, left = stream_sizes(model, options.chunk, options.left)
    if left < 1:
        raise ExportError(f"--left is {left}: sherpa-onnx needs at least 1")
    return chunk, left


def _nemo_encoder_graph(model: SpeechModel, options: OnnxOptions) -> Graph:
    """The encoder as sherpa-onnx runs it in NeMo's layout.

    Raises:
        ExportError: streaming for a model that is not causal or has durations; impossible sizes, or
            half precision.
    """
    check_tdt_export(model, streaming=options.streaming, fp16=options.fp16)
    sizes = _sizes(model, options)
    return tdt_encoder(model) if sizes is None else nemo_stream(model, *sizes)


def exported_graphs(model: SpeechModel, options: OnnxOptions) -> tuple[Graph, ...]:
    """Encoder, decoder and joiner of a transducer; one graph of a model of a CTC head alone.

    Raises:
        ExportError: as `encoder_graph`, or sherpa-onnx cannot run the predictor or stream a model
            with durations.
    """
    is_nemo = has_nemo_layout(model)
    encoder = _nemo_encoder_graph(model, options) if is_nemo else encoder_graph(model, options)
    if isinstance(model, CtcModel):
        return (encoder,)
    assert isinstance(model, TransducerModel)
    if model.config.encoder.features == "fbank":
        check_predictor(model)
    if is_nemo:
        return (encoder, *decoder_and_joiner(model))
    return (encoder, decoder(model), joiner(model))


def export_onnx(
    parts: ModelFile,
    folder: Path,
    options: OnnxOptions,
    source: str,
    decode: DecodeConfig | None = None,
) -> tuple[Graph, ...]:
    """Write the folder.

    Args:
        parts: with a model on the CPU, which is set to evaluation mode; without the calibration.
        source: name of the run and checkpoint for README and metadata, such as `fsdd, step 5000`.
        decode: configuration of the run; the README lists what sherpa-onnx decodes differently.

    Returns:
        The exported graphs.

    Raises:
        ExportError: as `exported_graphs`; or the tokenizer does not fit the model.
        MissingPackageError: a package of the `export` extra is not installed.
    """
    require(*ONNX_PACKAGES)
    check_tokens(parts)
    model, tokenizer, p99_duration, *_ = parts
    graphs = exported_graphs(model.eval(), options)
    settings = _settings(model, graphs[0], options, source)
    settings["p99_duration"] = p99_duration
    settings["languages"] = list(tokenizer.languages)
    settings["byte_tokens"] = tokenizer.has_bytes
    settings["differences"] = list(
        differences(model, decode or DecodeConfig(), streaming=options.streaming)
    )
    folder.mkdir(parents=True, exist_ok=True)
    for graph in graphs:
        path = folder / file_name(graph.name, "fp32")
        write_onnx(graph, path)
        add_metadata(path, {**_metadata(graph, model, source), **_licence_metadata(parts.chain)})
        for precision in options.quantised:
            write_quantised(precision, path, folder / file_name(graph.name, precision))
        if options.fp16:
            write_fp16(path, folder / file_name(graph.name, "fp16"))
    tokenizer.save(folder)
    if has_nemo_layout(model):
        (folder / "tokens.txt").write_text(tdt_tokens(tokenizer.symbols), encoding="utf-8")
    shutil.copyfile(_RECOGNISE, folder / "recognise.py")
    (folder / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return graphs


def _settings(
    model: SpeechModel, encoder: Graph, options: OnnxOptions, source: str
) -> dict[str, Any]:
    config = model.encoder.config
    settings: dict[str, Any] = {
        "source": source,
        "kind": _kind(model),
        "streaming": options.streaming,
        "precisions": list(options.precisions),
        "sample_rate": 16000,
        "feature_dim": config.num_mel_bins,
        "vocab_size": model.vocab_size,
        "shortest_seconds": round(model.encoder.receptive_field * FEATURE_SECONDS, 3),
    }
    if isinstance(encoder.module, StreamingEncoderGraph):
        stream = encoder.module.stream
        settings.update(
            model_type=encoder.module.layout,
            chunk_frames=stream.chunk_size,
            left_frames=stream.left_frames,
            chunk_seconds=round(stream.shift * FEATURE_SECONDS, 3),
            tail_seconds=tail_seconds(stream),
            trained_frames=list(config.stream_sizes),
        )
    else:
        settings["model_type"] = "transducer"
    if has_nemo_layout(model):
        settings["model_type"] = "nemo_transducer"
        settings["features"] = config.features
        settings["frame_ms"] = round(1000 * frame_seconds(model.encoder))
        settings["longest_duration"] = max(model.loss_config.durations, default=None)
    return settings


def _kind(model: SpeechModel) -> str:
    if isinstance(model, CtcModel):
        return "nemo_ctc" if has_nemo_layout(model) else "ctc"
    if model.loss_config.durations:
        return "tdt"
    return "nemo" if has_nemo_layout(model) else "transducer"


def _metadata(graph: Graph, model: SpeechModel, source: str) -> dict[str, str]:
    """The metadata that sherpa-onnx reads, and the origin of the file."""
    values: dict[str, Any] = {"model_author": "pruned_rnnt", "version": 1, "comment": source}
    if isinstance(graph.module, StreamingEncoderGraph):
        values.update(graph.module.metadata())
    elif isinstance(graph.module, TdtEncoderGraph):
        values.update(tdt_metadata(model))
    elif graph.name == "encoder":
        is_conformer = model.encoder.config.kind == "conformer"
        values["model_type"] = "conformer" if is_conformer else _OFFLINE_TYPE
    if isinstance(model, CtcModel) and not has_nemo_layout(model):
        values.update(model_type=_CTC_TYPE, vocab_size=model.vocab_size)
    elif isinstance(model, TransducerModel) and graph.name == "decoder":
        values["vocab_size"] = model.vocab_size
        values["context_size"] = model.predictor.context_size
    elif graph.name == "joiner":
        values["joiner_dim"] = model.config.joiner_dim
    return {key: str(value) for key, value in values.items()}


def _licence_metadata(chain: Chain | None) -> dict[str, str]:
    if chain is None:
        return {}
    return {"license": chain.licence, "license_chain": json.dumps(chain.to_dict())}


def add_metadata(path: Path, values: Mapping[str, str]) -> None:
    """Add metadata to an ONNX file; values of the same names are replaced."""
    import onnx

    model = onnx.load(path)
    old = {each.key: each.value for each in model.metadata_props}
    onnx.helper.set_model_props(model, {**old, **values})
    onnx.save(model, path)


def onnx_session(model: Path | bytes, threads: int = 0) -> Any:
    """An onnxruntime session of a file or its bytes on the CPU; 0 threads: onnxruntime decides."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
