"""Filters the training utterances; counts and lists those left out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import eq
from typing import TYPE_CHECKING, Any

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lhotse import CutSet

logger = logging.getLogger(__name__)

# The longest utterance that `prepare` keeps and training uses, unless a setting names another.
LONGEST_SECONDS = 40.0
# The default of subsampling_factor for losses that do not need a frame for each symbol.
MOST_FRAME_STEP = 4
# Ids to list for each reason, and ids to keep in memory.
_MAX_LISTED = 5
_MAX_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Bounds on the training utterances; dev and test sets are never filtered.

    min_duration, max_duration: bounds on the duration, in seconds.
    max_symbols: largest number of symbols in a reference; long references need most memory.
    subsampling_factor: feature frames per encoder frame; an utterance needs more encoder frames
        than symbols, and with loss.kind=ctc one more for each symbol that equals the one before.
        null, the default: that of the encoder, but at most 4 if the loss lets a frame have several
        symbols (loss.rnnt_type=regular without a CTC head).
    """

    min_duration: float = 0.1
    max_duration: float = LONGEST_SECONDS
    max_symbols: int = 1000
    subsampling_factor: int | None = None

    def __post_init__(self) -> None:
        check_at_least("data.filters", self, min_duration=0, max_symbols=1, subsampling_factor=1)
        check_at_least("data.filters", self, max_duration=self.min_duration)

    @property
    def frame_step(self) -> int:
        """The subsampling factor; an ExperimentConfig has set it, so null is only in other code."""
        return self.subsampling_factor or MOST_FRAME_STEP


def encoder_frames(frames: int, subsampling_factor: int) -> int:
    """A lower bound on the number of encoder frames for `frames` feature frames.

    Two unpadded 3x3 convolutions of stride 2 leave ((frames - 7) // 2 + 1) // 2, which is never
    below (frames - 7) // 4; a padded front end leaves more.
    """
    return max(0, (frames - 7) // subsampling_factor)


def cut_text(cut: Any) -> str:
    """The reference text of a cut: the texts of its supervisions in order of time."""
    supervisions = sorted(cut.supervisions, key=lambda s: s.start)
    return " ".join(" ".join((s.text or "").split()) for s in supervisions).strip()


def cut_language(cut: Any) -> str:
    """The language code of a cut: that of its first supervision that has one, or ""."""
    supervisions = sorted(cut.supervisions, key=lambda s: s.start)
    return next((s.language for s in supervisions if s.language), "")


def cut_symbols(cut: Any, tokenizer: Tokenizer) -> list[int]:
    """The ids of a cut's reference, with the tag of its language if the tokenizer has one."""
    return tokenizer.encode(cut_text(cut), cut_language(cut))


@dataclass
class CutFilter:
    """Accepts or rejects single cuts; counts the rejected ones by reason and keeps some ids.

    too_large: (cut, symbols) -> True if its lattice alone exceeds the bound on batches.
    tempo: augmentation may shorten the features by a factor of 1 + tempo.
    ctc: for loss.kind=ctc, which needs a frame for the blank between equal symbols.
    """

    config: FilterConfig
    tokenizer: Tokenizer
    too_large: Callable[[Any, int], bool] | None = None
    tempo: float = 0.0
    ctc: bool = False
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, cut: Any) -> bool:
        reason = self.reason(cut)
        if reason is None:
            return True
        self.left_out[reason] += 1
        ids = self.examples.setdefault(reason, [])
        if len(ids) < _MAX_KEPT:
            ids.append(cut.id)
        return False

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.left_out.clear()
        self.examples.clear()

    def reason(self, cut: Any) -> str | None:
        """The reason to leave the cut out, or None to keep it."""
        config = self.config
        if cut.duration < config.min_duration:
            return f"shorter than {config.min_duration} s"
        if cut.duration > config.max_duration:
            return f"longer than {config.max_duration} s"
        text = cut_text(cut)
        if not text:
            return "empty text"
        frames = cut.num_frames if cut.has_features else round(cut.duration * 100)
        frames = encoder_frames(int(frames / (1 + self.tempo)), config.frame_step)
        # To count the symbols takes as long as to parse the cut. They are no more than the
        # characters, the space before the first one, and a tag; but characters beyond ASCII, and
        # rules of a tokenizer of its own, may have a longer normal form.
        most = len(text) + 2
        expands = self.tokenizer.has_own_rules or not text.isascii()
        needed = 2 * most if self.ctc else most
        is_long = most > config.max_symbols or needed >= frames
        if expands or is_long or (self.too_large is not None and self.too_large(cut, most)):
            symbols = cut_symbols(cut, self.tokenizer)
            if len(symbols) > config.max_symbols:
                return f"more than {config.max_symbols} symbols"
            repeats = sum(map(eq, symbols, symbols[1:])) if self.ctc else 0
            if frames <= len(symbols) + repeats:
                return "too short for its symbols"
            if self.too_large is not None and self.too_large(cut, len(symbols)):
                return "lattice larger than max_lattice"
        return None

    def counts(self) -> dict[str, int]:
        """The number of cuts left out so far, by reason."""
        return dict(sorted(self.left_out.items()))

    def describe(self) -> str:
        """One line with the number of cuts left out for each reason, and the first ids."""
        if not self.left_out:
            return "none"
        parts = []
        for reason, count in sorted(self.left_out.items()):
            names = ", ".join(sorted(self.examples[reason])[:_MAX_LISTED])
            more = ", ..." if count > _MAX_LISTED else ""
            parts.append(f"{count} {reason} ({names}{more})")
        return "; ".join(parts)


def filter_cuts(cuts: Iterable[Any], cut_filter: CutFilter, split: str) -> CutSet:
    """The cuts that pass the filter, in memory; logs one line about the others."""
    # Here, because every command reads FilterConfig, and few need lhotse.
    from lhotse import CutSet

    kept = CutSet.from_cuts(cut for cut in cuts if cut_filter(cut))
    left_out = sum(cut_filter.counts().values())
    logger.info("%s: %d cuts, %d left out: %s", split, len(kept), left_out, cut_filter.describe())
    return kept
