"""Transcribe with a torch model."""

from __future__ import annotations

from collections.abc import Generator

import torch

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import build_search, build_stream_search, launch_search
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import compute_dtype, encode_padded
from pruned_rnnt.decode.head_paths import launch_head_paths
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.decode.word_times import frame_seconds
from pruned_rnnt.export.stream_sizes import stream_sizes
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.linear import transpose_in_memory
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.batch_input import BatchInput, BestPaths
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.segments import SegmentConfig
from pruned_rnnt.transcribe.stream import Stream, StreamModel
from pruned_rnnt.transcribe.stream_group import StreamGroup

# Of audio that a GPU decodes together: by its memory, within bounds. 66 million parameters in
# bfloat16 need 2.5 GiB for 1000 s. A search takes as many steps for one utterance as for many.
_SECONDS_PER_GIB, _LEAST_SECONDS, _MOST_SECONDS = 40.0, 600.0, 3840.0

_NOTHING = Hypothesis(symbols=(), frames=(), score=0.0, symbol_scores=())


class Recogniser(AudioRecogniser):
    """Transcribes with a torch model; see `AudioRecogniser`.

    Args:
        p99_duration: 99th percentile of the training utterances' durations in seconds; None if
            unknown.
        calibration: of the model's word times and confidences.
        segments: how audio is cut.
        decode: search method, beam and fusion; default: greedy search.
        language_model: the model that `decode.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as `build_search`.
        MissingPackageError: a package that `segments.detector` needs is not installed.
    """

    model: SpeechModel

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        p99_duration: float | None = None,
        calibration: Calibration | None = None,
        *,
        segments: SegmentConfig | None = None,
        decode: DecodeConfig | None = None,
        language_model: LanguageModel | None = None,
    ) -> None:
        super().__init__(tokenizer, p99_duration, calibration, segments)
        self.model = model.eval()
        transpose_in_memory(model.encoder)
        decode = decode or DecodeConfig()
        if decode.batch_seconds is not None:
            self.batch_seconds = decode.batch_seconds
        else:
            self.batch_seconds = _batch_seconds(self._device)
        self._search = build_search(model, decode, tokenizer, language_model)
        self._decode = decode
        self._language_model = language_model
        self._stream_groups: dict[tuple[int, int], StreamGroup] = {}

    def _best_paths(self, batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        features_NTF, lengths_N = batch.features_NTF, batch.lengths_N
        if self._feature_kind.needs_samples:
            features_NTF, lengths_N = self._feature_kind.of_recordings(batch.samples, self._device)
        encoded_NTE, lengths = encode_padded(
            self.model, features_NTF, lengths_N, self._decode.precision
        )
        search = launch_search(self._search, encoded_NTE, lengths)
        yield
        # A beam may find no path: with durations of 2 alone, none ends after an odd number.
        best = [hypotheses[0] if hypotheses else _NOTHING for hypotheses in search.result()]
        if not with_heads or self.model.ctc_head is None:
            return [(hypothesis, None) for hypothesis in best]
        symbols = [hypothesis.symbols for hypothesis in best]
        heads = launch_head_paths(self.model, encoded_NTE, lengths, symbols)
        yield
        return list(zip(best, heads.result(), strict=True))

    def stream(
        self, *, chunk: int = 0, left: int = 0, endpoints: EndpointConfig | None = None
    ) -> Stream:
        if self._feature_kind.name == "samples":
            raise UsageError(
                "model.encoder.features is samples, of which live streams are not supported: "
                "transcribe files or samples"
            )
        if not isinstance(endpoints, EndpointConfig | None):
            raise UsageError(
                f"endpoints is {endpoints!r}, needs an EndpointConfig of "
                "pruned_rnnt.transcribe.endpoints"
            )
        chosen = self._decode
        if chosen.chunk < 0 and not chunk:
            raise UsageError(
                f"decode.chunk is {chosen.chunk}, for whole recordings, which a stream does not "
                "have: set decode.chunk=0 for the chunks of training, or another number of frames"
            )
        names = "chunk" if chunk else "decode.chunk", "left" if left else "decode.left"
        sizes = stream_sizes(self.model, chunk or chosen.chunk, left or chosen.left, names)
        with self._lock:
            if sizes not in self._stream_groups:
                self._stream_groups[sizes] = self._stream_group(sizes)
        return self._stream_groups[sizes].stream(endpoints or EndpointConfig())

    def _stream_group(self, sizes: tuple[int, int]) -> StreamGroup:
        search = build_stream_search(self.model, self._decode, self.tokenizer, self._language_model)
        precision = compute_dtype(self._decode.precision, self._device)
        finds_marks = self._segments.lost_speech != "ignore"
        decoder = StreamDecoder(self.model, search, *sizes, precision, with_head=finds_marks)
        model = StreamModel(
            decoder,
            self.tokenizer,
            # Of a model with a CTC head, it belongs to the paths of the head, which no stream has.
            self._calibration if self.model.ctc_head is None else None,
            finds_marks=finds_marks,
            frame_seconds=frame_seconds(self.model.encoder),
            features=self._feature_kind,
        )
        return StreamGroup(model, self._lock)


def _batch_seconds(device: torch.device) -> float:
    """The default of decode.batch_seconds."""
    if device.type == "cpu":
        return 0.0
    if device.type != "cuda":
        return _LEAST_SECONDS
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return min(max(_LEAST_SECONDS, round(_SECONDS_PER_GIB * memory)), _MOST_SECONDS)
