"""The prepared folder, which every recipe writes and training reads.

    DIR/train_cuts.jsonl.gz   a lhotse CutSet per split (train, dev, test, ...); or several of them,
                              train_cuts.000000.jsonl.gz and so on, which training streams
    DIR/features/  DIR/audio/ files of the cuts, with paths relative to DIR
    DIR/tokens/               tokens.model and tokens.txt
    DIR/prepare.json          recipe, options, counts, and utterances left out with the reasons

Because the paths are relative, the folder can be moved.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from lhotse import CutSet, MonoCut
from lhotse.utils import fastcopy

from pruned_rnnt.data.input.manifest_items import manifest_items
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.licences.chain import Licence, Origin
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from pruned_rnnt.system.folders import empty_folder
from pruned_rnnt.system.json_file import damaged, from_json, read_json

logger = logging.getLogger(__name__)

REPORT_NAME = "prepare.json"
_DIGITS = 16
_LICENCE_ADVICE = (
    "it needs the texts id, source and note; the command that prepared the folder writes them"
)
_MANIFEST = re.compile(r"(.+)_cuts(?:\..+)?\.jsonl\.gz")


@dataclass(frozen=True)
class PreparedFolder:
    """Reads the prepared folder at `path`. allow_commands: as in `manifest_items`."""

    path: Path
    allow_commands: bool = False

    def splits(self) -> list[str]:
        """The names of the splits on disk, sorted."""
        names = [_MANIFEST.fullmatch(file.name) for file in self.path.glob("*_cuts.*jsonl.gz")]
        return sorted({name[1] for name in names if name})

    def cuts_path(self, split: str) -> Path:
        return self.path / f"{split}_cuts.jsonl.gz"

    def manifests(self, split: str) -> list[Path]:
        """The manifest of a split, or the manifests of its shards in order.

        Several splits with commas between their names are one, in their order. Raises
        FileNotFoundError naming the file and the existing splits.
        """
        if "," in split:
            return [path for name in split.split(",") for path in self.manifests(name)]
        path = self.cuts_path(split)
        if path.is_file():
            return [path]
        shards = sorted(self.path.glob(f"{glob.escape(split)}_cuts.*.jsonl.gz"))
        if not shards:
            found = ", ".join(self.splits())
            advice = "name one of these, or run" if found else "run"
            raise FileNotFoundError(
                f"no split {split!r} at {path} (splits found: {found or 'none'}); {advice} "
                "`pruned-rnnt prepare`"
            )
        numbers = {shard: n for shard in shards if (n := _number(shard)) is not None}
        if not numbers:
            return shards  # of another program, which need not number them
        # Files without a number beside numbered shards may be copies.
        if others := [shard.name for shard in shards if shard not in numbers]:
            _warn_once(
                f"{self.path}: {len(others)} shards without a number in their names are not read "
                f"({', '.join(others[:3])}{', ...' * (len(others) > 3)}): to use them, rename them "
                f"to {split}_cuts.{max(numbers.values()) + 1:06d}.jsonl.gz and so on; otherwise "
                "move them elsewhere"
            )
        if (self.path / REPORT_NAME).is_file():
            known = set(numbers.values())
            missing = next(n for n in count() if n not in known)
            if missing < max(known):
                # Not an error: prepare writes no manifest for a shard without usable utterances.
                _warn_once(
                    f"{self.path / split}_cuts.{missing:06d}.jsonl.gz is missing, and later shards "
                    "exist: copy the folder again, unless prepare left out all utterances of that "
                    f"shard (see {self.path / 'left_out.jsonl'})"
                )
        return list(numbers)

    def cuts(self, split: str, *, lazy: bool = False) -> CutSet:
        """The cuts of a split, with absolute paths. `lazy` streams them from the manifest.

        Raises FileNotFoundError naming the file and the existing splits; ValueError naming the
        line of a manifest that cannot be read.
        """
        chain = _Chain(self.manifests(split), self.allow_commands)
        cuts = CutSet(chain).map(self.make_absolute())
        return cuts if lazy else cuts.to_eager()

    def make_absolute(self) -> PathPrefix:
        """A function that makes the paths of a cut of this folder absolute."""
        return PathPrefix(str(self.path.resolve()))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; FileNotFoundError if there is none."""
        return Tokenizer.load(self.path / "tokens")

    def report(self) -> dict[str, Any]:
        """The contents of prepare.json."""
        return read_json(self.path / REPORT_NAME)

    def origin(self) -> Origin:
        """The data as a part of a model's chain; their licence is unknown without prepare.json.

        Raises ValueError if prepare.json is damaged.
        """
        name, path = self.path.resolve().name, self.path / REPORT_NAME
        if not path.is_file():
            return Origin(kind="data", name=name)
        report = self.report()
        try:
            licence = from_json(Licence, report.get("licence", {}))
        except TypeError as error:
            raise damaged(path, f"licence: {error}", _LICENCE_ADVICE) from error
        counts = json.dumps([report.get("recipe"), report.get("splits")], sort_keys=True)
        digest = hashlib.sha256(counts.encode()).hexdigest()[:_DIGITS]
        return Origin(kind="data", name=name, licence=licence, digest=f"counts:{digest}")


