"""Finds the result files of `pruned-rnnt decode` and reads their utterances."""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from pruned_rnnt.data.input.batch import Audio
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.scoring.error_rates import ErrorCounts, Transcript
from pruned_rnnt.decode.word_times import TimedWord
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.run.results import measurement_path, read_measurement
from pruned_rnnt.system.json_file import from_json

_METHODS = "|".join(get_args(get_type_hints(DecodeConfig)["method"]))
# The first lines of an errs file.
_ERRORS = re.compile(
    r"%(?P<metric>\w+) = (?P<percent>[\d.]+|nan)\n"
    r"Errors: (?P<ins>\d+) insertions, (?P<dels>\d+) deletions, (?P<subs>\d+) substitutions, "
    r"over (?P<words>\d+) reference words"
)
# Of results without a scores file: the split may contain hyphens; the setting starts with the
# search method.
_STEM = re.compile(rf"(?P<split>.+?)-(?P<setting>(?:{_METHODS})(?:-.*)?)")


class Token(NamedTuple):
    """A symbol of a hypothesis: name, start of its frame in seconds, log-probability."""

    name: str
    start: float
    log_prob: float


class ErrorSummary(NamedTuple):
    """The errors of a result as its errs file has them; percent: the error rate, or NaN."""

    metric: str
    percent: float
    errors: ErrorCounts


@dataclass(frozen=True, kw_only=True)
class ResultUtterance:
    """One utterance of a result file.

    transcript: in words, or in characters if the result counts characters.
    sentence: in words; None if these are unknown. language: code of the reference's; may be empty.
    words, tokens: of the hypothesis; empty if only the recogs file exists.
    audio: identity of the audio; None if it is unknown.
    """

    transcript: Transcript
    sentence: Transcript | None
    language: str = ""
    words: tuple[TimedWord, ...] = ()
    tokens: tuple[Token, ...] = ()
    audio: Audio | None = None


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """A decoded set.

    stem: of the names of its files.
    set_name: the split, with its data folder if that is not the run's own.
    setting: search, checkpoint and fingerprint, as in the names.
    inputs: None for results of version 0.1, and for those whose scores file is missing.
    data_path: the data folder, if that is not the run's own; else empty.
    """

    folder: Path
    stem: str
    set_name: str
    setting: str
    inputs: ResultInputs | None = None
    data_path: str = ""

    @property
    def split(self) -> str:
        return self.set_name if self.inputs is None else self.inputs.split

    @property
    def short_setting(self) -> str:
        """The setting without the fingerprint."""
        return self.setting.rpartition("-")[0] if self.inputs is not None else self.setting

    def matches(self, pattern: str) -> bool:
        """Whether the setting, with or without its fingerprint, matches a shell pattern."""
        names = (self.setting, self.short_setting)
        return any(fnmatchcase(name, pattern) for name in names)

    @property
    def nbest_path(self) -> Path:
        return self.folder / f"nbest-{self.stem}.jsonl"

    @property
    def recogs_path(self) -> Path:
        return self.folder / f"recogs-{self.stem}.txt"

    @property
    def delays_path(self) -> Path:
        return self.folder / f"delays-{self.stem}.jsonl"

    @property
    def modified(self) -> float:
        """When it was written, in seconds since 1970."""
        paths = [path for path in (self.nbest_path, self.recogs_path) if path.is_file()]
        return max((path.stat().st_mtime for path in paths), default=0.0)

    @property
    def counts_characters(self) -> bool:
        """True if its error rate is a CER."""
        summary = self.summary()
        if summary is not None:
            return summary.metric == "CER"
        return "-cer-" in f"-{self.setting}-"

    def summary(self) -> ErrorSummary | None:
        """The errors without reading the utterances; None without a readable errs file."""
        path = self.folder / f"errs-{self.stem}.txt"
        if not path.is_file():
            return None
        with path.open(encoding="utf-8", errors="replace") as file:
            found = _ERRORS.match(file.readline() + file.readline())
        if found is None:
            return None
        counts = ErrorCounts(
            insertions=int(found["ins"]),
            deletions=int(found["dels"]),
            substitutions=int(found["subs"]),
            reference_words=int(found["words"]),
        )
        # Earlier versions wrote 0.00 without reference words.
        percent = float(found["percent"]) if counts.reference_words else math.nan
        return ErrorSummary(found["metric"], percent, counts)

    def read(self) -> tuple[list[ResultUtterance], int]:
        """The utterances, and the number of damaged lines (of a file that is being written)."""
        if self.nbest_path.is_file():
            utterances, damaged = _read_nbest(self.nbest_path)
            if self.counts_characters:
                utterances = [_in_characters(utterance) for utterance in utterances]
            if utterances or not self.recogs_path.is_file():
                return utterances, damaged
        utterances, damaged = _read_recogs(self.recogs_path)
        if self.counts_characters:
            utterances = [replace(utterance, sentence=None) for utterance in utterances]
        return utterances, damaged


