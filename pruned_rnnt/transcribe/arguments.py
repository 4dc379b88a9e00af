"""The options of `pruned-rnnt transcribe`; imports nothing heavy, as every command needs it."""

from __future__ import annotations

import argparse
from pathlib import Path


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
