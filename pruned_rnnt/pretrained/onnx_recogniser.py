"""Transcribe with the ONNX files of `pruned-rnnt export`, run by onnxruntime.

The search is greedy as in sherpa-onnx, which runs the same files: with at most one symbol per
frame, but for the graphs of a TDT model or of one in NeMo's layout. Long audio is cut as with torch
models.

Axes: N = 1 utterance, T feature frames (T' after subsampling), F mel bins, J joiner width,
H context size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import (
    FBANK,
    FEATURE_DIM,
    SAMPLING_RATE,
    FeatureKind,
    audio_features,
)
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, as_floats
from pruned_rnnt.data.tokens.tokenizer import BLANK_ID, UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, pending_hypotheses
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import FEATURE_SECONDS
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME, Feeds, file_name, onnx_session
from pruned_rnnt.export.tdt_features import sherpa_features
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.pretrained.onnx_nemo_search import NemoSearch, most_probable
from pruned_rnnt.system.json_file import damaged, from_json, read_json
from pruned_rnnt.system.optional_packages import require
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.batch_input import BatchInput
from pruned_rnnt.transcribe.segments import SegmentConfig

_FloatArray = npt.NDArray[np.float32]
# The level of the noise that is appended to streams, as recognise.py of the folder does.
_TAIL_LEVEL = 1e-3
_KINDS = ("transducer", "ctc", "tdt", "nemo", "nemo_ctc")
_MOST_SECONDS = 1e5
_FEATURE_MS = round(1000 * FEATURE_SECONDS)


class _Settings(NamedTuple):
    """The values of settings.json that this module uses; times in seconds."""

    kind: str
    streaming: bool
    shortest_seconds: float
    tail_seconds: float = 0.0
    p99_duration: float | None = None
    feature_dim: int = FEATURE_DIM
    frame_ms: int = round(1000 * SUBSAMPLING_FACTOR * FEATURE_SECONDS)


class OnnxRecogniser(AudioRecogniser):
    """Transcribes with an exported folder; `model` is None.

    Args:
        folder: what `pruned-rnnt export --format onnx` wrote, also with `--streaming`.
        threads: of onnxruntime.
        precision: of the files: fp32, int8, int4 or fp16.
        on_run: gets the name of a graph and its inputs before each run.

    Raises:
        ExportError: files of the folder are missing or damaged.
        MissingPackageError: onnxruntime is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segments: SegmentConfig | None = None,
        threads: int = 0,
        precision: str = "fp32",
        on_run: Callable[[str, Feeds], None] | None = None,
    ) -> None:
        require("onnxruntime")
        try:
            tokenizer, settings = Tokenizer.load(folder), _read_settings(folder / SETTINGS_NAME)
        except (OSError, ValueError) as error:
            raise ExportError(f"{folder} is not a complete ONNX export: {error}") from error
        self._kind, self._streaming = settings.kind, settings.streaming
        self._mel_bins, self._frame_ms = settings.feature_dim, settings.frame_ms
        self._shortest = round(settings.shortest_seconds / FEATURE_SECONDS)
        self._tail = int(settings.tail_seconds * SAMPLING_RATE)
        super().__init__(tokenizer, settings.p99_duration, None, segments)
        is_ctc = self._kind in ("ctc", "nemo_ctc")

        def session(graph: str) -> _Session:
            return _Session(folder / file_name(graph, precision), graph, threads, on_run)

        self._reopen = partial(
            OnnxRecogniser, folder, segments=segments, threads=threads, precision=precision
        )
        self._encoder = session("model" if is_ctc else "encoder")
        if not self._has_nemo_layout and not self._streaming:
            self._encoder.check_inputs("x", "x_lens")
        if not is_ctc:
            self._decoder, self._joiner = session("decoder"), session("joiner")
        if self._kind == "transducer":
            self._context_size = self._decoder.number("context_size")
            self._decoder.check_symbols(self._decoder.metadata.get("vocab_size"), len(tokenizer))
            self._joiner.check_symbols(self._joiner.output_width, len(tokenizer))
        if self._has_nemo_layout and not is_ctc:
            number = self._encoder.number
            self._nemo = NemoSearch(
                decoder=self._decoder.run,
                joiner=self._joiner.run,
                state_sizes=(number("pred_rnn_layers"), number("pred_hidden")),
                vocab_size=number("vocab_size") + 1,
                has_durations=self._kind == "tdt",
            )

    def __reduce__(self) -> tuple[Callable[[], OnnxRecogniser], tuple[()]]:
        """Sessions of onnxruntime cannot be copied: a copy opens the folder again."""
        return self._reopen, ()

    @property
    def _has_nemo_layout(self) -> bool:
        """Whether the encoder reads the features that sherpa-onnx computes for models of NeMo."""
        return self._kind in ("tdt", "nemo", "nemo_ctc")

    @property
    def _feature_kind(self) -> FeatureKind:
        return FeatureKind("samples") if self._has_nemo_layout else FBANK

    @property
    def _frame_step(self) -> int:
        return self._frame_ms // _FEATURE_MS

    def _best_paths(
        self, batch: BatchInput, with_heads: bool
    ) -> Generator[None, None, list[tuple[Hypothesis, HeadPath | None]]]:
        yield from ()
        if self._has_nemo_layout:
            paths = [self._best_nemo_path(samples_S) for samples_S in batch.samples]
        else:
            lengths = batch.lengths_N.tolist()
            paths = [
                self._best_path(features_TF[:length])
                for features_TF, length in zip(batch.features_NTF, lengths, strict=True)
            ]
        return [(path, None) for path in paths]

    @property
    def _least_frames(self) -> int:
        # The features of sherpa-onnx may be a frame shorter.
        return self._shortest + int(self._has_nemo_layout)

    def _best_nemo_path(self, samples_S: FloatArray | Pcm16Array) -> Hypothesis:
        is_ctc = self._kind == "nemo_ctc"
        is_normalised = self._encoder.value("normalize_type") == "per_feature"
        floats_S = as_floats(samples_S)
        if self._streaming:
            floats_S = np.concatenate((floats_S, self._noise()))
        features_TF = sherpa_features(
            floats_S,
            self._mel_bins,
            as_nemo=is_ctc or self._streaming,
            has_floor=not is_normalised,
        )
        encoded_JT = self._stream(features_TF) if self._streaming else self._encode(features_TF)
        if is_ctc:
            # The blank is the last symbol there.
            return _hypothesis(*self._ctc(np.roll(encoded_JT, 1, axis=1)))
        return self._nemo.best_path(encoded_JT)

    def _best_path(self, features_TF: Tensor) -> Hypothesis:
        if self._streaming:
            features_TF = torch.cat((features_TF, audio_features(self._noise())))
            encoded_TJ = self._stream(features_TF)
        else:
            encoded_TJ = self._encode(features_TF)
        search = self._ctc if self._kind == "ctc" else self._transducer
        return _hypothesis(*search(encoded_TJ))

    def _encode(self, features_TF: Tensor) -> _FloatArray:
        """Encoder output (T', J); (J, T') of a transducer in NeMo's layout."""
        lengths_N = np.array([len(features_TF)])
        feeds = {"x": features_TF[None].numpy(), "x_lens": lengths_N}
        if self._has_nemo_layout:
            feeds = {"audio_signal": features_TF.T[None].numpy(), "length": lengths_N}
        output: _FloatArray = self._encoder.run(feeds)[0][0]
        return output

    def _noise(self) -> FloatArray:
        """What follows the end of a stream (S,)."""
        noise_S = _TAIL_LEVEL * np.random.default_rng(0).standard_normal(self._tail)
        return noise_S.astype(np.float32)

    def _stream(self, features_TF: Tensor) -> _FloatArray:
        """As `_encode`, of the chunks of a stream."""
        is_nemo = self._has_nemo_layout
        first, *states = self._encoder.inputs[:1] + self._encoder.inputs[1 + is_nemo :]
        size = first.shape[2 if is_nemo else 1]
        shift = self._encoder.number("chunk_shift" if is_nemo else "decode_chunk_len")
        state = {
            node.name: np.zeros(
                [1 if isinstance(axis, str) else axis for axis in node.shape],
                dtype=np.int64 if node.type == "tensor(int64)" else np.float32,
            )
            for node in states
        }
        parts = []
        for begin in range(0, max(1, len(features_TF) - size), shift):
            chunk_TF = features_TF[begin : begin + size].numpy()
            chunk_TF = np.pad(chunk_TF, ((0, size - len(chunk_TF)), (0, 0)), "edge")
            feeds: Feeds = {"x": chunk_TF[None]}
            if is_nemo:
                feeds = {"audio_signal": chunk_TF.T[None], "length": np.array([size])}
            outputs = self._encoder.run({**feeds, **state})
            parts.append(outputs[0][0])
            new_state = dict(zip(state, outputs[1 + is_nemo :], strict=False))
            if len(new_state) < len(state):  # the layout `conformer` leaves the count to the caller
                new_state["processed_lens"] = state["processed_lens"] + shift
            state = new_state
        return np.concatenate(parts, axis=1 if is_nemo and self._kind != "nemo_ctc" else 0)

    def _transducer(self, encoded_TJ: _FloatArray) -> tuple[npt.NDArray[np.int64], _FloatArray]:
        """The symbol of each frame, -1 for none, and its log-probability or that of blank."""
        context = [-1] * (self._context_size - 1) + [BLANK_ID]
        symbols_T = np.full(len(encoded_TJ), -1, dtype=np.int64)
        scores_T = np.zeros(len(encoded_TJ), dtype=np.float32)
        predicted_NJ = self._predict(context)
        for t, frame_J in enumerate(encoded_TJ):
            (logits_NV,) = self._joiner.run(
                {"encoder_out": frame_J[None], "decoder_out": predicted_NJ}
            )
            symbol, scores_T[t] = most_probable(logits_NV[0])
            if symbol not in (BLANK_ID, UNKNOWN_ID):
                symbols_T[t] = symbol
                context = [*context[1:], symbol]
                predicted_NJ = self._predict(context)
        return symbols_T, scores_T

    def _predict(self, context: list[int]) -> _FloatArray:
        output: _FloatArray = self._decoder.run({"y": np.array([context])})[0]
        return output

    def _ctc(self, log_probs_TV: _FloatArray) -> tuple[npt.NDArray[np.int64], _FloatArray]:
        """As `_transducer`, for a CTC head: a run of frames with one symbol emits it once."""
        best_T = log_probs_TV.argmax(axis=1)
        scores_T = log_probs_TV[np.arange(len(best_T)), best_T]
        best_T = np.where(best_T == UNKNOWN_ID, BLANK_ID, best_T)
        before_T = np.concatenate(([BLANK_ID], best_T[:-1]))
        emits_T = (best_T != BLANK_ID) & (best_T != before_T)
        return np.where(emits_T, best_T, -1), scores_T