def _number(shard: Path) -> int | None:
    number = shard.name.removesuffix(".jsonl.gz").rpartition(".")[2]
    return int(number) if number.isdecimal() else None


@cache  # a training asks for the shards several times
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


class _Chain:
    """Streams the cuts of several manifests."""

    def __init__(self, manifests: Sequence[Path], allow_commands: bool) -> None:
        self.manifests = manifests
        self.allow_commands = allow_commands

    def __iter__(self) -> Iterator[Any]:
        for manifest in self.manifests:
            for _, cut in manifest_items(manifest, self.allow_commands):
                yield cut


class PathPrefix:
    """Makes the relative paths of a cut absolute; a class, because workers need to pickle it.

    As lhotse's methods with `_path_prefix`, which take a fifth of the time of reading a manifest;
    they remain for cuts that are mixed.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, cut: Any) -> Any:
        if isinstance(cut, MonoCut):
            changes: dict[str, Any] = {}
            if cut.features is not None and not _is_absolute(cut.features.storage_path):
                path = f"{self.root}{os.sep}{cut.features.storage_path}"
                changes["features"] = fastcopy(cut.features, storage_path=path)
            if cut.recording is not None and any(map(_is_relative, cut.recording.sources)):
                changes["recording"] = cut.recording.with_path_prefix(self.root)
            return fastcopy(cut, **changes) if changes else cut
        if cut.has_features:
            cut = cut.with_features_path_prefix(self.root)
        if cut.has_recording:
            cut = cut.with_recording_path_prefix(self.root)
        return cut


def _is_absolute(path: str) -> bool:
    return os.path.isabs(path)  # noqa: PTH117, a Path takes ten times as long


def _is_relative(source: Any) -> bool:
    return source.type == "file" and not _is_absolute(source.source)


def read_cuts(path: Path, allow_commands: bool = False) -> CutSet:
    """Streams the cuts of a manifest; relative paths start at its folder if that is a prepared one.

    allow_commands: as in `manifest_items`.

    Raises FileNotFoundError naming the manifest; ValueError naming a line that cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no manifest of cuts at {path}")
    cuts = CutSet(_Chain([path], allow_commands))
    if (path.parent / REPORT_NAME).is_file():
        cuts = cuts.map(PreparedFolder(path.parent).make_absolute())
    return cuts


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes `folder`/prepare.json."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    # Names of files that are not UTF-8 become escapes of JSON.
    (folder / REPORT_NAME).write_text(text, encoding="utf-8", errors="backslashreplace")


def check_output(output: Path) -> None:
    """Raises ValueError if `output` contains other files than prepared data, which are not ours to
    delete."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a folder, got the file {output}")
    if output.is_dir() and any(output.iterdir()) and not (output / REPORT_NAME).is_file():
        raise ValueError(
            f"output {output} exists and has no {REPORT_NAME}, so `pruned-rnnt prepare` did not "
            "write it; choose another folder or empty it"
        )


@contextmanager
def building(output: Path | str, resume: str = "") -> Iterator[Path]:
    """Yields an empty folder next to `output`, and renames it to `output` if there was no error.

    An earlier prepared folder at `output` is replaced at the very end; after an error or a kill it
    still exists unchanged.

    Args:
        resume: name of a file or folder by which an interrupted run marks that the next run can
            resume; the folder is then not emptied.

    Raises:
        ValueError: as `check_output`, or another process is building the same folder.
    """
    output = Path(output)
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.unfinished")
    replaced = output.with_name(f"{output.name}.replaced")
    unfinished.mkdir(exist_ok=True)
    with exclusive_folder_lock(unfinished, "is being written"):
        if not (resume and (unfinished / resume).exists()):
            empty_folder(unfinished)
        is_whole = (replaced / REPORT_NAME).is_file()
        if is_whole and not output.exists():  # killed between the two renames below
            replaced.rename(output)
        if replaced.exists():
            _remove(replaced)
        yield unfinished
        if output.exists():
            output.rename(replaced)
        unfinished.rename(output)
    with suppress(OSError):
        _remove(replaced)


def _remove(replaced: Path) -> None:
    """Delete an earlier folder; what is left after a kill is known by the missing report."""
    (replaced / REPORT_NAME).unlink(missing_ok=True)
    shutil.rmtree(replaced)
