"""A loaded model that hears files: `pruned_rnnt.load(path).transcribe("a.wav").text`.

Axes: S samples, T feature frames, F mel bins, E encoder width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pruned_rnnt.data.audio import FloatArray, audio_features, read_audio
from pruned_rnnt.data.tokens import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.greedy import greedy_search
from pruned_rnnt.decode.search import FRAME_SECONDS
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.model.transducer import TransducerModel

_WORD_START = "▁"


@dataclass(frozen=True, kw_only=True)
class TimedWord:
    """A word and the seconds at which its first and last symbols were emitted."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """What was heard; score is the natural log-probability of the path."""

    text: str
    words: tuple[TimedWord, ...]
    score: float

    def __str__(self) -> str:
        return self.text


class Recogniser:
    """Greedy recognition of whole files, of any length.

    Audio longer than `window_seconds` + 2 * `overlap_seconds` is encoded in windows with
    `overlap_seconds` of their surroundings; the search runs once over all frames, so nothing is
    cut at a seam.
    """

    def __init__(
        self,
        model: TransducerModel,
        tokenizer: Tokenizer,
        *,
        window_seconds: float = 30.0,
        overlap_seconds: float = 4.0,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.window = max(1, round(window_seconds / FRAME_SECONDS))
        self.overlap = max(0, round(overlap_seconds / FRAME_SECONDS))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def transcribe(self, audio: Path | str | FloatArray) -> Transcription:
        """Text and times of a wav, flac, ogg or mp3 file, or of (S,) float samples at 16 kHz.

        Raises:
            FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.read_audio`.
        """
        samples_S = read_audio(audio) if isinstance(audio, str | Path) else audio
        return self.transcribe_features(audio_features(samples_S))

    @torch.inference_mode()
    def transcribe_features(self, features_TF: Tensor) -> Transcription:
        """As `transcribe`, of log-mel features (T, F)."""
        encoded_NTE = self._encode(features_TF.to(self.device))
        silent = [UNKNOWN_ID] if self.model.vocab_size > UNKNOWN_ID else []
        lengths = torch.tensor([encoded_NTE.size(1)])
        (found,) = greedy_search(self.model, encoded_NTE, lengths, silent_symbols=silent)
        return Transcription(
            text=self.tokenizer.decode(found.symbols),
            words=self._words(found.symbols, found.frames),
            score=found.score,
        )

    def _encode(self, features_TF: Tensor) -> Tensor:
        """(1, T', E) for features of any length."""
        receptive_field = self.model.encoder.receptive_field
        if len(features_TF) < receptive_field:
            missing = receptive_field - len(features_TF)
            features_TF = nn.functional.pad(features_TF[None], (0, 0, 0, missing), "replicate")[0]
        total = (len(features_TF) - receptive_field) // SUBSAMPLING_FACTOR + 1
        step = self.window if total > self.window + 2 * self.overlap else total
        pieces = []
        for begin in range(0, total, step):
            end = min(begin + step, total)
            left, right = max(0, begin - self.overlap), min(total, end + self.overlap)
            first = SUBSAMPLING_FACTOR * left
            last = SUBSAMPLING_FACTOR * (right - 1) + receptive_field
            window_NTF = features_TF[None, first:last]
            encoded_NTE, _ = self.model.encode(window_NTF, torch.tensor([window_NTF.size(1)]))
            pieces.append(encoded_NTE[:, begin - left : end - left])
        return torch.cat(pieces, dim=1)

    def _words(self, symbols: tuple[int, ...], frames: tuple[int, ...]) -> tuple[TimedWord, ...]:
        """Symbols from one word start to the next; a text without word starts is one word."""
        names = self.tokenizer.symbols
        groups: list[list[int]] = []
        for position, symbol in enumerate(symbols):
            if not groups or names[symbol].startswith(_WORD_START):
                groups.append([])
            groups[-1].append(position)
        return tuple(
            TimedWord(
                word=word,
                start=round(frames[group[0]] * FRAME_SECONDS, 3),
                end=round((frames[group[-1]] + 1) * FRAME_SECONDS, 3),
            )
            for group in groups
            if (word := self.tokenizer.decode([symbols[i] for i in group]))
        )


def load(path: Path | str, device: torch.device | str = "cpu") -> Recogniser:
    """A recogniser from what `pruned-rnnt export RUN --format torch` wrote.

    Args:
        path: model.pt, or the folder with it.

    Raises:
        ValueError: no such file, or another kind of file; the message says which.
    """
    model, tokenizer = load_model(path)
    return Recogniser(model.to(device), tokenizer)