def _hypothesis(symbols_T: npt.NDArray[np.int64], scores_T: _FloatArray) -> Hypothesis:
    """Of the symbol of each frame, -1 for none, and its log-probability."""
    frames = GreedyFrames(
        torch.from_numpy(symbols_T)[None, :, None], torch.from_numpy(scores_T)[None, :, None]
    )
    (found,) = pending_hypotheses(frames).result()
    return found


def _read_settings(path: Path) -> _Settings:
    values = read_json(path)
    try:
        found = from_json(_Settings, values)
    except TypeError as error:
        raise damaged(path, error) from error
    if found.kind not in _KINDS:
        raise damaged(path, f"kind is {ascii(found.kind)[:50]}, needs one of {', '.join(_KINDS)}")
    for name in ("shortest_seconds", "tail_seconds", "p99_duration"):
        seconds = getattr(found, name)
        if seconds is not None and not 0 <= seconds <= _MOST_SECONDS:
            raise damaged(path, f"{name} is {seconds}, needs 0 to {_MOST_SECONDS:g}")
    if found.frame_ms < _FEATURE_MS or found.feature_dim < 1:
        raise damaged(
            path,
            f"frame_ms is {found.frame_ms} and feature_dim {found.feature_dim}, need at least "
            f"{_FEATURE_MS} and 1",
        )
    if found.p99_duration == 0:
        raise damaged(path, "p99_duration is 0, needs more")
    return found


