"""Training steps of transformers' Parakeet with transformers' own TDT loss, for comparison.

    python -m scripts.training_step.transformers_peer --shapes SHAPES.npz --json FILE

The model has the topology of `scripts.training_step --model parakeet-0.6b` and random weights, and
trains on the same batches: bfloat16 by autocast, fused AdamW, gradients clipped, no CUDA graphs,
which transformers does not have. If the batches do not fit, it takes ones with three quarters of
the audio until they do. Adds a row like those of scripts.training_step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from scripts.benchmark.results import commit, machine
from scripts.documented_parser import documented_parser
from scripts.training_step.batches import BatchLengths, make_batches, read_lengths

SYMBOLS = 500
BINS = 128
# transformers takes what equals the padding symbol for padding.
PADDING = 2
LEAST_SECONDS = 30.0


class PeerBatch(NamedTuple):
    """features_NTF: padded; mask_NT: real frames; labels_NU: padded with PADDING."""

    features_NTF: Tensor
    mask_NT: Tensor
    labels_NU: Tensor


def peer_model(device: torch.device, layers: int = 24, dim: int = 1024) -> Any:
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=dim,
        num_hidden_layers=layers,
        intermediate_size=4 * dim,
        num_mel_bins=BINS,
        attention_bias=False,
        convolution_bias=False,
        scale_input=False,
        layerdrop=0.0,
    )
    config = transformers.ParakeetTDTConfig(
        vocab_size=SYMBOLS + 1,
        blank_token_id=SYMBOLS,
        pad_token_id=PADDING,
        encoder_config=encoder.to_dict(),
    )
    return transformers.ParakeetForTDT(config).to(device).train()


def peer_batch(lengths: BatchLengths, device: torch.device, seed: int) -> PeerBatch:
    generator = torch.Generator().manual_seed(seed)
    count, frames, tokens = lengths.shape
    labels_NU = torch.randint(PADDING + 1, SYMBOLS, (count, tokens), generator=generator)
    beyond_NU = torch.arange(tokens) >= torch.from_numpy(lengths.tokens_N)[:, None]
    return PeerBatch(
        features_NTF=torch.randn(count, frames, BINS, generator=generator).to(device),
        mask_NT=(torch.arange(frames) < torch.from_numpy(lengths.frames_N)[:, None]).to(device),
        labels_NU=labels_NU.masked_fill(beyond_NU, PADDING).to(device),
    )


def train(model: Any, optimiser: torch.optim.Optimizer, batch: PeerBatch) -> float:
    """One step; returns the loss."""
    start_NU = batch.labels_NU.new_full((len(batch.labels_NU), 1), model.config.blank_token_id)
    device = batch.features_NTF.device.type
    with torch.autocast(device, torch.bfloat16):
        loss = model(
            input_features=batch.features_NTF,
            attention_mask=batch.mask_NT,
            decoder_input_ids=torch.cat((start_NU, batch.labels_NU), dim=1),
            labels=batch.labels_NU,
        ).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())


def measure(options: Any, seconds: float, device: torch.device) -> dict[str, Any]:
    """The row, with batches of up to `seconds` of audio.

    Raises:
        torch.OutOfMemoryError: the batches do not fit.
    """
    lengths = make_batches(
        read_lengths(options.shapes), seconds=seconds, count=options.batches, seed=0
    )
    model = peer_model(device)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")
    batches = [peer_batch(each, device, seed) for seed, each in enumerate(lengths)]
    found = []
    for turn in range(options.warm_up + options.turns):
        started = time.perf_counter()
        for batch in batches:
            loss = train(model, optimiser, batch)
            if not loss == loss:
                raise ValueError("the loss of transformers is NaN")
        if turn >= options.warm_up:
            found.append((time.perf_counter() - started) / len(batches))
    on_gpu = device.type == "cuda"
    audio, median = (
        statistics.mean(each.audio_seconds for each in lengths),
        statistics.median(found),
    )
    return {
        "system": f"transformers {transformers.__version__}",
        "commit": commit(),
        "date": date.today().isoformat(),
        "model": "parakeet-0.6b",
        "causal": False,
        "ctc": False,
        "precision": "bfloat16",
        "max_seconds": seconds,
        "audio_seconds": audio,
        "utterances": statistics.mean(each.shape[0] for each in lengths),
        "batches": len(batches),
        "turns": options.turns,
        "overrides": [],
        "device": torch.cuda.get_device_name() if on_gpu else machine("cpu"),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": 1000 * median,
        "step_ms_range": [1000 * min(found), 1000 * max(found)],
        "times_real_time": audio / median,
        "gpu_busy_ms": None,
        "kernels": None,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = documented_parser("scripts.training_step.transformers_peer", __doc__)
    parser.add_argument("--shapes", type=Path, required=True, metavar="FILE.npz")
    parser.add_argument("--seconds", type=float, default=551.0, help="of audio in a batch")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the row to FILE")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds = options.seconds
    while True:
        try:
            row = measure(options, seconds, device)
            break
        except torch.OutOfMemoryError:
            print(f"batches of {seconds:.0f} s do not fit", flush=True)
            seconds *= 0.75
            if seconds < LEAST_SECONDS:
                raise
        # Outside of the handler, whose error keeps the tensors of the failed step.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps(row))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


if __name__ == "__main__":
    main()
