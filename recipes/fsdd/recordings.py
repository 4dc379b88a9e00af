"""Reads the folder of recordings, checks every file, and downloads the folder on request.

Axes: S audio samples.
"""

from __future__ import annotations

import re
import tarfile
import urllib.error
import wave
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
from lhotse.utils import resumable_download

from pruned_rnnt.data.prepare.prepare_report import SkippedFile

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SAMPLING_RATE = 8000
MIN_SECONDS = 0.05
ARCHIVE = "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/heads/master.tar.gz"

_NAME = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_]+)_(?P<index>\d+)\.wav")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One spoken digit. samples_S: float32 at 8 kHz."""

    digit: int
    speaker: str
    index: int
    samples_S: npt.NDArray[np.float32]


def recordings_folder(source: Path) -> Path:
    """`source` itself or its `recordings` folder, whichever contains the wav files.

    Raises FileNotFoundError if neither does.
    """
    for folder in (source / "recordings", source):
        if folder.is_dir() and any(folder.glob("*.wav")):
            return folder
    raise FileNotFoundError(
        f"no wav files in {source} or {source / 'recordings'}; --source needs a folder of "
        "{digit}_{speaker}_{index}.wav files"
    )


def read_recordings(source: Path) -> tuple[list[Recording], list[SkippedFile]]:
    """All usable recordings in `source`, in a fixed order, and the skipped files."""
    recordings, skipped = [], []
    for path in sorted(recordings_folder(source).glob("*.[wW][aA][vV]")):
        try:
            recordings.append(_read(path))
        except ValueError as error:
            skipped.append(SkippedFile(path=str(path), reason=str(error)))
    recordings.sort(key=lambda r: (r.speaker, r.digit, r.index))
    return recordings, skipped


def missing_recordings(recordings: Iterable[Recording]) -> list[str]:
    """Names of missing files: each speaker should have every digit of each of its indices."""
    found = {(r.speaker, r.index, r.digit) for r in recordings}
    indices = {(speaker, index) for speaker, index, _ in found}
    return [
        f"{digit}_{speaker}_{index}.wav"
        for speaker, index in sorted(indices)
        for digit in range(10)
        if (speaker, index, digit) not in found
    ]


def _read(path: Path) -> Recording:
    """Reads one file; raises ValueError with the reason if it cannot be used."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError("name is not {digit}_{speaker}_{index}.wav")
    if path.stat().st_size == 0:
        raise ValueError("empty file")
    try:
        # soundfile reads a truncated file without an error; the header has the full length.
        with wave.open(str(path)) as header:
            frames = header.getnframes()
        samples_SC, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (wave.Error, EOFError, soundfile.SoundFileError, OSError) as error:
        raise ValueError("not a readable PCM wav file") from error
    if rate != SAMPLING_RATE:
        raise ValueError(f"sampling rate {rate} Hz, needs {SAMPLING_RATE} Hz")
    if samples_SC.shape[1] != 1:
        raise ValueError(f"{samples_SC.shape[1]} channels, needs one")
    if samples_SC.shape[0] < frames:
        raise ValueError("truncated: fewer samples than the header says")
    if samples_SC.shape[0] < MIN_SECONDS * SAMPLING_RATE:
        raise ValueError(f"shorter than {MIN_SECONDS} s")
    if not samples_SC.any():
        raise ValueError("silent: every sample is zero")
    return Recording(
        digit=int(name["digit"]),
        speaker=name["speaker"],
        index=int(name["index"]),
        samples_S=samples_SC[:, 0],
    )


def download(folder: Path) -> Path:
    """Downloads the data set (about 15 MB) into `folder` and returns its recordings folder.

    Does nothing if the recordings exist already. Raises ValueError with the address if the
    download fails.
    """
    recordings = folder / "recordings"
    if recordings.is_dir() and any(recordings.glob("*.wav")):
        return recordings
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "fsdd.tar.gz"
    try:
        resumable_download(ARCHIVE, archive)
    except (urllib.error.URLError, OSError) as error:
        raise ValueError(
            f"could not download {ARCHIVE} ({error}); download it in another way, unpack it, and "
            "pass its recordings folder with --source"
        ) from error
    unfinished = folder / "recordings.unfinished"
    unfinished.mkdir(exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                # Only file names are taken from the archive, never its paths.
                file = Path(member.name)
                if member.isfile() and file.parent.name == "recordings" and file.suffix == ".wav":
                    content = tar.extractfile(member)
                    if content is not None:
                        (unfinished / file.name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        archive.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        raise ValueError(f"the download of {ARCHIVE} is damaged ({reason}); run again") from error
    unfinished.rename(recordings)
    return recordings
