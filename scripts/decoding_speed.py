"""Real-time factors of decoding: every search at several batch sizes, on the CPU and a GPU.

    python -m scripts.decoding_speed exp/fsdd                   a trained model
    python -m scripts.decoding_speed --size medium              a Zipformer, random parameters
    python -m scripts.decoding_speed ... --json rows.jsonl      also append rows to a file

Utterances are random features of one length; language models and hotwords are random, too. The
times of encoder and searches hardly depend on the content, except that a neural language model on a
CPU costs time for each symbol, so the table shows symbols per second. Random models emit a symbol
in every fifth frame. Times are medians over the repetitions (as many as fit a few seconds) after a
warm-up, in which CUDA graphs are captured, and end when the results are on the host. Prints a
Markdown table at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from pruned_rnnt.decode.build_search import Search, build_search
from pruned_rnnt.decode.decode_config import DecodeConfig, Precision
from pruned_rnnt.decode.encode import choose_graphs, encode_padded
from pruned_rnnt.decode.fusion.build import NeuralScorer
from pruned_rnnt.decode.fusion.hotwords import Hotword, HotwordScorer
from pruned_rnnt.decode.fusion.ngram import NgramScorer
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.states import TokenScorer
from pruned_rnnt.model.kernels.available import MODES, kernel_report, set_mode
from pruned_rnnt.model.language_model import LanguageModel, LanguageModelConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.system.allocator import keep_freed_memory
from pruned_rnnt.train.run import load_model, run_config
from scripts.documented_parser import documented_parser
from scripts.random_zipformer import SIZES, random_model

METHODS = ("greedy", "modified_beam", "hotwords", "ngram", "lm")
FRAMES_PER_SECOND = 100
# A measurement ends after this time, even if --repeat is larger.
_ENOUGH_SECONDS = 10.0
# Small, so that random language models do not change the results.
_LM_SCALE = 0.01
_PHRASES, _PHRASE_SYMBOLS = 100, 5
_COLUMNS = {
    "device": "device",
    "method": "search",
    "batch_size": "batch",
    "precision": "encoder",
    "fused_kernels": "fused kernels",
    "cuda_graphs": "CUDA graphs",
    "symbols_per_second": "symbols/s",
    "encoder_ms": "encoder ms",
    "search_ms": "search ms",
    "real_time_factor": "real-time factor",
    "times_real_time": "times real time",
}


def make_search(method: str, model: TransducerModel) -> Search:
    """A search by its name: a method, or the scorer of modified beam search."""
    if method in ("greedy", "modified_beam"):
        return build_search(model, DecodeConfig(method=method))
    return ModifiedBeamSearch(model, scorers=[_random_scorer(method, model)])


def _random_scorer(kind: str, model: TransducerModel) -> TokenScorer:
    torch.manual_seed(2)
    vocab_size = model.vocab_size
    if kind == "hotwords":
        phrases = torch.randint(1, vocab_size, (_PHRASES, _PHRASE_SYMBOLS)).tolist()
        hotwords = [Hotword(symbols=tuple(phrase), bonus=1.5) for phrase in phrases]
        return HotwordScorer(hotwords, vocab_size)
    if kind == "lm":
        language_model = LanguageModel(LanguageModelConfig(), vocab_size).eval()
        return NeuralScorer(language_model.to(next(model.parameters()).device), _LM_SCALE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bigrams.arpa"
        symbols = [f"s{index}" for index in range(vocab_size)]
        path.write_text(_arpa(symbols), encoding="utf-8")
        return NgramScorer(path, symbols, _LM_SCALE)


def _arpa(symbols: Sequence[str]) -> str:
    """A bigram model in which each symbol is likely to be followed by the next one."""
    flat = f"{-math.log10(len(symbols) + 2):.4f}"
    words = ["<unk>", "<s>", "</s>", *symbols]
    pairs = list(itertools.pairwise(symbols))
    lines = ["\\data\\", f"ngram 1={len(words)}", f"ngram 2={len(pairs)}", "", "\\1-grams:"]
    lines += [f"{flat}\t{word}\t-0.5" for word in words]
    lines += ["", "\\2-grams:", *(f"-0.3\t{a} {b}" for a, b in pairs), "", "\\end\\", ""]
    return "\n".join(lines)


def median_seconds(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median time of `work`, including the work that it launches on the device."""

    def timed() -> float:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed()
    times: list[float] = []
    while len(times) < repeat and sum(times) < _ENOUGH_SECONDS:
        times.append(timed())
    return statistics.median(times)


