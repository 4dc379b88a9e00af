"""Alignments as lhotse cuts whose supervisions have the times of tokens and words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lhotse import MonoCut, Recording, SupervisionSegment
from lhotse.supervision import AlignmentItem

from pruned_rnnt.align.utterance import AlignedUtterance
from pruned_rnnt.data.audio.decoder_messages import without_decoder_messages


def cut_with_alignment(cut: Any, utterance: AlignedUtterance) -> Any:
    """A copy of the cut with `word` and `token` alignments; other kinds of alignments stay.

    Times start at the start of the cut, like those of its supervisions. If a cut has several
    supervisions, each gets as many words as its text has, and the tokens of those words.
    """
    words = [_item(w.word, w.start, w.end, w.confidence) for w in utterance.words]
    tokens = [_item(t.token, t.start, t.end, t.confidence) for t in utterance.tokens]
    in_order = sorted(cut.supervisions, key=lambda s: s.start)
    aligned = {}
    for index, supervision in enumerate(in_order):
        count = len((supervision.text or "").split())
        if index == len(in_order) - 1:
            count = len(words)
        limit = words[count].start if count < len(words) else float("inf")
        own_tokens = [token for token in tokens if token.start < limit]
        aligned[supervision.id] = replace(
            supervision,
            alignment={
                **(supervision.alignment or {}),
                "word": words[:count],
                "token": own_tokens,
            },
        )
        words, tokens = words[count:], tokens[len(own_tokens) :]
    return replace(cut, supervisions=[aligned[s.id] for s in cut.supervisions])


def cut_of_file(path: Path, name: str, text: str) -> Any:
    """A cut of a whole audio file, like those of prepared data."""
    with without_decoder_messages():
        recording = Recording.from_file(path, recording_id=name)
    supervision = SupervisionSegment(
        id=name, recording_id=name, start=0.0, duration=recording.duration, text=text
    )
    return MonoCut(
        id=name,
        start=0.0,
        duration=recording.duration,
        channel=0,
        supervisions=[supervision],
        recording=recording,
    )


def _item(symbol: str, start: float, end: float, confidence: float) -> AlignmentItem:
    return AlignmentItem(
        symbol=symbol, start=start, duration=round(end - start, 4), score=confidence
    )
