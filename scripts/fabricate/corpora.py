"""How large the real corpora are, and which share of them is fabricated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a corpus. seconds: mean duration of an utterance."""

    name: str
    utterances: int
    speakers: int
    seconds: float

    @property
    def hours(self) -> float:
        return self.utterances * self.seconds / 3600

    def share(self, share: float) -> Part:
        """A part with this share of the utterances, at least two, of as many speakers."""
        utterances = max(2, round(share * self.utterances))
        return replace(self, utterances=utterances, speakers=min(self.speakers, utterances))


# Common Voice differs by language and release: this is a language with a hundred hours.
CORPORA: Mapping[str, Sequence[Part]] = {
    "librispeech": (
        Part(name="train-clean-100", utterances=28539, speakers=251, seconds=12.7),
        Part(name="train-clean-360", utterances=104014, speakers=921, seconds=12.6),
        Part(name="train-other-500", utterances=148688, speakers=1166, seconds=12.0),
        Part(name="dev-clean", utterances=2703, speakers=40, seconds=7.2),
        Part(name="dev-other", utterances=2864, speakers=33, seconds=6.4),
        Part(name="test-clean", utterances=2620, speakers=40, seconds=7.4),
        Part(name="test-other", utterances=2939, speakers=33, seconds=6.5),
    ),
    "mini_librispeech": (
        Part(name="train-clean-5", utterances=1519, speakers=28, seconds=12.6),
        Part(name="dev-clean-2", utterances=1089, speakers=38, seconds=6.7),
    ),
    "aishell": (
        Part(name="train", utterances=120098, speakers=340, seconds=4.5),
        Part(name="dev", utterances=14326, speakers=40, seconds=4.5),
        Part(name="test", utterances=7176, speakers=20, seconds=5.0),
    ),
    "commonvoice": (
        Part(name="train", utterances=70000, speakers=2000, seconds=5.1),
        Part(name="dev", utterances=10000, speakers=1500, seconds=5.1),
        Part(name="test", utterances=10000, speakers=4000, seconds=5.1),
    ),
    "yesno": (Part(name="waves_yesno", utterances=60, speakers=1, seconds=6.1),),
}


def train_hours(corpus: str) -> float:
    """The hours of the parts for training."""
    parts = CORPORA[corpus]
    return sum(part.hours for part in parts if part.name.startswith("train")) or parts[0].hours


def scaled_parts(corpus: str, share: float, seconds: float | None = None) -> list[Part]:
    """The parts with a share of their utterances; yesno always has its sixty.

    Args:
        seconds: mean duration of an utterance; None for that of the corpus.

    Raises:
        ValueError: a share or a duration that is not positive.
    """
    for name, value in (("share", share), ("seconds", seconds)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}, needs a positive number")
    parts = [part if corpus == "yesno" else part.share(share) for part in CORPORA[corpus]]
    return [replace(part, seconds=seconds or part.seconds) for part in parts]
