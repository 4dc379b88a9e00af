"""The options of `pruned-rnnt export`; imports nothing heavy, as every command needs it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything but the run and its overrides."""
    parser.add_argument("--format", choices=("onnx", "torch", "icefall"), default="onnx")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: RUN/export/FORMAT[-streaming]"
    )
    parser.add_argument(
        "--streaming", action="store_true", help="a chunk at a time (causal models only)"
    )
    parser.add_argument(
        "--chunk", type=int, default=0, metavar="N", help="frames (40 ms); default: as trained"
    )
    parser.add_argument(
        "--left", type=int, default=0, metavar="N", help="frames seen before; default: as trained"
    )
    parser.add_argument("--int8", action="store_true", help="write int8 files as well")
    parser.add_argument("--fp16", action="store_true", help="write half precision files as well")
    parser.add_argument(
        "--verify",
        type=Path,
        nargs="+",
        metavar="AUDIO",
        help="compare with torch, and sherpa-onnx's texts with ours; exit code 1 if they differ",
    )
