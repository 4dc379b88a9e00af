"""Make the model and the audio of the measurement: `python -m scripts.cold_start.inputs FOLDER`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.model_file import ModelFile, save_model
from scripts.transcribe_speed import make_files, random_recogniser

# Folder, number of files, and shortest and longest of them in seconds.
AUDIO = (("many", 704, (15.0, 30.0)), ("ten", 10, (10.0, 10.001)), ("one", 1, (10.0, 10.001)))


def main(folder: Path) -> None:
    """Write model.pt, a random Zipformer of 66 million parameters, and folders of wav files."""
    recogniser = random_recogniser("medium", DecodeConfig(), torch.device("cpu"))
    assert recogniser.model is not None
    parts = ModelFile(recogniser.model, recogniser.tokenizer)
    save_model(parts, folder / "model.pt", "random")
    for name, count, seconds in AUDIO:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        _, total = make_files(folder / name, count, seconds, None)
        print(f"{name}: {count} files, {total:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
