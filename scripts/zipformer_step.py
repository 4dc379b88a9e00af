"""Times a training step and greedy search of a Zipformer transducer with random weights and data.

    python -m scripts.zipformer_step --shapes SHAPES.npz --output rows.jsonl

SHAPES.npz holds the lengths of real utterances, `frames` (encoder frames of 40 ms) and `tokens`;
without it lengths are random. Two rows, as JSON: `train` (forward, backward, clipping, update; the
losses alone, forward and backward) and `greedy` (encoder, then encoder with search). On a GPU,
`host_ms` is the time until all of a step is launched, and `gpu_ms` the time of its `gpu_launches`
alone: if `host_ms` is nearly `step_ms` and `gpu_ms` far less, the GPU waits for its host.
`operations` counts the torch operations of a step, including views. Needs only torch and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pruned_rnnt import ctc_loss
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.model.kernels.available import MODES, kernel_report, set_mode
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.transducer_model import BLANK, ModelConfig, TransducerModel
from pruned_rnnt.model.zipformer import SIZES
from pruned_rnnt.train.optim.optimiser import OptimiserConfig, build_optimiser

_OPTIMISER = OptimiserConfig(name="scaled_adam", learning_rate=1e-3)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Features for the first encoder frame, and for each further one.
_FIRST, _MORE = 9, 4
# (features, their lengths, targets, their lengths)
_Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def read_lengths(path: Path | None, rng: np.random.Generator) -> np.ndarray:
    """(utterances, 2) encoder frames and tokens, shortest first."""
    if path is None:
        frames = rng.integers(40, 420, size=4000)
        pairs = np.stack((frames, frames // 4), axis=1)
    else:
        shapes = np.load(path)
        pairs = np.stack((shapes["frames"], shapes["tokens"]), axis=1).astype(np.int64)
    return pairs[pairs[:, 0].argsort(kind="stable")]


def make_batch(lengths: np.ndarray, vocab: int, bins: int, device: torch.device) -> _Batch:
    """Random features and targets; lengths stay on the CPU, as in training."""
    feature_lengths = torch.from_numpy(_FIRST + _MORE * (lengths[:, 0] - 1))
    target_lengths = torch.from_numpy(lengths[:, 1].copy())
    features = torch.randn(len(lengths), int(feature_lengths.max()), bins, device=device) * 3 - 5
    targets = torch.randint(3, vocab, (len(lengths), int(target_lengths.max())), device=device)
    return features, feature_lengths, targets.int(), target_lengths


def milliseconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Mean time of a call, from an idle device to an idle device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - started) / repeats * 1e3


def host_milliseconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time until a call returns that starts on an idle device."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e3


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def work_of(function: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Operations, kernel launches and GPU time of one call."""
    with Operations() as operations:
        function()
    work: dict[str, Any] = {"operations": operations.count}
    if device.type == "cuda":
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            function()
            torch.cuda.synchronize()
        done = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
        work["gpu_launches"] = len(done)
        work["gpu_ms"] = sum(event.time_range.elapsed_us() for event in done) / 1e3
    return work


def autocast(device: torch.device, precision: str) -> torch.autocast:
    enabled = precision != "float32"
    return torch.autocast(device.type, dtype=_DTYPES[precision], enabled=enabled)


