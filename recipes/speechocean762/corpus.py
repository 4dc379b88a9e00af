"""Finds the parts of the corpus on disk, and downloads it on request."""

from __future__ import annotations

import argparse
import tarfile
from dataclasses import dataclass
from pathlib import Path

from lhotse.utils import resumable_download, safe_extract

from pruned_rnnt.data.prepare.toolkit_sources import KaldiSource

NAME = "speechocean762"
ARCHIVE = f"https://www.openslr.org/resources/101/{NAME}.tar.gz"
KALDI_FILES = ("text", "wav.scp", "utt2spk")


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """A Kaldi data directory of the corpus. source: its utterances."""

    folder: Path
    source: KaldiSource


def find_parts(folder: Path, allow_commands: bool) -> dict[str, CorpusPart]:
    """The parts `train` and, if it is there, `test` of the corpus in `folder`.

    folder: the unpacked corpus with its folders train, test and WAVE; the folder above it; or a
        Kaldi data directory, which is the part `train`.
    allow_commands: as in `KaldiSource`.

    Raises ValueError naming the file that is missing.
    """
    if _has_kaldi_file(folder):
        return {"train": _part(folder, folder, allow_commands)}
    for corpus in (folder, folder / NAME):
        # wav.scp of a part names files below the corpus: WAVE/SPEAKER0001/000010011.WAV.
        found = {
            name: _part(corpus / name, corpus, allow_commands)
            for name in ("train", "test")
            if _has_kaldi_file(corpus / name)
        }
        if "train" in found:
            return found
    raise ValueError(
        f"{folder} has neither {', '.join(KALDI_FILES)} (a Kaldi data directory) nor a folder "
        f"train with them (the unpacked corpus); recipes/{NAME}/README.md describes the folder "
        "that --source needs"
    )


def _has_kaldi_file(folder: Path) -> bool:
    return any((folder / name).is_file() for name in KALDI_FILES)


def _part(folder: Path, audio_folder: Path, allow_commands: bool) -> CorpusPart:
    for name in KALDI_FILES:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / name} is missing; recipes/{NAME}/README.md describes the folder that "
                "--source needs"
            )
    return CorpusPart(
        folder=folder, source=KaldiSource(folder, allow_commands, audio_folder=audio_folder)
    )


def download(target: Path, options: argparse.Namespace) -> Path:
    """Downloads the corpus (520 MB) into `target` and unpacks it; returns its folder.

    Does nothing if it was unpacked there before. Raises OSError if the download fails, and
    ValueError if the archive is damaged.
    """
    folder = target / NAME
    finished = target / f".{NAME}.unpacked"
    if finished.is_file() and folder.is_dir():
        return folder
    target.mkdir(parents=True, exist_ok=True)
    archive = target / f"{NAME}.tar.gz"
    resumable_download(ARCHIVE, archive)
    try:
        with tarfile.open(archive) as tar:
            safe_extract(tar, target)
    except (tarfile.TarError, EOFError) as error:
        archive.unlink(missing_ok=True)
        raise ValueError(
            f"the download of {ARCHIVE} is damaged ({error}); run the same command again"
        ) from error
    finished.touch()
    return folder
