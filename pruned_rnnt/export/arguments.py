"""The options of `pruned-rnnt export`; light imports only, as every command loads it."""

from __future__ import annotations

import argparse
from pathlib import Path

EXPORT_HELP = """\
Writes RUN/export/FORMAT with a README. The format onnx needs
pip install 'pruned_rnnt[export]'.
decode.checkpoint and decode.use_average choose the parameters. The README is a model card:
it has the error rates that `pruned-rnnt decode` measured with these parameters, and the
values of card.license, card.data and the other settings of card.

"""


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
    for option, what in (
        ("--chunk", "encoder frames (40 ms) in a chunk"),
        ("--left", "encoder frames of left context"),
    ):
        parser.add_argument(
            option,
            type=int,
            default=0,
            metavar="N",
            help=f"with --streaming: {what} (default: as trained)",
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
