"""The options of `pruned-rnnt export`; light imports only, as every command loads it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except the run and its settings."""
    parser.add_argument(
        "--format", choices=("onnx", "torch", "icefall"), default="onnx", help="(default: onnx)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: RUN/export/FORMAT[-streaming]"
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="export for streams of audio, transcribed chunk by chunk (causal models only)",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=0,
        metavar="N",
        help="with --streaming: encoder frames (40 ms) in a chunk (default: as trained)",
    )
    parser.add_argument(
        "--left",
        type=int,
        default=0,
        metavar="N",
        help="with --streaming: encoder frames of left context (default: as trained)",
    )
    parser.add_argument("--int8", action="store_true", help="also write int8 files")
    parser.add_argument("--fp16", action="store_true", help="also write half-precision files")
    parser.add_argument(
        "--verify",
        type=Path,
        nargs="+",
        metavar="AUDIO",
        help="compare outputs of the ONNX files with torch, and texts of sherpa-onnx with those of "
        "greedy search; exit code 1 if they differ",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the folder to this repository of the Hugging Face hub (created if it "
        "does not exist); log in first with `hf auth login`",
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push: create the repository as private"
    )
