"""Runs `prepare own` on sound of several rates and formats, and reads what it made."""

from __future__ import annotations

import json
from pathlib import Path

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from tests.data.recorded_speech import write_audio

COUNT = 12


def prepare(source: Path, output: Path, *options: str) -> PreparedFolder:
    arguments = ["prepare", "own", str(source), "--output", str(output), "--tokens", "char"]
    assert pruned_rnnt([*arguments, "--num-jobs", "1", *options]) == 0
    return PreparedFolder(output)


def left_out(folder: PreparedFolder) -> dict[str, str]:
    """Reason by the name of the origin's last part."""
    lines = (folder.path / "left_out.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return {value["origin"].rpartition("/")[2]: value["reason"] for value in values}


def all_texts(folder: PreparedFolder) -> dict[str, str]:
    """Text by cut id, of all splits."""
    return {cut.id: cut_text(cut) for split in folder.splits() for cut in folder.cuts(split)}


def write_mixed_audio(folder: Path) -> Path:
    """Good files u0.flac, u1.wav ... of several rates, without texts."""
    for index in range(COUNT):
        rate = (16000, 8000, 22050, 44100)[index % 4]
        write_audio(path_of(folder, index), 0.5 + 0.053 * index, rate)
    return folder


def path_of(audio: Path, index: int) -> Path:
    return audio / f"u{index}{'.flac' if index % 3 == 0 else '.wav'}"
