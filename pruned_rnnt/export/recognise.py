"""Recognise audio files with the exported model in this folder; needs sherpa-onnx and soundfile.

    python recognise.py a.wav b.flac

Prints one line of JSON a file: text, tokens with their times in seconds, and the seconds that
recognising took.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import sherpa_onnx
import soundfile


def main() -> None:
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
    for path in options.audio:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        started = time.perf_counter()
        stream = recogniser.create_stream()
        stream.accept_waveform(rate, samples.mean(axis=1))
        # Less than one frame of the encoder would end the process.
        missing = int(settings["shortest_seconds"] * rate) + 1 - len(samples)
        if missing > 0:
            stream.accept_waveform(rate, np.zeros(missing, dtype=np.float32))
        if settings["streaming"]:
            result = _finish_stream(recogniser, stream, rate, settings["tail_seconds"])
        else:
            recogniser.decode_stream(stream)
            result = stream.result
        line = {
            "file": path,
            "text": result.text.strip(),
            "tokens": list(result.tokens),
            "timestamps": [round(second, 3) for second in result.timestamps],
            "audio_seconds": round(len(samples) / rate, 3),
            "elapsed_seconds": round(time.perf_counter() - started, 4),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)


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
    main()
