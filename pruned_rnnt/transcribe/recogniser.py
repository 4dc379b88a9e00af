"""Transcribe files in Python: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_stream import audio_blocks, feature_pieces
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import DecodeConfig, build_search
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS, FRAME_SECONDS
from pruned_rnnt.decode.word_times import TimedWord, timed_tokens, timed_words
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.transcribe.windows import Window, WindowEncoder

# One search covers at most 5 minutes of speech without a pause.
_MOST_FRAMES = round(300 / FRAME_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """The text of a recording.

    score: natural log-probability of the path; seconds: length of the audio.
    """

    text: str
    words: tuple[TimedWord, ...]
    score: float
    seconds: float

    def __str__(self) -> str:
        return self.text


class Recogniser:
    """Transcribes files of any length, in memory that does not grow with their length.

    Audio longer than `window_seconds` + 2 * `overlap_seconds` is read and encoded in windows.
    Windows end at pauses if possible, and the search restarts after each pause. Windows without a
    pause between them are encoded with `overlap_seconds` of context on both sides, and searched
    together (at most five minutes of them). Silence longer than a second is skipped. Windows should
    not be longer than the training utterances; in longer ones the model may delete words.

    Args:
        p99_duration: 99th percentile of the training utterances' durations in seconds; None if
            unknown.
        window_seconds: default: `p99_duration`, at most 30.
        overlap_seconds: default: 2/15 of the window.
        decode: search method, beam and fusion; default: greedy search.
        language_model: the model that `decode.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as `build_search`.
    """

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        p99_duration: float | None = None,
        *,
        window_seconds: float | None = None,
        overlap_seconds: float | None = None,
        decode: DecodeConfig | None = None,
        language_model: LanguageModel | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.p99_duration = p99_duration
        self._windows = WindowEncoder.as_trained(
            model, p99_duration, window_seconds, overlap_seconds, skip_silence=True
        )
        self._search = build_search(model, decode or DecodeConfig(), tokenizer, language_model)

    def transcribe(
        self,
        audio: Path | str | FloatArray,
        *,
        on_seconds: Callable[[float], None] | None = None,
    ) -> Transcription:
        """Transcribe an audio file (any that `open_audio` reads), or (S,) samples at 16 kHz.

        Audio with nothing but digital silence gives an empty text.

        Args:
            on_seconds: called with the seconds of audio read so far.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.load_audio.read_audio`.
        """
        blocks = audio_blocks(audio) if isinstance(audio, str | Path) else [audio]
        return self._transcribe(feature_pieces(blocks), on_seconds)

    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """Transcribe log-mel features (T, F)."""
        return self._transcribe([features_TF])

    @torch.inference_mode()
    def _transcribe(
        self, pieces: Iterable[Tensor], on_seconds: Callable[[float], None] | None = None
    ) -> Transcription:
        counter = _FrameCounter(pieces, on_seconds)
        symbols: list[int] = []
        frames: list[int] = []
        scores: list[float] = []
        total = 0.0
        for begin, encoded_NTE in _join_between_pauses(self._windows(counter)):
            (hypotheses,) = self._search(encoded_NTE, torch.tensor([encoded_NTE.size(1)]))
            best = hypotheses[0]
            symbols += best.symbols
            frames += [begin + frame for frame in best.frames]
            scores += best.symbol_scores
            total += best.score
        seconds = round(counter.frames * FEATURE_SECONDS, 2)
        tokens = timed_tokens(self.tokenizer.symbols, symbols, frames, scores)
        return Transcription(
            text=self.tokenizer.decode(symbols),
            words=timed_words(self.tokenizer, symbols, tokens, scores, seconds),
            score=total,
            seconds=seconds,
        )


def _join_between_pauses(windows: Iterable[Window]) -> Iterator[tuple[int, Tensor]]:
    """Yield the encoder frames (1, T, E) between pauses, each after its first frame's index.

    Speech without a pause is also cut after the window in which it reaches `_MOST_FRAMES`.
    """
    pending: list[Window] = []
    for window in windows:
        frames = sum(before.encoded_NTE.size(1) for before in pending)
        if pending and (window.is_start or frames >= _MOST_FRAMES):
            yield _joined(pending)
            pending = []
        pending.append(window)
    if pending:
        yield _joined(pending)


def _joined(windows: Sequence[Window]) -> tuple[int, Tensor]:
    return windows[0].begin, torch.cat([window.encoded_NTE for window in windows], dim=1)


class _FrameCounter:
    """Iterates over pieces of features, counts their frames and reports the seconds read."""

    def __init__(
        self, pieces: Iterable[Tensor], on_seconds: Callable[[float], None] | None
    ) -> None:
        self._pieces = pieces
        self._on_seconds = on_seconds
        self.frames = 0

    def __iter__(self) -> Iterator[Tensor]:
        for piece_TF in self._pieces:
            self.frames += len(piece_TF)
            yield piece_TF
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)


def load(
    path: Path | str, device: torch.device | str = "cpu", *, window_seconds: float | None = None
) -> Recogniser:
    """Load a model that `pruned-rnnt export RUN --format torch` wrote.

    Args:
        path: model.pt, or its folder.
        window_seconds: as of `Recogniser`.

    Raises:
        ValueError: the file does not exist, is damaged, or is not an exported model.
    """
    model, tokenizer, p99_duration = load_model(path)
    return Recogniser(model.to(device), tokenizer, p99_duration, window_seconds=window_seconds)