@torch.inference_mode()
def measure(
    model: TransducerModel,
    methods: Sequence[str],
    batch_size: int,
    seconds: float,
    *,
    precision: Precision,
    fused_kernels: str,
    cuda_graphs: str,
    repeat: int,
) -> Iterator[dict[str, Any]]:
    """A row for each search at one batch size, with the time of the encoder."""
    set_mode(fused_kernels)
    choose_graphs(cuda_graphs, model)
    device = next(model.parameters()).device
    frames = round(FRAMES_PER_SECOND * seconds)
    bins = model.config.encoder.num_mel_bins
    generator = torch.Generator().manual_seed(1)
    features_NTF = torch.randn(batch_size, frames, bins, generator=generator).to(device)
    lengths_N = torch.full((batch_size,), frames)

    def encode() -> tuple[Tensor, Tensor]:
        return encode_padded(model, features_NTF, lengths_N, precision)

    for _ in range(3):  # then its graph is captured
        encoded_NTE, encoded_lengths_N = encode()
    encoder_seconds = median_seconds(encode, device, repeat)
    audio_seconds = batch_size * seconds
    for method in methods:
        search = make_search(method, model)
        found = sum(len(best.symbols) for best, *_ in search(encoded_NTE, encoded_lengths_N))
        find = median_seconds(
            lambda search=search: search(encoded_NTE, encoded_lengths_N), device, repeat
        )
        yield {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "method": method,
            "batch_size": batch_size,
            "precision": precision,
            "fused_kernels": fused_kernels,
            "cuda_graphs": cuda_graphs,
            "symbols_per_second": round(found / audio_seconds, 2),
            "utterance_seconds": seconds,
            "encoder_ms": round(1000 * encoder_seconds, 1),
            "search_ms": round(1000 * find, 1),
            "real_time_factor": round((encoder_seconds + find) / audio_seconds, 6),
            "times_real_time": round(audio_seconds / (encoder_seconds + find), 1),
            "encoder": model.config.encoder.kind,
            "parameters": sum(p.numel() for p in model.parameters()),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: the conditions, and a table of the rows."""
    first = rows[0]
    lines = [
        f"{first['encoder']}, {first['parameters'] / 1e6:.1f} M parameters; utterances of "
        f"{first['utterance_seconds']:g} s; torch {first['torch']}; CPU: "
        f"{first['threads']} threads. hotwords, ngram and lm are scorers of modified_beam.",
        "",
        f"| {' | '.join(_COLUMNS.values())} |",
        f"| --- | --- |{' ---: |' * (len(_COLUMNS) - 2)}",
    ]
    lines += [f"| {' | '.join(str(row[key]) for key in _COLUMNS)} |" for row in rows]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.decoding_speed", __doc__)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    options.add_argument("run", type=Path, nargs="?", help="a run; else random parameters")
    options.add_argument("--size", default="medium", choices=SIZES)
    options.add_argument("--vocab-size", type=int, default=500)
    options.add_argument("--devices", nargs="+", default=devices, help="default: all available")
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--seconds", type=float, default=15.0, help="of each utterance")
    options.add_argument(
        "--precision", default="float32", choices=get_args(Precision), help="of the encoder"
    )
    options.add_argument(
        "--fused-kernels",
        nargs="+",
        default=["auto"],
        choices=MODES,
        help="decode.fused_kernels; several are measured in turns",
    )
    options.add_argument(
        "--cuda-graphs",
        nargs="+",
        default=["auto"],
        choices=("auto", "off"),
        help="decode.cuda_graphs; several are measured in turns",
    )
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--threads", type=int, help="on the CPU; default: as torch chooses")
    options.add_argument("--json", type=Path, metavar="FILE", help="append rows as JSON lines")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    keep_freed_memory()  # as the commands do
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.run is None:
        model = random_model(options.size, options.vocab_size)
    else:
        model = load_model(run_config(options.run)).model
    rows = []
    for device in options.devices:
        model = model.to(device)
        print(kernel_report(torch.device(device)), file=sys.stderr)
        for batch_size, mode, graphs in itertools.product(
            options.batch_sizes, options.fused_kernels, options.cuda_graphs
        ):
            for row in measure(
                model,
                options.methods,
                batch_size,
                options.seconds,
                precision=options.precision,
                fused_kernels=mode,
                cuda_graphs=graphs,
                repeat=options.repeat,
            ):
                rows.append(row)
                print(*(row[key] for key in _COLUMNS), file=sys.stderr, flush=True)
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
