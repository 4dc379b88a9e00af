"""Random access to the members of a lhotse Shar, by byte ranges in its tar files.

lhotse reads a Shar sequentially, with all audio. Here the sampler reads manifests only, and workers
read the data of their batches. This works because tar files are not compressed, so a member is a
range of bytes. Any number of workers and exact resuming work as with other data, and
`CutSet.from_shar` can still read the folder.

    DIR/SPLIT/cuts.000000.jsonl.gz, features.000000.tar or recording.000000.tar   lhotse's Shar
    DIR/SPLIT_cuts.000000.jsonl.gz                                 the same cuts, with byte ranges
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lhotse import AudioSource, CutSet
from lhotse.shar import SharWriter
from lhotse.utils import fastcopy

# Custom field of a cut with the range of its audio: [first byte, number of bytes].
_AUDIO_RANGE = "audio_range"


def open_shar_writer(folder: Path, split: str, number: int, field: str) -> Any:
    """Lhotse's writer of shard `number` of "features" or "recording": a context manager."""
    (folder / split).mkdir(exist_ok=True)
    return SharWriter(
        str(folder / split),
        fields={field: "lilcom" if field == "features" else "flac"},
        shard_size=None,
        shard_suffix=f".{number:06d}",
        warn_unused_fields=False,
    )


def cuts_with_byte_ranges(folder: Path, split: str, number: int, field: str) -> Iterator[Any]:
    """The cuts of a finished shard, with byte ranges in its tar file; paths start at `folder`.

    Raises ValueError if manifest and tar file do not contain the same cuts.
    """
    tar_path = f"{split}/{field}.{number:06d}.tar"
    cuts = CutSet.from_jsonl_lazy(folder / split / f"cuts.{number:06d}.jsonl.gz")
    for cut, (name, offset, size) in zip(cuts, _members(folder / tar_path), strict=True):
        if name != cut.id:
            raise ValueError(f"{folder / tar_path} has {name}, but the manifest has {cut.id}")
        if field == "features":
            features = replace(
                cut.features,
                # For this reader one lilcom matrix in a larger file is a single chunk.
                storage_type="lilcom_chunky",
                storage_path=tar_path,
                storage_key=f"{offset},{size}",
            )
            yield fastcopy(cut, features=features, recording=None)
        else:
            source = AudioSource(type="file", channels=[cut.channel], source=tar_path)
            yield fastcopy(
                cut,
                recording=fastcopy(cut.recording, sources=[source]),
                features=None,
                custom={**(cut.custom or {}), _AUDIO_RANGE: [offset, size]},
            )


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields (name without suffix, offset, size) for every data member."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            if not member.name.endswith((".json", ".nometa")):
                yield member.name.rpartition(".")[0], member.offset_data, member.size


def with_shar_audio(cut: Any) -> Any:
    """The cut with its audio read into memory if it is in a tar file, else the cut unchanged.

    Raises OSError if the tar file is missing or too short.
    """
    byte_range = (getattr(cut, "custom", None) or {}).get(_AUDIO_RANGE)
    if byte_range is None:
        return cut
    source = cut.recording.sources[0]
    offset, size = byte_range
    with Path(source.source).open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) < size:
        raise OSError(f"{source.source} ends before byte {offset + size}")
    in_memory = AudioSource(type="memory", channels=source.channels, source=data)
    # Mixing keeps the custom fields of a cut, but this range does not apply to the mixture.
    rest = {name: value for name, value in cut.custom.items() if name != _AUDIO_RANGE}
    return fastcopy(cut, recording=fastcopy(cut.recording, sources=[in_memory]), custom=rest)
