"""A loaded model that hears files: `pruned_rnnt.load(path).transcribe("a.wav").text`.

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
from pruned_rnnt.decode.decode_set import FRAME_SECONDS, DecodeConfig, build_search
from pruned_rnnt.decode.word_times import TimedWord, timed_tokens, timed_words
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.transcribe.windows import Window, WindowEncoder

_FEATURE_SECONDS = 0.01
# What is searched at once at most where speech makes no pause: 5 minutes.
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
    """Recognition of whole files, of any length, in memory that does not grow with it.

    Audio longer than `window_seconds` + 2 * `overlap_seconds` is read and encoded in windows. They
    end in pauses, after which the search starts anew; where speech goes on without a pause, windows
    are encoded with `overlap_seconds` of their surroundings, and searched together (five minutes of
    them at most). Silence of a second and more is left out. Windows should be no longer than the
    utterances that the model was trained on: of what is longer, it may leave out words.

    Args:
        window_seconds: default: `p99_duration`, 30 at most.
        overlap_seconds: default: 2/15 of the window.
        p99_duration: seconds, of the utterances of training; None where it is not known.
        decode: method, beam and fusion; greedy search by default.
        language_model: what `decode.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as `build_search`.
    """

    def __init__(
        self,
        model: TransducerModel,
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
        """Text and times of an audio file (as of `open_audio`), or of (S,) samples at 16 kHz.

        Audio of nothing but digital silence has no words.

        Args:
            on_seconds: called with the seconds of audio that have been read so far.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.load_audio.read_audio`.
        """
        blocks = audio_blocks(audio) if isinstance(audio, str | Path) else [audio]
        return self._transcribe(feature_pieces(blocks), on_seconds)

    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """As `transcribe`, of log-mel features (T, F)."""
        return self._transcribe([features_TF])

    @torch.inference_mode()
    def _transcribe(
        self, pieces: Iterable[Tensor], on_seconds: Callable[[float], None] | None = None
    ) -> Transcription:
        counted = _Counted(pieces, on_seconds)
        symbols: list[int] = []
        frames: list[int] = []
        scores: list[float] = []
        total = 0.0
        for begin, encoded_NTE in _stretches(self._windows(counted)):
            (found,) = self._search(encoded_NTE, torch.tensor([encoded_NTE.size(1)]))
            best = found[0]
            symbols += best.symbols
            frames += [begin + frame for frame in best.frames]
            scores += best.symbol_scores
            total += best.score
        seconds = round(counted.frames * _FEATURE_SECONDS, 2)
        tokens = timed_tokens(self.tokenizer.symbols, symbols, frames, scores)
        return Transcription(
            text=self.tokenizer.decode(symbols),
            words=timed_words(self.tokenizer, symbols, tokens, scores, seconds),
            score=total,
            seconds=seconds,
        )


def _stretches(windows: Iterable[Window]) -> Iterator[tuple[int, Tensor]]:
    """Encoder frames (1, T, E) from one pause to the next, and where in the stream they begin.

    They are `_MOST_FRAMES` at most, or a little more.
    """
    waiting: list[Window] = []
    for window in windows:
        known = sum(before.encoded_NTE.size(1) for before in waiting)
        if waiting and (window.is_start or known >= _MOST_FRAMES):
            yield _joined(waiting)
            waiting = []
        waiting.append(window)
    if waiting:
        yield _joined(waiting)


def _joined(windows: Sequence[Window]) -> tuple[int, Tensor]:
    return windows[0].begin, torch.cat([window.encoded_NTE for window in windows], dim=1)


class _Counted:
    """Passes pieces of features on, counts their frames and reports their seconds."""

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
                self._on_seconds(self.frames * _FEATURE_SECONDS)


def load(
    path: Path | str, device: torch.device | str = "cpu", *, window_seconds: float | None = None
) -> Recogniser:
    """A recogniser from what `pruned-rnnt export RUN --format torch` wrote.

    Args:
        path: model.pt, or the folder with it.
        window_seconds: as of `Recogniser`.

    Raises:
        ValueError: no such file, or another kind of file; the message says which.
    """
    model, tokenizer, p99_duration = load_model(path)
    return Recogniser(model.to(device), tokenizer, p99_duration, window_seconds=window_seconds)
