"""Recognise audio files with the exported model in this folder; needs sherpa-onnx and soundfile.

    python recognise.py a.wav b.flac

Prints one line of JSON a file: text, tokens with their times in seconds, and the seconds that
recognising took. A file that cannot be read is named, and the others are done; exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import sherpa_onnx
import soundfile

# Nothing that records speech has a rate outside these; resampling from others takes much memory.
LOWEST_RATE, HIGHEST_RATE = 1000, 768_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("audio", nargs="+", help="wav, flac, ogg or mp3 files")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="of the model")
    parser.add_argument("--precision", choices=("fp32", "int8", "fp16"), default="fp32")
    parser.add_argument("--method", default="greedy_search", help="or modified_beam_search")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = json.loads((options.folder / "settings.json").read_text(encoding="utf-8"))
    suffix = "" if options.precision == "fp32" else f".{options.precision}"
    files = {
        name: str(options.folder / f"{name}{suffix}.onnx")
        for name in ("encoder", "decoder", "joiner")
    }
    kind = sherpa_onnx.OnlineRecognizer if settings["streaming"] else sherpa_onnx.OfflineRecognizer
    recogniser = kind.from_transducer(
        **files,
        tokens=str(options.folder / "tokens.txt"),
        num_threads=options.threads,
        sample_rate=settings["sample_rate"],
        feature_dim=settings["feature_dim"],
        decoding_method=options.method,
        model_type=settings["model_type"],
    )
    code = 0
    for path in options.audio:
        try:
            samples, rate = _read(path)
        except (OSError, ValueError, MemoryError, soundfile.SoundFileError) as error:
            print(f"{path} cannot be read: {error or type(error).__name__}", file=sys.stderr)
            code = 1
            continue
        started = time.perf_counter()
        result = None
        # Of audio without any noise a model may make words.
        if samples.any():
            result = _recognise(recogniser, samples, rate, settings)
        line = {
            "file": path,
            "text": result.text.strip() if result else "",
            "tokens": list(result.tokens) if result else [],
            "timestamps": [round(second, 3) for second in result.timestamps] if result else [],
            "audio_seconds": round(len(samples) / rate, 3),
            "elapsed_seconds": round(time.perf_counter() - started, 4),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)
    return code


def _read(path: str) -> tuple[Any, int]:
    """Samples of one channel, and their rate."""
    with _without_decoder_notes(), soundfile.SoundFile(path) as file:
        rate = file.samplerate
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            limits = f"{LOWEST_RATE:,} to {HIGHEST_RATE:,} Hz"
            raise ValueError(f"sampling rate is {rate:,} Hz, needs {limits}")
        samples = file.read(dtype="float32", always_2d=True).mean(axis=1)
    if not len(samples):
        raise ValueError("no samples")
    if not np.isfinite(samples).all():
        raise ValueError("NaN or infinite samples")
    return samples, rate


@contextmanager
def _without_decoder_notes() -> Iterator[None]:
    """Drops what libmpg123 prints on standard error about damaged mp3."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _recognise(recogniser: Any, samples: Any, rate: int, settings: dict[str, Any]) -> Any:
    stream = recogniser.create_stream()
    stream.accept_waveform(rate, samples)
    # Less than one frame of the encoder would end the process.
    missing = int(settings["shortest_seconds"] * rate) + 1 - len(samples)
    if missing > 0:
        stream.accept_waveform(rate, np.zeros(missing, dtype=np.float32))
    if settings["streaming"]:
        return _finish_stream(recogniser, stream, rate, settings["tail_seconds"])
    recogniser.decode_stream(stream)
    return stream.result


def _finish_stream(recogniser: Any, stream: Any, rate: int, tail_seconds: float) -> Any:
    """A quiet room at the end lets the last chunk with speech become full.

    Digital silence is what few models have heard; some take it for a word.
    """
    noise = 1e-3 * np.random.default_rng(0).standard_normal(int(tail_seconds * rate))
    stream.accept_waveform(rate, noise.astype(np.float32))
    stream.input_finished()
    while recogniser.is_ready(stream):
        recogniser.decode_stream(stream)
    return recogniser.get_result_all(stream)


if __name__ == "__main__":
    sys.exit(main())
