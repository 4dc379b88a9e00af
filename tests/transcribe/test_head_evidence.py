"""The CTC head shows what the search lost between symbols that are close together."""

from __future__ import annotations

import math
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest
import torch

from pruned_rnnt.decode.head_paths import HeadPath, Spikes, head_paths
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.transcribe.batch_input import BatchInput, BestPaths
from pruned_rnnt.transcribe.head_evidence import disagreements, head_frames
from pruned_rnnt.transcribe.lost_speech import FoundPath, Mark, Stretch, as_marks, clipped
from tests.tiny_models import tiny_conformer, tiny_model
from tests.transcribe.test_lost_speech import StandIn, audio


def path(
    symbols: tuple[int, ...],
    frames: tuple[int, ...],
    spikes: dict[int, int],
    log_probs: tuple[float, ...] = (),
) -> FoundPath:
    """spikes: symbols of the head by their frames."""
    scores = (-0.1,) * len(symbols)
    hypothesis = Hypothesis(symbols=symbols, frames=frames, score=0.0, symbol_scores=scores)
    head = HeadPath(frames, log_probs or scores, Spikes(tuple(spikes.values()), tuple(spikes)))
    return FoundPath(hypothesis, head)


def test_symbols_that_only_the_head_has_are_lost() -> None:
    (found,) = disagreements(path((3, 6), (5, 20), {5: 3, 9: 4, 14: 5, 20: 6}))
    assert found.stretch == Stretch(36, 60)
    assert (found.is_lost, found.is_empty, found.is_doubtful) == (True, True, False)
    # One symbol may be a slip of the head.
    assert disagreements(path((3, 6), (5, 20), {5: 3, 9: 4, 20: 6})) == []
    assert disagreements(path((3, 6), (5, 20), {5: 3, 20: 6})) == []


def test_other_symbols_are_doubtful_if_the_head_contradicts_them() -> None:
    spikes = {5: 3, 9: 4, 14: 5, 20: 6}
    (found,) = disagreements(path((3, 7, 8, 6), (5, 10, 12, 20), spikes, (0.0, -1.0, -9.0, 0.0)))
    assert found.stretch == Stretch(36, 60)
    assert (found.is_lost, found.is_empty, found.is_doubtful) == (False, False, True)
    # The head prefers others, but finds these possible.
    assert disagreements(path((3, 7, 8, 6), (5, 10, 12, 20), spikes, (0.0, -1.0, -4.0, 0.0))) == []
    # Three for one: both.
    (found,) = disagreements(
        path((3, 7, 6), (5, 10, 20), {5: 3, 9: 4, 14: 5, 16: 8, 20: 6}, (0.0, -9.0, 0.0))
    )
    assert (found.is_lost, found.is_empty, found.is_doubtful) == (True, False, True)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("by_head", [True, False])
def test_of_a_repeated_sentence_the_copy_at_other_times_is_lost(first: bool, by_head: bool) -> None:
    sentence = (3, 4, 5, 3)
    copies = {10 + 4 * n: symbol for n, symbol in enumerate(sentence)}
    copies |= {50 + 4 * n: symbol for n, symbol in enumerate(sentence)}
    found = {frame + 1: symbol for frame, symbol in copies.items() if (frame < 50) == first}
    ends = {2: 8, 90: 9}
    more, fewer = ends | copies, ends | found
    if by_head:
        more, fewer = dict(sorted(more.items())), dict(sorted(fewer.items()))
        (lost,) = disagreements(path(tuple(fewer.values()), tuple(fewer), more))
        begin = 50 if first else 10
        assert lost.stretch == Stretch(4 * begin, 4 * (begin + 13))
        assert lost.is_empty
    else:
        more, fewer = dict(sorted(fewer.items())), dict(sorted(more.items()))
        one = path(tuple(fewer.values()), tuple(fewer), more)
        times = dict(zip(one.symbol_frames, head_frames(one), strict=True))
        assert all(abs(frame - placed) <= 1 for frame, placed in times.items())


def test_less_doubt_is_enough_beside_a_wide_gap() -> None:
    """Words may be lost between symbols that are far apart."""
    spikes = {5: 3, 9: 4, 12: 5, 40: 6}

    def found(frames: tuple[int, ...], *log_probs: float) -> list[bool]:
        symbols = (3, 7, 8, 6) if len(frames) == 4 else (3, 7, 6)
        own = path(symbols, frames, spikes if len(frames) == 4 else {5: 3, 9: 4, 40: 6}, log_probs)
        return [each.is_doubtful for each in disagreements(own)]

    assert found((5, 10, 12, 40), 0.0, -2.5, 0.0, 0.0) == [True]
    assert found((5, 15, 28, 40), 0.0, -2.5, 0.0, 0.0) == []
    assert found((5, 10, 12, 40), 0.0, -1.5, 0.0, 0.0) == []
    assert found((5, 10, 40), 0.0, -4.5, 0.0) == [True]
    assert found((5, 10, 40), 0.0, -2.5, 0.0) == []
    # Up to the end of the speech.
    own = path((3, 7, 8), (5, 10, 12), {5: 3, 9: 4, 12: 5}, (0.0, 0.0, -2.5))
    assert [each.is_doubtful for each in disagreements(own, 110)] == [True]
    assert disagreements(own, 90) == disagreements(own) == []


