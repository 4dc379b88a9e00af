"""The options of `pruned-rnnt export` and `transcribe`; imports nothing heavy, as all need it."""

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


def add_transcribe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the audio and the options."""
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "audio",
        nargs="*",
        metavar="AUDIO | decode.key=value",
        help="files, or folders of them; how to search them, as of `decode`: "
        "decode.method=modified_beam decode.fusion.hotwords=phrases.txt",
    )
    parser.add_argument(
        "--format",
        choices=("text", "jsonl", "srt", "ctm"),
        default="text",
        help="text; JSON lines with times and confidences of words; subtitles; NIST's CTM",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="a file for each audio file, instead of stdout",
    )
    parser.add_argument("--times", action="store_true", help="show when each word was said")
    parser.add_argument(
        "--window",
        type=float,
        metavar="SECONDS",
        help="split long audio into parts of 0.5 to 1 times this length (default: as long as the "
        "utterances that the model was trained on, at most 30)",
    )
    parser.add_argument("--microphone", action="store_true", help="listen; Ctrl-C ends it")
    parser.add_argument(
        "--chunk",
        type=int,
        default=0,
        metavar="N",
        help="live: frames (40 ms) transcribed at a time",
    )
    parser.add_argument(
        "--left", type=int, default=0, metavar="N", help="live: frames seen before; as trained"
    )