def find_results(run: Path, pattern: str = "*") -> list[ResultFile]:
    """The results of a run whose settings match the pattern, newest first."""
    folder = RunFolder(run).results
    stems = {path.stem.removeprefix("nbest-") for path in folder.glob("nbest-*.jsonl")}
    stems |= {path.stem.removeprefix("recogs-") for path in folder.glob("recogs-*.txt")}
    found = [_result_file(folder, stem) for stem in sorted(stems)]
    matching = [result for result in found if result.matches(pattern)]
    return sorted(matching, key=lambda result: (-result.modified, result.stem))


def _result_file(folder: Path, stem: str) -> ResultFile:
    try:
        measured = read_measurement(measurement_path(folder, stem))
        inputs, named = measured.inputs, measured.configuration
    except (OSError, ValueError):
        inputs, named = None, {}  # the utterances can still be read
    data, data_path = named.get("data"), ""
    if inputs is not None and not inputs.own_data and isinstance(data, dict):
        data_path = str(data.get("path", ""))
    if inputs is not None:
        set_name = inputs.set_name
        setting = f"{inputs.label}-{inputs.checkpoint}-{stem.rpartition('-')[2]}"
    else:
        match = _STEM.fullmatch(stem)
        set_name, setting = (match["split"], match["setting"]) if match else (stem, "")
    return ResultFile(
        folder=folder,
        stem=stem,
        set_name=set_name,
        setting=setting,
        inputs=inputs,
        data_path=data_path,
    )


def _read_nbest(path: Path) -> tuple[list[ResultUtterance], int]:
    # Not splitlines(), which also splits at the Unicode separators that a text may contain.
    utterances, damaged = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            utterances.append(_decoded(json.loads(text)))
        except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
            damaged += bool(text.strip())
    return utterances, damaged


def _decoded(line: Any) -> ResultUtterance:
    found = line["hypotheses"]
    best: dict[str, Any] = found[0] if found else {"text": "", "words": [], "tokens": []}
    transcript = Transcript(
        id=line["id"],
        reference=tuple(line["reference"].split()),
        hypothesis=tuple(best["text"].split()),
    )
    return ResultUtterance(
        transcript=transcript,
        sentence=transcript,
        language=str(line.get("language", "")),
        words=tuple(from_json(TimedWord, word) for word in best["words"]),
        tokens=tuple(
            from_json(Token, {"name": t["token"], "start": t["start"], "log_prob": t["score"]})
            for t in best["tokens"]
        ),
        audio=from_json(Audio, line["audio"]) if "audio" in line else None,
    )


def _in_characters(utterance: ResultUtterance) -> ResultUtterance:
    return replace(utterance, transcript=utterance.transcript.characters())


def _read_recogs(path: Path) -> tuple[list[ResultUtterance], int]:
    """The pairs of lines `id:<tab>ref=[...]` and `id:<tab>hyp=[...]`; other lines of an utterance,
    such as icefall's timestamps, are skipped. An utterance without the pair counts as damaged."""
    texts: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        name, _, rest = line.partition(":\t")
        kind, _, words = rest.partition("=")
        if not line.strip():
            continue
        sides = texts.setdefault(name, {})
        if kind in ("ref", "hyp") and (found := _word_list(words)) is not None:
            sides[kind] = found
    whole = {name: sides for name, sides in texts.items() if len(sides) == 2}
    transcripts = [
        Transcript(id=name, reference=sides["ref"], hypothesis=sides["hyp"])
        for name, sides in whole.items()
    ]
    utterances = [ResultUtterance(transcript=each, sentence=each) for each in transcripts]
    return utterances, len(texts) - len(whole)


def _word_list(text: str) -> tuple[str, ...] | None:
    """The words of a Python list; None if the text is no list of texts."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(isinstance(word, str) for word in found)
    return tuple(found) if is_list else None
