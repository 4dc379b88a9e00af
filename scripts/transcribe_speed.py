"""Whole files in, text out: how many times faster than real time `pruned-rnnt transcribe` is.

    python -m scripts.transcribe_speed RUN                          a trained model
    python -m scripts.transcribe_speed --size medium                a Zipformer, random parameters
    python -m scripts.transcribe_speed --size medium decode.precision=bfloat16 \\
        decode.batch_seconds=3840 --files 4096 --keep

Makes wav files of 15 to 30 s (16 kHz, 16 bits) of noise whose level changes like that of speech,
and transcribes them to text files as the command does: reading, features, encoder, search, texts
and writing are all counted; loading the model and a first pass over some of the files, which
captures CUDA graphs, are not. Random models emit about 2.5 symbols a second. The row also has the
speed of reading alone, with the threads that the command uses. Times are medians of the repeats.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from pruned_rnnt.allocator import keep_freed_memory
from pruned_rnnt.config import load_config
from pruned_rnnt.data.audio.features import SAMPLING_RATE, batch_features
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encoder_passes import choose_passes
from pruned_rnnt.pretrained.load import load
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.transcribe.inputs import AudioInput
from pruned_rnnt.transcribe.recogniser import AudioRecogniser, Recogniser
from pruned_rnnt.transcribe.transcribe_command import run_transcribe
from scripts.benchmark.results import FOLDER, commit, machine
from scripts.decoding_speed import random_model
from scripts.documented_parser import documented_parser

_SHORTEST, _LONGEST = 15.0, 30.0
_EMITTING_FRAMES = 0.1
_METHODS = ("greedy", "modified_beam")


def noise(seconds: float, rng: np.random.Generator) -> FloatArray:
    """(S,) at 16 kHz: noise whose level goes up and down four times a second."""
    time_S = np.arange(int(SAMPLING_RATE * seconds)) / SAMPLING_RATE
    level_S = np.exp(2 * np.sin(2 * np.pi * 4 * time_S) - 5)
    samples_S: FloatArray = (level_S * rng.standard_normal(len(time_S))).astype(np.float32)
    return samples_S


def make_files(folder: Path, count: int) -> tuple[list[AudioInput], float]:
    """Write files of 15 to 30 s; returns them and their seconds in total."""
    rng = np.random.default_rng(0)
    # Cut from one stretch of noise, which takes long to make.
    stretch_S = noise(4 * _LONGEST, rng)
    inputs: list[AudioInput] = []
    total = 0
    for index in range(count):
        size = int(SAMPLING_RATE * rng.uniform(_SHORTEST, _LONGEST))
        begin = int(rng.integers(len(stretch_S) - size))
        path = folder / f"{index:06d}.wav"
        soundfile.write(path, stretch_S[begin : begin + size], SAMPLING_RATE, subtype="PCM_16")
        inputs.append(AudioInput(path, path.stem))
        total += size
    return inputs, total / SAMPLING_RATE


def random_recogniser(size: str, decode: DecodeConfig, device: torch.device) -> Recogniser:
    """A recogniser with a Zipformer of one of the paper's sizes and 500 symbols."""
    names = " ".join(f"word{index}" for index in range(497))
    tokenizer = train_tokenizer([names], TokenizerConfig(kind="word"))
    rng = np.random.default_rng(1)
    features_NTF, _ = batch_features([noise(20.0, rng)], torch.device("cpu"))
    model = random_model(
        size, len(tokenizer), features_NTF=features_NTF, emitting_frames=_EMITTING_FRAMES
    ).to(device)
    choose_passes(decode, model)
    return Recogniser(model, tokenizer, p99_duration=_LONGEST, decode=decode)


def transcribe(recogniser: AudioRecogniser, inputs: Sequence[AudioInput]) -> tuple[float, int]:
    """Seconds, and words in the texts."""
    with tempfile.TemporaryDirectory() as folder:
        options = argparse.Namespace(format="text", output=Path(folder), times=False)
        begin = time.perf_counter()
        with redirect_stdout(io.StringIO()):
            done = run_transcribe(recogniser, inputs, options)
        elapsed = time.perf_counter() - begin
        assert done
        words = sum(len(path.read_text().split()) - 1 for path in Path(folder).iterdir())
    return elapsed, words


def read(recogniser: AudioRecogniser, inputs: Sequence[AudioInput]) -> float:
    """Seconds for reading alone."""
    begin = time.perf_counter()
    with closing(recogniser.recordings(item.path for item in inputs)) as recordings:
        for _, parts in recordings:
            for _ in parts:
                pass
    return time.perf_counter() - begin


def measure(
    recogniser: AudioRecogniser, inputs: Sequence[AudioInput], audio_seconds: float, repeats: int
) -> dict[str, Any]:
    """The measured part of a row."""
    # Some batches of each shape, so that graphs are captured.
    transcribe(recogniser, inputs[: max(1, len(inputs) // 4)])
    found = [transcribe(recogniser, inputs) for _ in range(repeats)]
    elapsed = statistics.median(seconds for seconds, _ in found)
    return {
        "files": len(inputs),
        "audio_seconds": round(audio_seconds, 1),
        "words_per_second": round(found[0][1] / audio_seconds, 2),
        "times_real_time": round(audio_seconds / elapsed, 1),
        "reading_times_real_time": round(audio_seconds / read(recogniser, inputs), 1),
        "repeats": repeats,
    }


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.transcribe_speed", __doc__)
    options.add_argument("model", nargs="?", help="as for pruned-rnnt transcribe; else random")
    options.add_argument("settings", nargs="*", metavar="decode.key=value")
    options.add_argument("--size", default="medium", choices=("small", "medium", "large"))
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--methods", nargs="+", default=_METHODS, choices=_METHODS)
    options.add_argument("--files", type=int, default=1024, metavar="N")
    options.add_argument("--repeats", type=int, default=3, metavar="N")
    options.add_argument("--keep", action="store_true", help="append to results/transcribe.jsonl")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    keep_freed_memory()  # as the commands do
    settings = [*options.settings]
    if options.model is not None and options.model.startswith("decode."):
        settings.insert(0, options.model)
        options.model = None
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        inputs, audio_seconds = make_files(Path(folder), options.files)
        for method in options.methods:
            chosen = [*settings, f"decode.method={method}"]
            if options.model is None:
                config = load_config(ExperimentConfig, None, chosen).decode
                recogniser: AudioRecogniser = random_recogniser(options.size, config, device)
            else:
                recogniser = load(options.model, options.device, settings=chosen)
            assert recogniser.model is not None
            row = {
                "machine": machine(options.device),
                "method": method,
                "settings": sorted(settings),
                "batch_seconds": recogniser.batch_seconds,
                "parameters": sum(p.numel() for p in recogniser.model.parameters()),
                **measure(recogniser, inputs, audio_seconds, options.repeats),
                "load": round(os.getloadavg()[0], 1),
                "torch": torch.__version__,
                "commit": commit(),
                "date": time.strftime("%Y-%m-%d"),
            }
            line = json.dumps(row)
            print(line, flush=True)
            if options.keep:
                with (FOLDER / "transcribe.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
