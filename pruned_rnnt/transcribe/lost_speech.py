"""Speech without text, and text without speech, in what a model made of a segment.

Transducers skip words without a sign, most often in audio unlike their training utterances. Where
a segment has speech but no symbol for longer than words take, that part is decoded again by itself;
if it has no text then, either, it is marked. Likewise text is marked where nothing is said.

The evidence is the energy of the audio (`speech_energy.speech_frames`), not the model, so it holds
for models of any kind.

Axes: N batch, T feature frames (10 ms), F mel bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

# The symbol at a frame may belong to the speech of so many feature frames before and after it; the
# last one before a pause to more, because words are longer there.
_BEFORE, _AFTER, _AFTER_LAST = 50, 30, 70
# Pauses up to this are part of the speech; shorter speech without symbols is no word.
_SHORT_PAUSE, LEAST_FRAMES = 20, 30
# Symbols so far below the loudest one (13 dB) may be in silence.
_FAR_BELOW = 3.0
# A mark of a symbol without speech is as long as most encoder frames.
_SYMBOL_FRAMES = 4
# Kept on both sides of a part that is decoded again.
_CONTEXT = 28

MarkKind = Literal["speech without text", "text without speech"]


class Mark(NamedTuple):
    """A stretch of the audio, in seconds, in which the text is not to be trusted."""

    kind: MarkKind
    start: float
    end: float


class Stretch(NamedTuple):
    """Feature frames from `begin` to `end`."""

    begin: int
    end: int


def loudest_nearby(features_NTF: Tensor) -> Tensor:
    """(N, T) on the device: the largest log-energy of the frames that a symbol may belong to."""
    energy_NT = nn.functional.pad(features_NTF.mean(dim=2), (_BEFORE, _AFTER), value=-1e4)
    return nn.functional.max_pool1d(energy_NT, _BEFORE + _AFTER + 1, stride=1)


def may_need_marks(loudest_T: Tensor, symbol_places: Sequence[int]) -> bool:
    """Whether the speech of an utterance has to be found to know if there is anything to mark.

    Almost no utterance has a long gap between symbols, or a symbol far below the loudest ones.
    """
    frames = len(loudest_T)
    places = [min(place, frames - 1) for place in symbol_places]
    if not places:
        return True
    reached = 0
    for place in places:
        if place - _BEFORE - reached >= LEAST_FRAMES:
            return True
        reached = place + _AFTER
    if frames - (places[-1] + _AFTER_LAST) >= LEAST_FRAMES:
        return True
    loud_U = loudest_T[places]
    return bool(loud_U.min() < loud_U.max() - _FAR_BELOW)


def stretches(is_speech_T: Tensor) -> list[Stretch]:
    """The speech of one utterance, on the CPU, across short pauses."""
    edges_T = torch.diff(nn.functional.pad(is_speech_T.int(), (1, 1)))
    places = edges_T.nonzero()[:, 0].tolist()
    found: list[Stretch] = []
    for begin, end in zip(places[::2], places[1::2], strict=True):
        if found and begin - found[-1].end <= _SHORT_PAUSE:
            begin, _ = found.pop()
        found.append(Stretch(begin, end))
    return found


def without_text(speech: Sequence[Stretch], symbol_places: Sequence[int]) -> list[Stretch]:
    """The stretches of speech, or parts of them, that no symbol belongs to.

    symbol_places: feature frames of the symbols, in order.
    """
    found = []
    for begin, end in speech:
        reached = begin
        for place in symbol_places:
            if _belongs(place, Stretch(begin, end)):
                if place - _BEFORE - reached >= LEAST_FRAMES:
                    found.append(Stretch(reached, place - _BEFORE))
                reached = max(reached, place + _AFTER)
        if reached > begin:
            reached += _AFTER_LAST - _AFTER
        if end - reached >= LEAST_FRAMES:
            found.append(Stretch(reached, end))
    return found


def without_speech(speech: Sequence[Stretch], symbol_places: Sequence[int]) -> list[Stretch]:
    """Where symbols are to which no speech belongs, one stretch for symbols in a row."""
    found: list[Stretch] = []
    was_alone = False
    for place in symbol_places:
        is_alone = not any(_belongs(place, stretch) for stretch in speech)
        if is_alone:
            stretch = Stretch(place, place + _SYMBOL_FRAMES)
            if was_alone:
                stretch = Stretch(found.pop().begin, stretch.end)
            found.append(stretch)
        was_alone = is_alone
    return found


def part_to_retry(gap: Stretch, frames: int, step: int) -> Stretch:
    """The gap with some context, at a multiple of an encoder frame of `step` feature frames."""
    begin = max(0, gap.begin - _CONTEXT) // step * step
    return Stretch(begin, min(frames, gap.end + _CONTEXT))


class FoundPath(NamedTuple):
    """The best path through an utterance, and that of the CTC head through its symbols.

    step: feature frames of an encoder frame.
    """

    hypothesis: Hypothesis
    head: HeadPath | None
    step: int = SUBSAMPLING_FACTOR

    @property
    def symbol_frames(self) -> tuple[int, ...]:
        """The encoder frames nearest to the sounds."""
        return self.hypothesis.frames if self.head is None else self.head.frames

    @property
    def symbol_places(self) -> list[int]:
        """The feature frames at which these begin."""
        return [frame * self.step for frame in self.symbol_frames]


def with_retried(path: FoundPath, gap: Stretch, part: Stretch, retried: FoundPath) -> FoundPath:
    """The path with the symbols that the part by itself has in the gap.

    Unchanged if it has none, or only those that the path has beside the gap.
    """
    offset = part.begin // path.step
    inside = [
        n
        for n, place in enumerate(retried.symbol_places)
        if gap.begin - _AFTER <= part.begin + place < gap.end + _BEFORE
    ]
    place = sum(place < gap.begin for place in path.symbol_places)
    symbols = tuple(retried.hypothesis.symbols[n] for n in inside)
    known = path.hypothesis.symbols
    beside = (known[max(0, place - len(symbols)) : place], known[place : place + len(symbols)])
    if not symbols or symbols in beside:
        return path

    def inserted(own: tuple, new: tuple, shift: int = 0) -> tuple:  # type: ignore[type-arg]
        return (*own[:place], *(new[n] + shift for n in inside), *own[place:])

    old, new = path.hypothesis, retried.hypothesis
    hypothesis = replace(
        old,
        symbols=inserted(old.symbols, new.symbols),
        frames=inserted(old.frames, new.frames, offset),
        score=old.score + sum(new.symbol_scores[n] for n in inside),
        symbol_scores=inserted(old.symbol_scores, new.symbol_scores),
        durations=inserted(old.durations, new.durations) if new.durations else (),
    )
    head = None
    if path.head is not None and retried.head is not None:
        head = HeadPath(
            inserted(path.head.frames, retried.head.frames, offset),
            inserted(path.head.log_probs, retried.head.log_probs),
        )
    return FoundPath(hypothesis, head, path.step)


def marks(speech: Sequence[Stretch], symbol_places: Sequence[int], begin: int) -> list[Mark]:
    """What is to be marked of a segment that begins at a feature frame of its recording."""
    gaps, alone = without_text(speech, symbol_places), without_speech(speech, symbol_places)
    return as_marks(gaps, alone, begin)


def as_marks(gaps: Sequence[Stretch], alone: Sequence[Stretch], begin: int = 0) -> list[Mark]:
    """Marks of speech without text, and of text without speech, from a frame `begin` on."""
    found = [(stretch, True) for stretch in gaps] + [(stretch, False) for stretch in alone]
    return [
        Mark(
            "speech without text" if is_speech else "text without speech",
            round((begin + stretch.begin) * FEATURE_SECONDS, 2),
            round((begin + stretch.end) * FEATURE_SECONDS, 2),
        )
        for stretch, is_speech in sorted(found)
    ]


def still_without_text(mark: Mark, symbol_starts: Sequence[float]) -> list[Mark]:
    """The parts of a mark of speech that none of these symbols, at seconds, belongs to."""
    if mark.kind != "speech without text":
        return [mark]
    speech = Stretch(*(round(second / FEATURE_SECONDS) for second in mark[1:]))
    places = [round(second / FEATURE_SECONDS) for second in symbol_starts]
    return marks([speech], [place for place in places if _belongs(place, speech)], 0)


def _belongs(place: int, speech: Stretch) -> bool:
    return speech.begin < place + _AFTER and place - _BEFORE < speech.end