def test_models_without_a_head_have_no_such_evidence() -> None:
    assert disagreements(path((3,), (5,), {5: 4, 9: 5, 20: 6})._replace(head=None)) == []


def test_spikes_are_the_best_path_of_the_head() -> None:
    """Also of an empty text, and the same whatever else is in the batch."""
    model = tiny_model(tiny_conformer(), 5, ctc_scale=0.2)
    encoded, lengths = model.encode(torch.randn(2, 90, 80), torch.tensor([90, 60]))
    assert model.ctc_head is not None
    with torch.inference_mode():
        model.ctc_head.weight.mul_(20)  # type: ignore[operator]
        best_NT = model.ctc_head(encoded).argmax(dim=2)
    both = head_paths(model, encoded, lengths, [[1, 2], []])
    for n, (found, length) in enumerate(zip(both, lengths.tolist(), strict=True)):
        best = [0, *best_NT[n, :length].tolist()]
        expected = {
            frame: symbol
            for frame, (before, symbol) in enumerate(pairwise(best))
            if symbol not in (0, before)
        }
        assert len(expected) > 1
        assert found is not None
        assert dict(zip(found.spikes.frames, found.spikes.symbols, strict=True)) == expected
    alone = head_paths(model, encoded[1:], lengths[1:], [[]])
    assert alone[0] is not None
    assert alone[0].spikes == both[1].spikes  # type: ignore[union-attr]


class WithHead(StandIn):
    """Loses symbols that are close to others, which its head has; parts have them all."""

    def __init__(self, policy: Any, *, part_log_prob: float = -0.1) -> None:
        super().__init__(lambda *_: False, policy)
        self.part_log_prob = part_log_prob

    def _best_paths(self, batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        whole = yield from super()._best_paths(batch, with_heads)
        return [
            self._lossy(found, head, int(length))
            for (found, head), length in zip(whole, batch.lengths_N, strict=True)
        ]

    def _lossy(
        self, found: Hypothesis, head: HeadPath | None, length: int
    ) -> tuple[Hypothesis, HeadPath]:
        assert head is not None
        spikes = Spikes(found.symbols, head.frames)
        keep = [n for n in range(len(found.symbols)) if length < 400 or n not in (5, 6)]
        log_prob = -0.1 if length >= 400 else self.part_log_prob
        kept = Hypothesis(
            symbols=tuple(found.symbols[n] for n in keep),
            frames=tuple(found.frames[n] for n in keep),
            score=-0.5 * len(keep),
            symbol_scores=(-0.5,) * len(keep),
        )
        return kept, HeadPath(kept.frames, (log_prob,) * len(keep), spikes)


SPEECH = (("noise", 0.4), ("speech", 5.0), ("noise", 0.4))


def test_what_the_head_shows_is_decoded_again_or_marked() -> None:
    features = audio(*SPEECH)
    whole = StandIn(lambda *_: False, "ignore").transcribe_features(features)
    ignored = WithHead("ignore").transcribe_features(features)
    assert (len(ignored.words), ignored.marks) == (len(whole.words) - 2, ())
    retried = WithHead("retry").transcribe_features(features)
    assert (retried.text, retried.marks) == (whole.text, ())
    (mark,) = WithHead("mark").transcribe_features(features).marks
    lost = [whole.words[5], whole.words[6]]
    assert mark.kind == "speech without text"
    assert mark.start == pytest.approx(lost[0].start, abs=0.05)
    assert mark.end == pytest.approx(lost[1].start + 0.04, abs=0.05)


def test_a_part_by_itself_is_not_believed_against_its_head() -> None:
    doubted = WithHead("retry", part_log_prob=-3.5).transcribe_features(audio(*SPEECH))
    marked = WithHead("mark").transcribe_features(audio(*SPEECH))
    assert (doubted.text, doubted.marks) == (marked.text, marked.marks)


def test_marks_in_order_and_joined() -> None:
    found = as_marks(
        {
            "speech without text": [Stretch(300, 340), Stretch(320, 360), Stretch(10, 20)],
            "text without speech": [Stretch(100, 104)],
        },
        begin=1000,
    )
    assert found == [
        Mark("speech without text", 10.1, 10.2),
        Mark("text without speech", 11.0, 11.04),
        Mark("speech without text", 13.0, 13.6),
    ]


def test_marks_are_clipped_to_the_window_whose_text_is_used() -> None:
    marks = [Mark("speech without text", 1.0, 2.0), Mark("speech without text", 2.4, 2.5)]
    assert clipped(marks, 0.0, 3.0) == marks
    assert clipped(marks, 1.5, math.inf) == [marks[0]._replace(start=1.5), marks[1]]
    # Too little is left.
    assert clipped(marks, 0.0, 1.2) == []