class _Session:
    """A graph in onnxruntime.

    Attributes:
        path: of the file.
        inputs: onnxruntime's descriptions of its inputs.
        metadata: of the file.

    Raises:
        ExportError: the file is missing or damaged.
    """

    def __init__(
        self,
        path: Path,
        graph: str,
        threads: int,
        on_run: Callable[[str, Feeds], None] | None,
    ) -> None:
        if not path.is_file():
            raise ExportError(f"{path.parent} is not a complete ONNX export: it has no {path.name}")
        try:
            self._session = onnx_session(path, threads)
        except Exception as error:  # onnxruntime's own error types are not part of its interface
            reason = str(error).splitlines()[0]
            raise ExportError(f"{path} cannot be loaded by onnxruntime: {reason}") from error
        self.path, self._graph, self._on_run = path, graph, on_run
        self.inputs: list[Any] = self._session.get_inputs()
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map

    def value(self, name: str) -> str:
        """A value of the metadata.

        Raises:
            ExportError: the file has no such value.
        """
        if name not in self.metadata:
            raise ExportError(
                f"{self.path} has no {name} in its metadata, which export writes: a tool has "
                "dropped it; export the model again"
            )
        return self.metadata[name]

    def number(self, name: str) -> int:
        """As `value`, for an integer."""
        text = self.value(name)
        if not text.isdecimal():
            raise ExportError(
                f"{self.path} has {name}={ascii(text)[:50]} in its metadata, needs an integer: "
                "export the model again"
            )
        return int(text)

    def check_inputs(self, *names: str) -> None:
        found = [node.name for node in self.inputs]
        if found != list(names):
            raise ExportError(
                f"{self.path} has the inputs {', '.join(found)}, needs {', '.join(names)}: it is "
                "not from the same export as the other files"
            )

    @property
    def output_width(self) -> int | str | None:
        """The last axis of the first output; a name or None if it is not fixed."""
        width: int | str | None = self._session.get_outputs()[0].shape[-1]
        return width

    def check_symbols(self, found: int | str | None, symbols: int) -> None:
        if str(found).isdigit() and int(str(found)) != symbols:
            raise ExportError(
                f"{self.path} has {found} symbols and the tokens {symbols}: it is not from the "
                "same export as the other files"
            )

    def run(self, feeds: Feeds) -> list[Any]:
        """All outputs.

        Raises:
            RuntimeError: onnxruntime cannot compute them.
        """
        if self._on_run is not None:
            self._on_run(self._graph, feeds)
        try:
            outputs: list[Any] = self._session.run(None, feeds)
        except Exception as error:  # of several kinds; `is_out_of_memory` knows the message
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RuntimeError(f"{self.path} fails in onnxruntime: {reason}") from error
        return outputs
