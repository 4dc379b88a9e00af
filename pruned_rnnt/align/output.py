"""Write alignments to files, one utterance after the other: as Praat's TextGrids (long text
format: tiers of intervals that cover the whole time), CTM, or lhotse cuts whose supervisions have
the times of tokens and words.

They go to RUN/alignments/STEM, or to a folder that the user names. A folder holds one computation
of a set: SET-inputs.json has its inputs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.supervision import AlignmentItem

from pruned_rnnt.align.utterance import AlignedUtterance
from pruned_rnnt.data.audio.audio_file import without_decoder_messages
from pruned_rnnt.data.tokens.text_normalisation import normal_form
from pruned_rnnt.decode.word_times import (
    TimedToken,
    TimedWord,
    ctm_text,
    separate_spans,
    timed_spans,
)
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.result_inputs import ResultInputs, name_of_file
from pruned_rnnt.system.json_file import read_json
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.system.whole_files import write_lines

# Text, start and end in seconds.
Interval = tuple[str, float, float]
# Decimals of seconds in a TextGrid.
_DIGITS = 4
# With the digits of a hash and the suffix of a TextGrid, 255.
_MOST_BYTES = 237


class UndividedWordsError(ValueError):
    """It is unknown to which supervision each aligned word belongs."""


def cut_with_alignment(
    cut: Any, utterance: AlignedUtterance, normalise: Callable[[str], str] = normal_form
) -> Any:
    """A copy of the cut with `word` and `token` alignments; other kinds of alignments stay.

    Times start at the start of the cut, like those of its supervisions. If a cut has several
    supervisions, each gets the words of its text, and the tokens of those words.

    Args:
        normalise: makes the text that was aligned of one in the data.

    Raises:
        UndividedWordsError: the texts of several supervisions are not those of the aligned words,
            or one of them ends within a word.
    """
    words = [_item(w.word, w.start, w.end, w.confidence) for w in utterance.words]
    tokens = [_item(t.token, t.start, t.end, t.confidence) for t in utterance.tokens]
    in_order = sorted(cut.supervisions, key=lambda s: s.start)
    # Counted in characters: a phrase in a script without spaces may be several words.
    before = _characters_before([word.word for word in utterance.words])
    ends = _characters_before([normalise(each.text or "") for each in in_order])[1:]
    if len(ends) == 1:
        ends = before[-1:]
    if ends[-1:] != before[-1:] or not set(ends) <= set(before):
        raise UndividedWordsError(
            f"the texts of the {len(in_order)} supervisions of {utterance.id} are not those of the "
            "aligned words, or one of them ends within a word, so the words cannot be divided "
            "among them: write ctm or textgrid, or cut the supervisions apart "
            "(CutSet.trim_to_supervisions)"
        )
    aligned = {}
    places = _token_places(utterance.words, utterance.tokens)
    word = token = 0
    for supervision, end in zip(in_order, ends, strict=True):
        last_word = before.index(end)
        last_token = places[last_word]
        aligned[supervision.id] = replace(
            supervision,
            alignment={
                **(supervision.alignment or {}),
                "word": words[word:last_word],
                "token": tokens[token:last_token],
            },
        )
        word, token = last_word, last_token
    return replace(cut, supervisions=[aligned[s.id] for s in cut.supervisions])


def _characters_before(texts: Sequence[str]) -> list[int]:
    """The number of characters before each text, and of all, without spaces."""
    return [*accumulate((len("".join(text.split())) for text in texts), initial=0)]


def _token_places(words: Sequence[TimedWord], tokens: Sequence[TimedToken]) -> list[int]:
    """The number of tokens before each word, and of all."""
    places = [first for first, _ in timed_spans(tokens)]
    if len(places) != len(words):
        # Unknown words in a row share a token, and a language tag belongs to no word. Then by time,
        # although a calibration moves words alone.
        starts = [token.start for token in tokens]
        places = [bisect_left(starts, word.start) for word in words]
    return [*places, len(tokens)]


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


def textgrid(tiers: Sequence[tuple[str, Sequence[Interval]]], seconds: float) -> str:
    """The contents of a TextGrid file.

    Args:
        tiers: name and intervals of each tier, in order of time and not overlapping; gaps become
            empty intervals, which the format requires, and an interval without length lasts 0.1 ms.
        seconds: length of the audio.
    """
    tiers = [(name, _separate(intervals)) for name, intervals in tiers]
    ends = [interval[2] for _, intervals in tiers for interval in intervals]
    total = max([round(seconds, _DIGITS), *ends])
    lines = [
        'File type = "ooTextFile"',
        'Object class = "TextGrid"',
        "",
        "xmin = 0",
        f"xmax = {_number(total)}",
        "tiers? <exists>",
        f"size = {len(tiers)}",
        "item []:",
    ]
    for number, (name, intervals) in enumerate(tiers, start=1):
        filled = _without_gaps(intervals, total)
        lines += [
            f"    item [{number}]:",
            '        class = "IntervalTier"',
            f"        name = {_quoted(name)}",
            "        xmin = 0",
            f"        xmax = {_number(total)}",
            f"        intervals: size = {len(filled)}",
        ]
        for index, (text, start, end) in enumerate(filled, start=1):
            lines += [
                f"        intervals [{index}]:",
                f"            xmin = {_number(start)}",
                f"            xmax = {_number(end)}",
                f"            text = {_quoted(text)}",
            ]
    return "\n".join(lines) + "\n"


def _separate(intervals: Sequence[Interval]) -> list[Interval]:
    """Praat and its readers refuse intervals without length, and those that overlap."""
    spans = separate_spans([(start, end) for _, start, end in intervals], _DIGITS)
    return [(text, *span) for (text, _, _), span in zip(intervals, spans, strict=True)]


def _without_gaps(intervals: Sequence[Interval], total: float) -> list[Interval]:
    filled: list[Interval] = []
    time = 0.0
    for text, start, end in intervals:
        if start > time:
            filled.append(("", time, start))
        filled.append((text, start, end))
        time = end
    if time < total or not filled:
        filled.append(("", time, total))
    return filled


def _number(seconds: float) -> str:
    return f"{seconds:.{_DIGITS}f}".rstrip("0").rstrip(".")


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


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
        normalise: as for `cut_with_alignment`.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        name: str,
        cuts: Mapping[str, Any],
        normalise: Callable[[str], str] = normal_form,
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.name = name
        self.cuts = cuts
        self._normalise = normalise
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
        """Write an utterance; with an UndividedWordsError of `cut_with_alignment`, nothing."""
        if self.kind == "lhotse":
            cut = self.cuts[utterance.id]
            self._manifest.write(cut_with_alignment(cut, utterance, self._normalise))
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


def location(folder: Path, kind: str, name: str) -> str:
    """The paths of the results of an `AlignmentWriter`, for messages."""
    if kind == "textgrid":
        return f"{folder / name}/*.TextGrid"
    if kind == "ctm":
        return f"{folder}/{name}-{{words,tokens}}.ctm"
    return str(folder / f"{name}_cuts.jsonl.gz")


def file_name(utterance: str) -> str:
    """An utterance id as a file name, different for each id.

    Some digits of a hash follow a name that `name_of_file` changes.
    """
    name = name_of_file(utterance, _MOST_BYTES)
    if name == utterance:
        return name
    return f"{name}-{hashlib.sha256(utterance.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class AlignmentPlace:
    """The folder for the alignments of a set.

    run: folder of the run.
    inputs: of the computation; `utterances` may still be empty.
    output: a folder that the user named; None for one in the run.
    """

    run: Path
    inputs: ResultInputs
    output: Path | None = None

    def check(self) -> None:
        """Raises UsageError if the named folder holds other alignments, before any are computed."""
        if self.output is None or not self.output.is_dir():
            return
        stored = self._stored(self.output)
        name = self.inputs.split
        if stored is None and (found := sorted(self.output.glob(f"{name}-scores.tsv"))):
            raise UsageError(
                f"--output {self.output} holds {found[0].name} of an earlier version, which would "
                "be overwritten: choose another folder"
            )
        if stored is not None and not stored.equals_up_to_rounding(
            replace(self.inputs, utterances=stored.utterances)
        ):
            raise UsageError(f"{self._held()}: choose another folder")

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A folder to write into, which is removed at the end."""
        parent = self.output or self._own()
        parent.mkdir(parents=True, exist_ok=True)
        # Not the process's number: those of several machines that share the folder may be equal.
        folder = parent / f".{self.inputs.split}.{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, unfinished: Path, utterances: str) -> Path:
        """Move finished files to their folder, which is returned.

        Args:
            utterances: digest of the aligned utterances.

        Raises:
            UsageError: the named folder holds alignments of other utterances; the message names
                the folder that the files are in.
        """
        inputs = replace(self.inputs, utterances=utterances)
        target, held = self.output or self._own() / inputs.stem(), ""
        stored = self._stored(target)
        if stored is not None and not stored.equals_up_to_rounding(inputs):
            held = self._held()
            target = target / inputs.stem()
        for path in sorted(unfinished.rglob("*")):
            if path.is_file():
                place = target / path.relative_to(unfinished)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        text = json.dumps(asdict(inputs), indent=2, ensure_ascii=False)
        write_lines(self._sidecar(target), [text])
        if held:
            raise UsageError(f"{held}: the new alignments are in {target}")
        return target

    def _own(self) -> Path:
        return RunFolder(self.run).alignments

    def _sidecar(self, folder: Path) -> Path:
        return folder / f"{self.inputs.split}-inputs.json"

    def _stored(self, folder: Path) -> ResultInputs | None:
        path = self._sidecar(folder)
        if not path.is_file():
            return None
        try:
            return ResultInputs.from_dict(read_json(path))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path} is damaged ({error}): choose another folder") from error

    def _held(self) -> str:
        stored = self._stored(self.output or self._own())
        about = "" if stored is None else f" by {stored.checkpoint} of model {stored.model}"
        return (
            f"--output {self.output} holds alignments of {self.inputs.split}{about}, which are "
            "those of another model, other data or texts, or another calibration"
        )
