"""Throughput of live streams that are decoded together.

    python -m scripts.stream_speed --streams 8 --threads 2
    python -m scripts.stream_speed --streams 1000 --device cuda
    python -m scripts.stream_speed exp/causal --streams 8 --method modified_beam
    python -m scripts.stream_speed --streams 8 --silent --warm-up 60

Without RUN, a causal Zipformer of `--size` with random parameters and 500 symbols. Every stream
gets noise in packets, and the streams start at different times within a chunk; with --silent, up to
a second of noise and then digital silence, such as a muted microphone's. After each packet, all
streams with a full chunk are decoded, and their texts are read. Prints the real-time factor
(seconds of computation for one second of all streams together; below 1, the machine keeps up), the
time from a packet to its results, the processor time for the same second (other work on the machine
raises only the factor), and memory. --rows appends this to a file of rows for the table of streams.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pruned_rnnt import load
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from scripts.benchmark.results import commit, machine
from scripts.random_zipformer import SIZES
from scripts.transcribe_speed import random_recogniser


class Speed(NamedTuple):
    """Seconds of audio of each stream, of computation for each packet, and of all processors."""

    seconds: float
    steps: list[float]
    processors: float

    @property
    def factor(self) -> float:
        """Seconds of computation for a second of audio of all streams."""
        return sum(self.steps) / self.seconds


def measure(
    recogniser: AudioRecogniser,
    streams: int,
    seconds: float,
    packet: float,
    *,
    chunk: int = 0,
    warm_up_seconds: float = 2.0,
    silent: bool = False,
) -> Speed:
    """Decode all streams for so many seconds of audio, after some without measurement."""
    rng, size = np.random.default_rng(0), round(packet * SAMPLING_RATE)
    noise_S = (0.05 * rng.standard_normal(SAMPLING_RATE)).astype(np.float32)
    each = [recogniser.stream(chunk=chunk) for _ in range(streams)]
    for stream in each:
        stream.accept_waveform(noise_S[: int(rng.integers(1, SAMPLING_RATE))])
    steps: list[float] = []
    processors = 0.0
    warm_up, measured = (math.ceil(part / packet) for part in (warm_up_seconds, seconds))
    if silent:
        noise_S = np.zeros_like(noise_S)
    for place in range(warm_up + measured):
        if place == warm_up:
            processors = time.process_time()
        begin = int(rng.integers(SAMPLING_RATE))
        samples_S = noise_S[np.arange(begin, begin + size) % SAMPLING_RATE]
        started = time.perf_counter()
        for stream in each:
            stream.accept_waveform(samples_S)
        while ready := recogniser.step(each):
            for stream in ready:
                stream.take_finals()
                str(stream.partial)
        steps.append(time.perf_counter() - started)
    return Speed(measured * packet, steps[warm_up:], time.process_time() - processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of audio")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds of audio before them")
    parser.add_argument("--silent", action="store_true", help="digital silence instead of noise")
    parser.add_argument("--packet", type=float, default=0.1, help="seconds")
    parser.add_argument("--chunk", type=int, default=0, help="encoder frames of 40 ms")
    parser.add_argument("--method", choices=("greedy", "modified_beam"), default="greedy")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.run is None:
        decode = DecodeConfig(method=options.method, precision=options.precision)
        device = torch.device(options.device)
        recogniser: AudioRecogniser = random_recogniser(options.size, decode, device, causal=True)
    else:
        settings = [f"decode.method={options.method}", f"decode.precision={options.precision}"]
        recogniser = load(options.run, options.device, settings=settings)
    speed = measure(
        recogniser,
        options.streams,
        options.seconds,
        options.packet,
        chunk=options.chunk,
        warm_up_seconds=options.warm_up,
        silent=options.silent,
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    p50, p99 = np.percentile(speed.steps, (50, 99))
    print(
        f"{options.streams} streams, {options.method}, {options.precision}, {options.device}: "
        f"real-time factor {speed.factor:.3f}, time to results p50 {1000 * p50:.0f} ms, "
        f"p99 {1000 * p99:.0f} ms, "
        f"processor time {speed.processors / speed.seconds:.3f}, {memory:.0f} MiB"
    )
    if options.rows is not None:
        row = {
            "table": "streams",
            "device": machine(options.device),
            "torch": torch.__version__,
            "commit": commit(),
            "date": f"{date.today():%Y-%m-%d}",
            "columns": {
                "device": machine(options.device),
                "streams": str(options.streams),
                "model": options.run or f"{options.size} Zipformer, random",
                "audio": "digital silence" if options.silent else "noise",
                "search": options.method,
                "real-time factor of all": f"{speed.factor:.3f}",
                "packet to results, p50 and p99": f"{1000 * p50:.0f} and {1000 * p99:.0f} ms",
                "processor time for a second of all": f"{speed.processors / speed.seconds:.2f} s",
            },
        }
        with options.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    if options.device.startswith("cuda"):
        print(f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB on the GPU")


if __name__ == "__main__":
    main()
