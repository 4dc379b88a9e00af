"""The README of an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED = """\
# Exported transducer

{source}. Runs in sherpa-onnx (checked with 2.0.1). In this folder:

    pip install sherpa-onnx soundfile
    python recognise.py a.wav

`--method modified_beam_search` searches wider, `--threads 2` uses two threads{other}.
The same with the programs of a sherpa-onnx build:

    {command}

## What goes in

- Audio of any rate, {shortest_seconds} s or longer; sherpa-onnx resamples it to {sample_rate} Hz.
- {feature_dim} log-mel bins of samples in [-1, 1], 25 ms windows every 10 ms, no dither:
  sherpa-onnx's defaults.

## How it decodes

Blank is 0, `<unk>` is never shown, a frame of 40 ms gives one symbol at most, and the context
before the first symbol is [-1, ..., -1, 0] with -1 embedded as zero. `pruned-rnnt decode` does the
same by default (`decode.max_symbols_per_frame=1`, `decode.skip_unknown=true`). In modified beam
search the probability of `<unk>` goes to the blank here, and is left out there.
"""

_DIFFERENCES = """
This model's settings differ:

{lines}
"""

_STREAMING = """
## Streaming

A chunk has {chunk_frames} frames ({chunk_seconds} s), and attention sees {left_frames} frames
before it; the model's configuration has {trained_chunk} and {trained_left}.
A chunk is decoded when it is full: feed {tail_seconds} s of what a quiet room sounds like after the
last word, or the end may be cut off (digital silence may make words). `recognise.py` does so.
"""


def readme_text(settings: Mapping[str, Any]) -> str:
    """README.md from the folder's settings."""
    program = "sherpa-onnx" if settings["streaming"] else "sherpa-onnx-offline"
    others = [name for name in settings["precisions"] if name != "fp32"]
    text = _SHARED.format(
        source=settings["source"],
        other="".join(f", `--precision {name}` the {name} files" for name in others),
        command=" \\\n      ".join(
            [
                f"{program} --tokens=tokens.txt",
                "--encoder=encoder.onnx --decoder=decoder.onnx --joiner=joiner.onnx",
                "a.wav",
            ]
        ),
        sample_rate=settings["sample_rate"],
        feature_dim=settings["feature_dim"],
        shortest_seconds=settings["shortest_seconds"],
    )
    if settings["differences"]:
        lines = "\n".join(f"- {line}." for line in settings["differences"])
        text += _DIFFERENCES.format(lines=lines)
    if settings["streaming"]:
        chunk, left = settings["trained_frames"]
        text += _STREAMING.format(**settings, trained_chunk=chunk, trained_left=left)
    return text
