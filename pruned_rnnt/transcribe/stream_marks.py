"""Speech without text, and text without speech, in a live stream.

Axes: T feature frames (10 ms), F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.transcribe.lost_speech import (
    LEAST_FRAMES,
    Mark,
    Stretch,
    as_marks,
    stretches,
    without_speech,
    without_text,
)
from pruned_rnnt.transcribe.speech_energy import speech_frames

# Symbols of the last second of audio may still come: a word may be as long, and a model delays it.
_HOLD_FRAMES = 100
# Checked audio that is kept, from which the noise is estimated, too.
_CONTEXT_FRAMES = 1000
# Audio is checked at endpoints, and where there is none for so long.
_MOST_FRAMES = 3000


class StreamMarks:
    """Compares the symbols of a stream with its audio, in constant memory.

    All frames count from the start of the stream; those of symbols are encoder frames.

    Args:
        step: feature frames of an encoder frame.
    """

    def __init__(self, step: int = SUBSAMPLING_FACTOR) -> None:
        self._step = step
        self._features_TF: list[Tensor] = []
        self._begin = self._end = self._checked = 0
        self._symbols: set[int] = set()
        self._found: list[Mark] = []

    def accept(self, features_TF: Tensor) -> bool:
        """Append (T, F) features; returns whether so many are unchecked that `check` is due."""
        self._features_TF.append(features_TF.clone())
        self._end += len(features_TF)
        return self._end - self._checked >= _MOST_FRAMES

    def add(self, symbol_frames: Iterable[int]) -> None:
        """Symbols that are final."""
        self._symbols.update(frame * self._step for frame in symbol_frames)

    def take(self, tentative: Iterable[int], *, is_end: bool) -> list[Mark]:
        """Check the audio, and return the marks found since the last call, in seconds."""
        self.check(tentative, is_end=is_end)
        taken, self._found = self._found, []
        return taken

    def check(self, tentative: Iterable[int], *, is_end: bool = False) -> None:
        """Compare the audio with the final symbols and others.

        The last second waits for the next check, unless it is the end of the stream.
        """
        reach = self._end if is_end else self._end - _HOLD_FRAMES
        if reach <= self._checked:
            return
        symbols = sorted(self._symbols.union(frame * self._step for frame in tentative))
        kept_TF = torch.cat(self._features_TF)
        is_speech_NT = speech_frames(kept_TF[None].float(), torch.tensor([len(kept_TF)]))
        speech = [
            Stretch(self._begin + begin, self._begin + end)
            for begin, end in stretches(is_speech_NT[0])
        ]
        checked, gaps = reach, []
        for gap in without_text(speech, symbols):
            begin, end = max(gap.begin, self._checked), min(gap.end, reach)
            if end - begin >= LEAST_FRAMES:
                gaps.append(Stretch(begin, end))
            elif begin < reach < gap.end:
                # Perhaps it becomes long enough.
                checked = begin
        new = [n for n in symbols if self._checked <= n < checked]
        self._found += as_marks(
            {"speech without text": gaps, "text without speech": without_speech(speech, new)}
        )
        self._checked = checked
        first = max(0, checked - _CONTEXT_FRAMES)
        if first > self._begin:
            self._features_TF = [kept_TF[first - self._begin :].clone()]
            self._begin = first
            self._symbols = {n for n in self._symbols if n >= first}
        else:
            self._features_TF = [kept_TF]
