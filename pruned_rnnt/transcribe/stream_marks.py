"""Speech without text, text without speech, and text unlike the speech, in a live stream.

Many streams need the speech in their audio at the same time, and a GPU finds it in all of them as
fast as in one. A computation of one stream therefore yields features where it needs their speech,
and `run_together` continues all of them with the answers.

Axes: N streams, T feature frames (10 ms), F mel bins.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.head_paths import HeadPath, Spikes
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.search.streaming import Arc
from pruned_rnnt.model.speech_model import BLANK
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.system.device import to_device
from pruned_rnnt.transcribe.head_evidence import disagreements, head_frames
from pruned_rnnt.transcribe.lost_speech import (
    LEAST_FRAMES,
    FoundPath,
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
# Streams whose speech a GPU finds together, by memory: 0.3 MiB for a second of each.
_MOST_STREAMS = 64

_T = TypeVar("_T")
# Yields features (T, F), and continues with (T,) bool: which of these frames are speech.
NeedsSpeech = Generator[Tensor, Tensor, _T]


def run_together(computations: Sequence[NeedsSpeech[_T]], device: torch.device) -> list[_T]:
    """The results of computations, in order; `device` finds the speech that they need."""
    results: dict[int, _T] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(computations)))
    while answers:
        requests: dict[int, Tensor] = {}
        for place, answer in answers.items():
            try:
                # The first one is None, as every generator needs.
                requests[place] = computations[place].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                results[place] = end.value
        answers = dict(zip(requests, _speech(list(requests.values()), device), strict=True))
    return [results[place] for place in range(len(computations))]


def _speech(features: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """(T,) bool on the CPU for features (T, F) of each stream."""
    # A CPU gains nothing by a batch, which has padding.
    most = 1 if device.type == "cpu" else _MOST_STREAMS
    found = []
    for begin in range(0, len(features), most):
        group = features[begin : begin + most]
        lengths_N = torch.tensor([len(own_TF) for own_TF in group])
        padded_NTF = nn.utils.rnn.pad_sequence(list(group), batch_first=True)
        is_speech_NT = speech_frames(
            to_device(padded_NTF, device).float(), to_device(lengths_N, device)
        ).cpu()
        found += [own_T[: len(own_TF)] for own_T, own_TF in zip(is_speech_NT, group, strict=True)]
    return found


class StreamMarks:
    """Compares the symbols of a stream with its audio, in constant memory.

    All frames count from the start of the stream; those of symbols are encoder frames. A stream
    emits its symbols anywhere in a chunk: where the CTC head has the same ones, its frames count.

    Args:
        step: feature frames of an encoder frame.
    """

    def __init__(self, step: int = SUBSAMPLING_FACTOR) -> None:
        self._step = step
        self._features_TF: list[Tensor] = []
        self._begin = self._end = self._checked = 0
        self._symbols: list[Arc] = []
        # The symbols of the CTC head by the frames where they begin; the frames that it has read,
        # and its best symbol in the last one.
        self._spikes: dict[int, int] = {}
        self._head_frames, self._preferred = 0, BLANK
        self._found: list[Mark] = []

    def accept(self, features_TF: Tensor, head: Sequence[int] = ()) -> bool:
        """Append (T, F) features, and the symbols that the head prefers in the next frames.

        Returns:
            Whether so much is unchecked that `check` is due.
        """
        self._features_TF.append(features_TF.clone())
        for symbol in head:
            if symbol not in (BLANK, self._preferred):
                self._spikes[self._head_frames] = symbol
            self._head_frames, self._preferred = self._head_frames + 1, symbol
        self._end += len(features_TF)
        return self._end - self._checked >= _MOST_FRAMES

    def add(self, arcs: Iterable[Arc]) -> None:
        """Symbols that are final."""
        self._symbols += arcs

    def take(self, tentative: Iterable[Arc], *, is_end: bool) -> NeedsSpeech[list[Mark]]:
        """Check the audio, and return the marks found since the last call, in seconds."""
        yield from self.check(tentative, is_end=is_end)
        taken, self._found = self._found, []
        return taken

    def check(self, tentative: Iterable[Arc], *, is_end: bool = False) -> NeedsSpeech[None]:
        """Compare the audio with the final symbols and others.

        The last second waits for the next check, unless it is the end of the stream.
        """
        reach = self._end if is_end else self._end - _HOLD_FRAMES
        if reach <= self._checked:
            return
        path = self._path(tentative)
        symbols = sorted(frame * self._step for frame in head_frames(path))
        kept_TF = torch.cat(self._features_TF)
        is_speech_T = yield kept_TF
        speech = [
            Stretch(self._begin + begin, self._begin + end) for begin, end in stretches(is_speech_T)
        ]
        checked = reach
        gaps: list[Stretch] = []
        doubtful: list[Stretch] = []
        for gap, _, is_empty, _ in disagreements(path):
            if self._checked <= gap.begin and gap.end <= reach:
                (gaps if is_empty else doubtful).append(gap)
            elif gap.begin < reach < gap.end:
                checked = min(checked, gap.begin)
        for gap in without_text(speech, symbols):
            begin, end = max(gap.begin, self._checked), min(gap.end, reach)
            if end - begin >= LEAST_FRAMES:
                gaps.append(Stretch(begin, end))
            elif begin < reach < gap.end:
                # Perhaps it becomes long enough.
                checked = min(checked, begin)
        # What lies behind is found again.
        gaps, doubtful = (
            [Stretch(gap.begin, min(gap.end, checked)) for gap in found if gap.begin < checked]
            for found in (gaps, doubtful)
        )
        new = [n for n in symbols if self._checked <= n < checked]
        self._found += as_marks(
            {
                "speech without text": gaps,
                "text unlike the speech": doubtful,
                "text without speech": without_speech(speech, new),
            }
        )
        self._checked = checked
        first = max(0, checked - _CONTEXT_FRAMES)
        if first > self._begin:
            self._features_TF = [kept_TF[first - self._begin :].clone()]
            self._begin = first
            self._symbols = [arc for arc in self._symbols if arc.frame * self._step >= first]
            self._spikes = {n: s for n, s in self._spikes.items() if n * self._step >= first}
        else:
            self._features_TF = [kept_TF]

    def _path(self, tentative: Iterable[Arc]) -> FoundPath:
        """The symbols of the search and of the CTC head in the audio that is kept."""
        arcs = sorted(dict.fromkeys([*self._symbols, *tentative]), key=lambda arc: arc.frame)
        frames, scores = tuple(arc.frame for arc in arcs), tuple(arc.score for arc in arcs)
        found = Hypothesis(
            symbols=tuple(arc.symbol for arc in arcs),
            frames=frames,
            score=sum(scores),
            symbol_scores=scores,
        )
        spikes = Spikes(tuple(self._spikes.values()), tuple(self._spikes))
        # The head's probabilities of these symbols are not known: none is doubted.
        head = HeadPath(frames, (0.0,) * len(frames), spikes) if self._head_frames else None
        return FoundPath(found, head, self._step)
