"""Real-time factors of decoding: every search at several batch sizes, on the CPU or a GPU.

    python -m scripts.decoding_speed exp/fsdd                       a trained model
    python -m scripts.decoding_speed --size medium --device cuda    a Zipformer, random parameters
    python -m scripts.decoding_speed ... --json rows.jsonl          also append rows to a file

Utterances are random features of one length; how long encoder and searches take does not depend on
what is said. Times are medians over the repetitions, after one that is not counted (in which CUDA
graphs are captured), and end when the results are on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.decode.search import DecodeConfig, build_search
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.transducer import ModelConfig, TransducerModel
from pruned_rnnt.model.zipformer.config import ZipformerConfig
from pruned_rnnt.train.run import load_model, run_config

METHODS = ("greedy", "modified_beam")
FRAMES_PER_SECOND = 100


def random_model(size: str, vocab_size: int, device: torch.device) -> TransducerModel:
    """A Zipformer transducer of one of the paper's sizes."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=ZipformerConfig(size=size), predictor=PredictorConfig(dim=512), joiner_dim=512
    )
    return TransducerModel(config, vocab_size).to(device).eval()


def median_seconds(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median time of `work`, and of what it left to do on the device."""

    def timed() -> float:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed()
    return statistics.median(timed() for _ in range(repeat))


@torch.inference_mode()
def measure(
    model: TransducerModel, method: str, batch_size: int, seconds: float, repeat: int
) -> dict[str, Any]:
    """One row: a search at one batch size, after the encoder."""
    device = next(model.parameters()).device
    frames = round(FRAMES_PER_SECOND * seconds)
    bins = model.config.encoder.num_mel_bins
    generator = torch.Generator().manual_seed(1)
    features_NTF = torch.randn(batch_size, frames, bins, generator=generator).to(device)
    lengths_N = torch.full((batch_size,), frames)
    search = build_search(model, DecodeConfig(method=method))
    encoded_NTE, encoded_lengths_N = model.encode(features_NTF, lengths_N)
    encode = median_seconds(lambda: model.encode(features_NTF, lengths_N), device, repeat)
    find = median_seconds(lambda: search(encoded_NTE, encoded_lengths_N), device, repeat)
    audio_seconds = batch_size * seconds
    return {
        "method": method,
        "batch_size": batch_size,
        "utterance_seconds": seconds,
        "encoder_ms": round(1000 * encode, 3),
        "search_ms": round(1000 * find, 3),
        "real_time_factor": round((encode + find) / audio_seconds, 7),
        "times_real_time": round(audio_seconds / (encode + find), 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def parser() -> argparse.ArgumentParser:
    description, _, details = (__doc__ or "").partition("\n\n")
    options = argparse.ArgumentParser(
        prog="python -m scripts.decoding_speed",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("run", type=Path, nargs="?", help="a run; else random parameters")
    options.add_argument("--size", default="medium", choices=("small", "medium", "large"))
    options.add_argument("--vocab-size", type=int, default=500)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--seconds", type=float, default=15.0, help="of each utterance")
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--json", type=Path, metavar="FILE", help="append rows as JSON lines")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    if options.run is None:
        model = random_model(options.size, options.vocab_size, device)
    else:
        model = load_model(run_config(options.run)).model.to(device)
    print("method         batch  encoder ms  search ms  real-time factor  times real time")
    for method in options.methods:
        for batch_size in options.batch_sizes:
            row = measure(model, method, batch_size, options.seconds, options.repeat)
            print(
                f"{method:14} {batch_size:5d} {row['encoder_ms']:11.1f} {row['search_ms']:10.1f} "
                f"{row['real_time_factor']:17.6f} {row['times_real_time']:16.0f}",
                flush=True,
            )
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
