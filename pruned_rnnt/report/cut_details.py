"""Durations and speakers of utterances, and their cuts, from the prepared data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.filters import cut_language
from pruned_rnnt.data.input.prepared_folder import PreparedFolder


@dataclass(frozen=True, kw_only=True)
class CutDetails:
    """The cuts of decoded utterances, by id.

    problem: why some or all are missing; empty if none is.
    """

    cuts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def seconds(self, name: str) -> float | None:
        """The duration of an utterance; None if unknown."""
        cut = self.cuts.get(name)
        return None if cut is None else float(cut.duration)

    def speaker(self, name: str) -> str:
        """The speakers of an utterance, joined; empty if unknown."""
        cut = self.cuts.get(name)
        speakers = [s.speaker for s in cut.supervisions if s.speaker] if cut is not None else []
        return " ".join(dict.fromkeys(speakers))

    def language(self, name: str) -> str:
        """The language code of an utterance; empty if unknown."""
        cut = self.cuts.get(name)
        return "" if cut is None else cut_language(cut)


def read_cut_details(config: DataConfig, split: str, names: Collection[str]) -> CutDetails:
    """The cuts of a split with these ids; manifests of several shards are read, too."""
    folder = PreparedFolder(Path(config.path), config.allow_commands)
    hint = "if the data were moved, add data.path=DIR"
    wanted = frozenset(names)
    try:
        cuts = {cut.id: cut for cut in folder.cuts(split, lazy=True) if cut.id in wanted}
    except (OSError, ValueError) as error:
        return CutDetails(problem=f"The data cannot be read: {error}; {hint}.")
    missing = len(wanted) - len(cuts)
    problem = ""
    if missing:
        problem = (
            f"{missing:,} of {len(wanted):,} utterances are not in the split {split} of "
            f"{config.path}: {hint}."
        )
    return CutDetails(cuts=cuts, problem=problem)
