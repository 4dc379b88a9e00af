"""The chain of a model: the data and weights that it was made from, with licences and hashes.

A run and an exported folder hold it as licences.json, a model file inside of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.licences.terms import TERMS, UNKNOWN, contradiction, demands, spdx
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.json_file import damaged, from_json, read_json
from pruned_rnnt.system.whole_files import write_lines

# Inside words of some scripts.
_JOINERS = "\u200c\u200d"
# What an error proposes, the freest first.
_PROPOSED = (
    "Apache-2.0",
    "CC-BY-4.0",
    "CC-BY-SA-4.0",
    "CC-BY-NC-4.0",
    "CC-BY-NC-SA-4.0",
    "CC-BY-NC-ND-4.0",
)
_ADVICE = "restore it from a copy, because nothing else names all that the model was made from"
_NONE_FITS = "No usual one fits: "


@dataclass(frozen=True, kw_only=True)
class Licence:
    """A licence, and where the licensed work comes from.

    id: SPDX identifier, another name, or `unknown`.
    source: an address or words.
    note: what the licence demands, if it is not in `TERMS`.
    """

    id: str = UNKNOWN
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        _keep_one_line(self)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Data or weights that a model was made from.

    kind: `data` or `weights`.
    name: of the prepared folder, the run or the file, without its path.
    digest: names the contents. Of weights, `sha256:` and that of the file, or `parameters:` and the
        fingerprint of the parameters' values; of data, `counts:` and that of their counts.
    """

    kind: str
    name: str
    licence: Licence = field(default_factory=Licence)
    digest: str = ""

    def __post_init__(self) -> None:
        _keep_one_line(self)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model's own licence and all that it was made from, the oldest first.

    reason: why the licence may be given although it contradicts a licence of the chain.
    """

    licence: str = UNKNOWN
    reason: str = ""
    origins: tuple[Origin, ...] = ()

    def __post_init__(self) -> None:
        _keep_one_line(self)

    def contradictions(self) -> list[str]:
        """A line for each origin whose licence the model's own contradicts."""
        lines = []
        for origin in self.origins:
            if reason := contradiction(spdx(self.licence), spdx(origin.licence.id)):
                lines.append(f"{origin.kind} {origin.name} ({origin.licence.id}): {reason}")
        return lines

    def unchecked(self) -> list[str]:
        """A line for each origin whose terms are not known."""
        return [
            f"{origin.kind} {origin.name}: "
            + ("the licence is unknown" if origin.licence.id == UNKNOWN else origin.licence.id)
            for origin in self.origins
            if spdx(origin.licence.id) not in TERMS
        ]

    def check(self) -> None:
        """Raise ConfigError if the licence contradicts the chain and no reason is given."""
        found = self.contradictions()
        if not found or self.reason.strip():
            return
        fitting = [name for name in _PROPOSED if not replace(self, licence=name).contradictions()]
        raise ConfigError(
            f"card.license={self.licence} contradicts what the model was made from:\n"
            + "".join(f"  {line}\n" for line in found)
            + (f"Choose one that fits, such as {fitting[0]}, or " if fitting else _NONE_FITS)
            + "say in card.license_reason why it may be given; the card shows the reason"
        )

    def lines(self) -> list[str]:
        """The chain in words, a line for each part."""
        lines = [f"licence {self.licence}" + (f" ({self.reason})" if self.reason else "")]
        for origin in self.origins:
            licence = origin.licence
            parts = [licence.id, demands(spdx(licence.id)), licence.note, licence.source]
            known = "; ".join(part for part in (*parts, origin.digest) if part)
            lines.append(f"{origin.kind} {origin.name}: {known}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "origins": [asdict(origin) for origin in self.origins]}

    def write(self, folder: Path) -> None:
        """Write licences.json."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        write_lines(RunFolder(folder).licences, [text])


def _keep_one_line(record: Licence | Origin | Chain) -> None:
    """Make each text of a record one line without control characters.

    The files may come from somebody else: a text could add lines to a card, or act on a terminal.
    """
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, str):
            shown = "".join(c if c.isprintable() or c in _JOINERS else " " for c in value)
            object.__setattr__(record, each.name, " ".join(shown.split()))


def chain_from(values: Any, path: Path) -> Chain:
    """A chain from plain values.

    Raises:
        ValueError: a value has the wrong type; the message names `path` and the key.
    """
    try:
        return from_json(Chain, values)
    except TypeError as error:
        raise damaged(path, error, _ADVICE) from error


def read_chain(folder: Path) -> Chain | None:
    """That of licences.json in the folder; None if there is none.

    Raises:
        ValueError: the file is damaged.
    """
    path = RunFolder(folder).licences
    return chain_from(read_json(path, _ADVICE), path) if path.is_file() else None


def merged(*parts: Iterable[Origin]) -> tuple[Origin, ...]:
    """All origins once, in order; one with a licence replaces the same one without."""
    found: dict[tuple[str, str, str], list[Origin]] = {}
    for origin in (origin for part in parts for origin in part):
        same = found.setdefault((origin.kind, origin.name, origin.digest), [])
        if origin in same or (same and origin.licence.id == UNKNOWN):
            continue
        same[:] = [*(each for each in same if each.licence.id != UNKNOWN), origin]
    return tuple(origin for same in found.values() for origin in same)


def chain_of_weights(
    path: Path, licence: Licence | None = None, source: str = ""
) -> tuple[Origin, ...]:
    """A file of weights, after what licences.json beside it says that they were made from.

    Args:
        licence: of the weights, and their source; None: that of licences.json, or unknown.
        source: of the weights, without `licence`.
    """
    beside = read_chain(path.parent) or Chain()
    with path.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    own = Origin(
        kind="weights",
        name=path.name,
        licence=licence or Licence(id=beside.licence, source=source, note=beside.reason),
        digest=digest,
    )
    return merged(beside.origins, [own])


def add_origins(folder: Path, origins: Sequence[Origin]) -> None:
    """Write the origins to licences.json of a run, beside those that are there."""
    known = read_chain(folder) or Chain()
    replace(known, origins=merged(known.origins, origins)).write(folder)
