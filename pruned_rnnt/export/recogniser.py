"""A loaded model that hears files: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pruned_rnnt.align.words import TimedWord, timed_tokens, timed_words
from pruned_rnnt.data.audio import FloatArray
from pruned_rnnt.data.audio_stream import audio_blocks, feature_pieces
from pruned_rnnt.data.tokens import Tokenizer
from pruned_rnnt.decode.search import FRAME_SECONDS, DecodeConfig, build_search
from pruned_rnnt.decode.windows import Window, WindowEncoder
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.transducer import TransducerModel

_FEATURE_SECONDS = 0.01
# What is searched at once at most where speech makes no pause: 5 minutes.
_MOST_FRAMES = round(300 / FRAME_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """What was heard.

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
    them at most). Windows should be no longer than the utterances that the model was trained on.

    Args:
        overlap_seconds: default: 2/15 of the window.
        decode: method, beam and fusion; greedy search by default.
        language_model: what `decode.fusion.lm` names.

    Raises:
        ValueError, FileNotFoundError: as `build_search`.
    """

    def __init__(
        self,
        model: TransducerModel,
        tokenizer: Tokenizer,
        *,
        window_seconds: float = 30.0,
        overlap_seconds: float | None = None,
        decode: DecodeConfig | None = None,
        language_model: LanguageModel | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        if overlap_seconds is None:
            overlap_seconds = window_seconds * 2 / 15
        window = max(1, round(window_seconds / FRAME_SECONDS))
        self._windows = WindowEncoder(model, window, max(0, round(overlap_seconds / FRAME_SECONDS)))
        self._search = build_search(model, decode or DecodeConfig(), tokenizer, language_model)

    def transcribe(self, audio: Path | str | FloatArray) -> Transcription:
        """Text and times of a wav, flac, ogg, opus or mp3 file, or of (S,) samples at 16 kHz.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.read_audio`.
        """
        blocks = audio_blocks(audio) if isinstance(audio, str | Path) else [audio]
        return self._transcribe(feature_pieces(blocks))

    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """As `transcribe`, of log-mel features (T, F)."""
        return self._transcribe([features_TF])

    @torch.inference_mode()
    def _transcribe(self, pieces: Iterable[Tensor]) -> Transcription:
        heard = _Counted(pieces)
        symbols: list[int] = []
        frames: list[int] = []
        scores: list[float] = []
        begin, total = 0, 0.0
        for encoded_NTE in _stretches(self._windows(heard)):
            (found,) = self._search(encoded_NTE, torch.tensor([encoded_NTE.size(1)]))
            best = found[0]
            symbols += best.symbols
            frames += [begin + frame for frame in best.frames]
            scores += best.symbol_scores
            total += best.score
            begin += encoded_NTE.size(1)
        seconds = round(heard.frames * _FEATURE_SECONDS, 2)
        tokens = timed_tokens(self.tokenizer.symbols, symbols, frames, scores)
        return Transcription(
            text=self.tokenizer.decode(symbols),
            words=timed_words(self.tokenizer, symbols, tokens, scores, seconds),
            score=total,
            seconds=seconds,
        )


def _stretches(windows: Iterable[Window]) -> Iterator[Tensor]:
    """(1, T, E) encoder frames from one pause to the next, of `_MOST_FRAMES` or a little more."""
    waiting: list[Tensor] = []
    for window in windows:
        if waiting and (window.is_start or sum(w.size(1) for w in waiting) >= _MOST_FRAMES):
            yield torch.cat(waiting, dim=1)
            waiting = []
        waiting.append(window.encoded_NTE)
    if waiting:
        yield torch.cat(waiting, dim=1)


class _Counted:
    """Passes pieces of features on and counts their frames."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces = pieces
        self.frames = 0

    def __iter__(self) -> Iterator[Tensor]:
        for piece_TF in self._pieces:
            self.frames += len(piece_TF)
            yield piece_TF


def load(
    path: Path | str, device: torch.device | str = "cpu", *, window_seconds: float = 30.0
) -> Recogniser:
    """A recogniser from what `pruned-rnnt export RUN --format torch` wrote.

    Args:
        path: model.pt, or the folder with it.
        window_seconds: as of `Recogniser`.

    Raises:
        ValueError: no such file, or another kind of file; the message says which.
    """
    model, tokenizer = load_model(path)
    return Recogniser(model.to(device), tokenizer, window_seconds=window_seconds)
