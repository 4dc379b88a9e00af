"""Write alignments to files, one utterance after the other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from lhotse import CutSet

from pruned_rnnt.align.manifest import cut_with_alignment
from pruned_rnnt.align.textgrid import textgrid
from pruned_rnnt.align.utterance import AlignedUtterance
from pruned_rnnt.decode.word_times import ctm_text

_NOT_IN_FILE_NAMES = re.compile(r"[^\w.+=@-]+")


class AlignmentWriter:
    """A context manager that writes utterances in one format.

    textgrid: DIR/SET/UTTERANCE.TextGrid with the tiers `words`, `confidence` (of each word) and
        `tokens`.
    ctm: DIR/SET-words.ctm and DIR/SET-tokens.ctm, times from the start of each utterance.
    lhotse: DIR/SET_cuts.jsonl.gz, the cuts with `word` and `token` alignments.

    With every format, DIR/SET-scores.tsv has a line `utterance score words` for each utterance: its
    `AlignedUtterance.word_score` and its number of words.

    Args:
        folder: DIR, created if it does not exist.
        kind: textgrid, ctm or lhotse.
        name: SET.
        cuts: for lhotse, the cuts by utterance id.
    """

    def __init__(self, folder: Path, kind: str, name: str, cuts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.kind = kind
        self.name = name
        self.cuts = cuts
        self._open = ExitStack()
        self._scores: TextIO
        self._words: TextIO
        self._tokens: TextIO
        self._manifest: Any = None

    def __enter__(self) -> AlignmentWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._scores = self._open.enter_context(
            (self.folder / f"{self.name}-scores.tsv").open("w", encoding="utf-8")
        )
        if self.kind == "textgrid":
            (self.folder / self.name).mkdir(exist_ok=True)
        elif self.kind == "ctm":
            self._words, self._tokens = (
                self._open.enter_context(
                    (self.folder / f"{self.name}-{part}.ctm").open("w", encoding="utf-8")
                )
                for part in ("words", "tokens")
            )
        else:
            path = self.folder / f"{self.name}_cuts.jsonl.gz"
            self._manifest = self._open.enter_context(CutSet.open_writer(path))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def add(self, utterance: AlignedUtterance) -> None:
        name = " ".join(utterance.id.split())
        self._scores.write(f"{name}\t{utterance.word_score:.4f}\t{len(utterance.words)}\n")
        words = [(w.word, w.start, w.end, w.confidence) for w in utterance.words]
        tokens = [(t.token, t.start, t.end, t.confidence) for t in utterance.tokens]
        if self.kind == "textgrid":
            tiers = [
                ("words", [w[:3] for w in words]),
                ("confidence", [(f"{w.confidence:.4f}", w.start, w.end) for w in utterance.words]),
                ("tokens", [t[:3] for t in tokens]),
            ]
            path = self.folder / self.name / f"{file_name(utterance.id)}.TextGrid"
            path.write_text(textgrid(tiers, utterance.seconds), encoding="utf-8")
        elif self.kind == "ctm":
            self._words.write(ctm_text(utterance.id, words))
            self._tokens.write(ctm_text(utterance.id, tokens))
        else:
            self._manifest.write(cut_with_alignment(self.cuts[utterance.id], utterance))


def location(folder: Path, kind: str, name: str) -> str:
    """The paths of the results of an `AlignmentWriter`, for messages."""
    if kind == "textgrid":
        return f"{folder / name}/*.TextGrid"
    if kind == "ctm":
        return f"{folder}/{name}-{{words,tokens}}.ctm"
    return str(folder / f"{name}_cuts.jsonl.gz")


def file_name(utterance: str) -> str:
    """An utterance id as a file name, different for each id.

    Other than word characters and .+=@- become underscores; some digits of a hash then follow.
    """
    name = _NOT_IN_FILE_NAMES.sub("_", utterance)
    if name == utterance:
        return name
    return f"{name}-{hashlib.sha256(utterance.encode()).hexdigest()[:8]}"
