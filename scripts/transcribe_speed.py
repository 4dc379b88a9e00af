"""Whole files in, text out: how many times faster than real time `pruned-rnnt transcribe` is.

    python -m scripts.transcribe_speed RUN --recordings FOLDER      a trained model, its speech
    python -m scripts.transcribe_speed --size medium                a Zipformer, random parameters
    python -m scripts.transcribe_speed --size medium decode.precision=bfloat16 \\
        --batch-seconds 1920 3840 --seconds 15 15 --files 768 --keep

Makes wav files (16 kHz, 16 bits) of noise whose level changes like that of speech, or of recordings
joined until they are long enough, and transcribes them to text files as the command does: reading,
features, encoder, search, texts and writing are all counted, loading the model is not. Random
models emit 2.5 symbols a second. The first pass over the files, which compiles kernels and captures
CUDA graphs, is reported by itself; the speed is the median of the later ones. The row also has the
speed of reading alone, with the threads that the command uses, and the seconds of each stage of a
pass in which no stage overlaps with another one.
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
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor

from pruned_rnnt.config.load import load_config
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.features import SAMPLING_RATE, batch_features
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import choose_passes
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.word_times import FEATURE_SECONDS
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.pretrained.load import load
from pruned_rnnt.system.allocator import keep_freed_memory
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import SegmentConfig
from pruned_rnnt.transcribe.transcribe_command import AudioInput, run_transcribe
from scripts.benchmark.results import FOLDER, commit, machine
from scripts.documented_parser import documented_parser
from scripts.random_zipformer import SIZES, random_model
from scripts.transcribe_stages import timed_stages

_SYMBOLS_PER_SECOND = 2.5
_SECONDS = 20.0
_VOCABULARY = 500
_FORMATS = (".flac", ".ogg", ".wav")
_METHODS = ("greedy", "modified_beam")


def noise(seconds: float, rng: np.random.Generator) -> FloatArray:
    """(S,) at 16 kHz: noise whose level goes up and down four times a second."""
    time_S = np.arange(int(SAMPLING_RATE * seconds)) / SAMPLING_RATE
    level_S = np.exp(2 * np.sin(2 * np.pi * 4 * time_S) - 5)
    samples_S: FloatArray = (level_S * rng.standard_normal(len(time_S))).astype(np.float32)
    return samples_S


def joined(recordings: Path) -> FloatArray:
    """(S,) at 16 kHz: all audio files below a folder one after the other, shuffled."""
    paths = sorted(path for path in recordings.rglob("*") if path.suffix.lower() in _FORMATS)
    if not paths:
        raise ValueError(
            f"--recordings needs a folder with {', '.join(_FORMATS)} files, got {recordings}"
        )
    np.random.default_rng(0).shuffle(paths)  # type: ignore[arg-type]
    return np.concatenate([read_audio(path) for path in paths])


def make_files(
    folder: Path, count: int, seconds: tuple[float, float], recordings: Path | None = None
) -> tuple[list[AudioInput], float]:
    """Write files cut from noise or from recordings; returns them and their seconds in total.

    Args:
        seconds: of the shortest and of the longest file.
    """
    shortest, longest = seconds
    rng = np.random.default_rng(0)
    # Cut from one stretch, because noise takes long to make.
    stretch_S = noise(4 * longest, rng) if recordings is None else joined(recordings)
    if len(stretch_S) <= SAMPLING_RATE * longest:
        raise ValueError(
            f"--recordings has {len(stretch_S) / SAMPLING_RATE:.1f} s of speech, needs more than "
            f"the longest file (--seconds), {longest:.1f} s"
        )
    inputs: list[AudioInput] = []
    total = 0
    for index in range(count):
        size = int(SAMPLING_RATE * rng.uniform(shortest, longest))
        begin = int(rng.integers(len(stretch_S) - size))
        path = folder / f"{index:06d}.wav"
        soundfile.write(path, stretch_S[begin : begin + size], SAMPLING_RATE, subtype="PCM_16")
        inputs.append(AudioInput(path, path.stem))
        total += size
    return inputs, total / SAMPLING_RATE


@torch.inference_mode()
def emit_symbols(model: TransducerModel, features_NTF: Tensor) -> None:
    """Set the bias of blank so that greedy search emits 2.5 symbols a second for features."""
    frames_N = torch.tensor([features_NTF.size(1)])
    encoded_NTE, lengths_N = model.encode(features_NTF, frames_N)
    wanted = _SYMBOLS_PER_SECOND * features_NTF.size(1) * FEATURE_SECONDS
    bias = model.joiner.output_linear.bias
    search = GreedySearch(model, silent_symbols=[UNKNOWN_ID])
    step = 8.0
    for _ in range(12):
        (found,) = search(encoded_NTE, lengths_N)
        bias[0] += step if len(found.symbols) > wanted else -step
        step /= 2


def random_recogniser(
    size: str, decode: DecodeConfig, device: torch.device, *, causal: bool = False
) -> Recogniser:
    """A recogniser with a Zipformer of a size of `random_zipformer` and 500 symbols."""
    names = " ".join(f"word{index}" for index in range(_VOCABULARY - 3))
    tokenizer = train_tokenizer([names], TokenizerConfig(kind="word"))
    rng = np.random.default_rng(1)
    features_NTF, _ = batch_features([noise(_SECONDS, rng)], torch.device("cpu"))
    model = random_model(size, len(tokenizer), features_NTF=features_NTF, causal=causal)
    emit_symbols(model, features_NTF)
    model.to(device)
    choose_passes(decode, model)
    # The texts of a random model mean nothing, and the search for lost speech would decode most of
    # the noise again.
    segments = SegmentConfig(lost_speech="ignore")
    return Recogniser(model, tokenizer, decode=decode, segments=segments)


def transcribe(
    recogniser: AudioRecogniser, inputs: Sequence[AudioInput], kind: str
) -> tuple[float, int]:
    """Seconds of a pass, and words in the transcripts; kind: their format."""
    with tempfile.TemporaryDirectory() as folder:
        options = argparse.Namespace(format=kind, output=Path(folder), times=False, channel=None)
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
    recogniser: AudioRecogniser, inputs: Sequence[AudioInput], audio_seconds: float, options: Any
) -> dict[str, Any]:
    """The measured part of a row."""
    first, words = transcribe(recogniser, inputs, options.format)
    later = [transcribe(recogniser, inputs, options.format)[0] for _ in range(options.repeats)]
    reading = read(recogniser, inputs)
    with timed_stages(torch.device(options.device)) as stages:
        transcribe(recogniser, inputs, options.format)
    return {
        "files": len(inputs),
        "audio_seconds": round(audio_seconds, 1),
        "words_per_second": round(words / audio_seconds, 2),
        "first_times_real_time": round(audio_seconds / first, 1),
        "times_real_time": round(audio_seconds / statistics.median(later), 1),
        "reading_times_real_time": round(audio_seconds / reading, 1),
        "later_seconds": [round(seconds, 3) for seconds in later],
        "stage_seconds": {
            "reading": round(reading, 3),
            **{stage: round(seconds, 3) for stage, seconds in stages.items()},
        },
        "repeats": options.repeats,
    }


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.transcribe_speed", __doc__)
    options.add_argument("model", nargs="?", help="as for pruned-rnnt transcribe; else random")
    options.add_argument("settings", nargs="*", metavar="decode.key=value")
    options.add_argument("--size", default="medium", choices=SIZES)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--methods", nargs="+", default=_METHODS, choices=_METHODS)
    options.add_argument(
        "--recordings", type=Path, metavar="FOLDER", help="speech instead of noise"
    )
    options.add_argument("--files", type=int, default=1024, metavar="N")
    options.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=(15.0, 30.0),
        metavar=("SHORTEST", "LONGEST"),
        help="of the files (default: %(default)s)",
    )
    options.add_argument(
        "--batch-seconds",
        type=float,
        nargs="+",
        default=[None],
        metavar="SECONDS",
        help="decode.batch_seconds; several are measured one after the other",
    )
    options.add_argument(
        "--format",
        default="text",
        choices=("text", "jsonl"),
        help="of the transcripts: text, or jsonl with word times (default: %(default)s)",
    )
    options.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="passes after the first one"
    )
    options.add_argument("--keep", action="store_true", help="append to results/transcribe.jsonl")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    keep_freed_memory()  # as the commands do
    settings = [*options.settings]
    if options.model is not None and options.model.startswith("decode."):
        settings.insert(0, options.model)
        options.model = None
    with tempfile.TemporaryDirectory() as folder:
        inputs, audio_seconds = make_files(
            Path(folder), options.files, tuple(options.seconds), options.recordings
        )
        for method, batch_seconds in product(options.methods, options.batch_seconds):
            chosen = [*settings]
            if batch_seconds is not None:
                chosen.append(f"decode.batch_seconds={batch_seconds:g}")
            recogniser = _recogniser(options, [*chosen, f"decode.method={method}"])
            assert recogniser.model is not None
            row = {
                "machine": machine(options.device),
                "model": "random" if options.model is None else "trained",
                "audio": "noise" if options.recordings is None else "speech",
                "method": method,
                "settings": sorted(chosen),
                "format": options.format,
                "batch_seconds": recogniser.batch_seconds,
                "parameters": sum(p.numel() for p in recogniser.model.parameters()),
                **measure(recogniser, inputs, audio_seconds, options),
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


def _recogniser(options: argparse.Namespace, settings: Sequence[str]) -> AudioRecogniser:
    if options.model is not None:
        return load(options.model, options.device, settings=settings)
    config = load_config(ExperimentConfig, None, settings).decode
    return random_recogniser(options.size, config, torch.device(options.device))


if __name__ == "__main__":
    sys.exit(main())
