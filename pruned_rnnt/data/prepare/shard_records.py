"""Records the finished shards of an interrupted prepare, so that the next run can reuse them.

A record is written when a shard is complete. It holds a fingerprint of the shard's entries and
options; if these change, the shard is made again. Changed audio in a file of the same name is not
detected.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pruned_rnnt.data.prepare.shard_writer import Shard, ShardResult, manifest_name, write_shard
from pruned_rnnt.system.json_file import read_json

RECORDS = ".shards"
_NUMBERED = re.compile(r"\.(\d{6})\.|-(\d{6})\.")


def write_shard_once(shard: Shard) -> ShardResult:
    """Calls `write_shard`, or returns the recorded result if the same shard exists already."""
    record = shard.folder / RECORDS / f"{shard.split}-{shard.number:06d}.json"
    fingerprint = _fingerprint(shard)
    result = _recorded(record, fingerprint)
    if result is not None:
        manifest = shard.folder / manifest_name(shard.split, shard.number)
        if result.cuts == 0 or manifest.is_file():
            return result
    result = write_shard(shard)
    record.parent.mkdir(exist_ok=True)
    unfinished = record.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"made_of": fingerprint, "result": vars(result)}))
    unfinished.rename(record)
    return result


def delete_records(folder: Path) -> None:
    """Deletes the records of `folder`, so that the next run makes all shards again."""
    shutil.rmtree(folder / RECORDS, ignore_errors=True)


def remove_stale_shards(folder: Path, made: Collection[tuple[str, int]]) -> None:
    """Removes files of shards that are not in `made`, (split, number) pairs.

    An interrupted run with other options may have left them.
    """
    for path in [
        *folder.glob("*_cuts.*.jsonl.gz"),
        *folder.glob("features/*"),
        *folder.glob("*/*"),
    ]:
        number = _NUMBERED.search(path.name)
        if number is None or path.parent.name == RECORDS:
            continue
        split = path.parent.name
        if path.parent == folder:
            split = path.name.partition("_cuts.")[0]
        elif split == "features":
            split = path.name[: number.start()]
        if (split, int(number[1] or number[2])) not in made:
            path.unlink(missing_ok=True)


def _fingerprint(shard: Shard) -> str:
    digest = hashlib.blake2b(repr(shard.config).encode(), digest_size=16)
    for entry in shard.entries:
        values: dict[str, Any] = {**vars(entry), "cut": entry.cut and entry.cut.to_dict()}
        digest.update(repr(sorted(values.items())).encode())
    return digest.hexdigest()


def _recorded(record: Path, fingerprint: str) -> ShardResult | None:
    if not record.is_file():
        return None
    try:
        values = read_json(record)
        if values.get("made_of") != fingerprint:
            return None
        result: dict[str, Any] = values["result"]
        for name in ("rates", "channels"):
            result[name] = Counter({int(key): count for key, count in result[name].items()})
        for name in ("speakers", "languages"):
            result[name] = Counter(result[name])
        result["left_out"] = [tuple(item) for item in result["left_out"]]
        return ShardResult(**result)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # damaged: the shard is made again