def train_row(
    model: TransducerModel, batch: _Batch, repeats: int, precision: str, at_step: int
) -> dict[str, Any]:
    device = batch[0].device
    optimiser = build_optimiser(model, _OPTIMISER)
    parameters = list(model.parameters())
    frames = int(model.encoder.output_lengths(batch[1]).sum())

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with autocast(device, precision):
            total = model(*batch, at_step).objective / frames
        total.backward()
        # The trainer's check of the gradient; this optimiser clips by itself.
        nn.utils.clip_grad_norm_(parameters, math.inf)
        optimiser.step()

    model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    milliseconds(step, 2, device)
    step_ms = milliseconds(step, repeats, device)
    host_ms = host_milliseconds(step, repeats, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    work = work_of(step, device)
    with torch.no_grad(), autocast(device, precision):
        encoded, lengths = model.encode(batch[0], batch[1])
        predicted = model.predictor.forward_targets(batch[2])

    def losses() -> None:
        leaf, leaf_predicted = (x.detach().requires_grad_() for x in (encoded, predicted))
        both = lengths.int(), batch[3].int()
        with autocast(device, precision):
            total = torch.zeros((), device=device)
            if model.pruned_loss is not None:
                total = model.pruned_loss(leaf, leaf_predicted, batch[2], *both, at_step).loss.sum()
            if model.ctc_head is not None:
                total = total + ctc_loss(model.ctc_head(leaf), batch[2], *both, blank=BLANK).sum()
        (total / frames).backward()

    milliseconds(losses, 2, device)
    loss_ms = milliseconds(losses, repeats, device)
    seconds = float(batch[1].sum()) / 100
    return {
        "row": "train",
        "utterances": len(batch[1]),
        "audio_seconds": seconds,
        "longest_frames": int(lengths.max()),
        "longest_tokens": batch[2].size(1),
        "precision": precision,
        "at_step": at_step,
        "step_ms": step_ms,
        "host_ms": host_ms,
        **work,
        "losses_ms": loss_ms,
        "losses_share": loss_ms / step_ms,
        "peak_gib": peak,
        "times_real_time": seconds / step_ms * 1e3,
    }


@torch.inference_mode()
def greedy_row(
    model: TransducerModel, batch: _Batch, repeats: int, precision: str
) -> dict[str, Any]:
    device = batch[0].device
    model.eval()
    search = GreedySearch(model)
    found: list[Any] = []

    def encode() -> tuple[Tensor, Tensor]:
        with autocast(device, precision):
            encoded, lengths = model.encode(batch[0], batch[1])
        return encoded.float(), lengths

    def transcribe() -> None:
        found[:] = search(*encode())

    milliseconds(transcribe, 2, device)
    total_ms = milliseconds(transcribe, repeats, device)
    seconds = float(batch[1].sum()) / 100
    return {
        "row": "greedy",
        "utterances": len(batch[1]),
        "audio_seconds": seconds,
        "symbols": sum(len(hypothesis.symbols) for hypothesis in found),
        "encoder_ms": milliseconds(encode, repeats, device),
        "total_ms": total_ms,
        "times_real_time": seconds / total_ms * 1e3,
    }


def measure(model: TransducerModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The two rows."""
    device = next(model.parameters()).device
    lengths = read_lengths(options.shapes, np.random.default_rng(0))
    # From the middle of the sorted lengths, as buckets are: utterances of about the same length.
    middle = lengths[len(lengths) // 2 :]
    count = max(1, int((middle[:, 0].cumsum() * 0.04 <= options.seconds).sum()))
    batch, few = (
        make_batch(middle[:n], model.vocab_size, model.config.encoder.num_mel_bins, device)
        for n in (count, options.batch)
    )
    about = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "fused_kernels": kernel_report(device),
    }
    return [
        about | train_row(model, batch, options.repeats, options.precision, options.at_step),
        about | greedy_row(model, few, options.repeats, options.precision),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="medium")
    parser.add_argument("--shapes", type=Path, help="lengths of real utterances, .npz")
    parser.add_argument("--output", type=Path, help="append rows to this file")
    parser.add_argument("--seconds", type=float, default=600.0, help="of audio in a training batch")
    parser.add_argument("--batch", type=int, default=32, help="utterances of a greedy batch")
    parser.add_argument("--precision", choices=list(_DTYPES), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fused-kernels", choices=MODES, default="auto", help="as in training")
    parser.add_argument("--at-step", type=int, default=20000, help="step of the schedules")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    set_mode(options.fused_kernels)
    predictor = PredictorConfig(dim=512)
    config = ModelConfig(encoder=SIZES[options.size], predictor=predictor, joiner_dim=512)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [json.dumps(row) for row in measure(TransducerModel(config, 500).to(device), options)]
    print("\n".join(lines))
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
