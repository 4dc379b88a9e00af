"""`pruned-rnnt transcribe`: audio files and live audio."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    EXIT_FAILED,
    Parsers,
    add_command,
    is_setting,
    prepare_process,
    refuse_settings,
    split_arguments,
    start_driver,
)
from pruned_rnnt.system.allocator import without_garbage_collection
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.transcribe.endpoints import EndpointConfig

if TYPE_CHECKING:
    from rich.console import Console

# Settings of the section `decode` that transcription does not read.
_OF_DECODE = {
    "decode.split": "prepared sets, which `decode` reads",
    "decode.metric": "error rates, which `decode` prints",
    "decode.num_best": "n-best lists, which `decode` writes",
}

HELP = (
    "MODEL is a run or one of its checkpoints, an exported model (torch or onnx), a .nemo\n"
    "archive or a folder of transformers, an icefall checkpoint with its bpe.model or tokens.txt\n"
    "near it, or owner/name, a repository of the Hugging Face hub with one of these.\n"
    "AUDIO is a file or a folder: wav, flac, ogg, opus, mp3, mp2, sph, aiff, au, caf, w64, rf64\n"
    "and voc, with ffmpeg also m4a, aac, wma and webm. Unreadable files are named, and the exit\n"
    "code is then 1.\n"
    "Settings of `pruned-rnnt decode` choose the search: decode.method=modified_beam.\n"
    "With --microphone or - for AUDIO, a causal model transcribes live until Ctrl-C. - reads\n"
    "16-bit samples: one channel at 16 kHz, or as a wav header before them says:\n"
    "  arecord -q -f S16_LE -r 16000 -c 1 | pruned-rnnt transcribe MODEL -"
)


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, transcribe, HELP)
    parser.add_argument(
        "model", metavar="MODEL", help="run, exported or imported model, or hub repository"
    )
    parser.add_argument(
        "audio",
        nargs="*",
        metavar="AUDIO | decode.key=value",
        help="audio files, or folders of them; settings of the search as for `decode`, such as "
        "decode.method=modified_beam decode.fusion.hotwords=phrases.txt",
    )
    parser.add_argument(
        "--format",
        choices=("text", "jsonl", "srt", "ctm"),
        default="text",
        help="text; JSON lines with the time and confidence of each word; subtitles; NIST's CTM",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write one file for each audio file instead of printing to stdout",
    )
    parser.add_argument(
        "--skip-existing",
        action="store_true",
        help="with --output: leave out files with a transcript there, as after an interruption",
    )
    parser.add_argument(
        "--channel",
        type=int,
        metavar="N",
        help="use this channel of audio files, counted from 0 (default: the mean of all)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="a truncated audio file is an error, not a warning: it has no transcript, and the "
        "exit code is 1",
    )
    parser.add_argument("--times", action="store_true", help="print the start and end of each word")
    parser.add_argument(
        "--window",
        type=float,
        metavar="SECONDS",
        help="cut longer audio at pauses into segments of at most this length (default: 1.25 times "
        "the length of the model's training utterances, at most 30)",
    )
    parser.add_argument(
        "--shortest",
        type=float,
        metavar="SECONDS",
        help="join shorter segments with the next one across pauses below a second (default: a "
        "quarter of the length of the training utterances)",
    )
    parser.add_argument(
        "--pause",
        type=float,
        metavar="SECONDS",
        default=0.3,
        help="shortest pause at which audio is cut (default: %(default)s)",
    )
    parser.add_argument(
        "--padding",
        type=float,
        metavar="SECONDS",
        default=0.2,
        help="silence kept before and after each segment (default: %(default)s)",
    )
    parser.add_argument(
        "--detector",
        choices=("energy", "silero"),
        default="energy",
        help="find speech in long audio by its energy, or by the neural network of the package "
        "silero-vad (default: %(default)s)",
    )
    parser.add_argument(
        "--lost-speech",
        choices=("retry", "mark", "ignore"),
        default="retry",
        help="speech for which the model has no text: decode it again by itself and mark it in the "
        "transcript if it still has none; only mark it; or neither (default: %(default)s)",
    )
    parser.add_argument(
        "--microphone", action="store_true", help="transcribe the microphone live until Ctrl-C"
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=0,
        metavar="N",
        help="live: encoder frames (40 ms, of a FastConformer 80 ms) in a chunk "
        "(default: as trained)",
    )
    parser.add_argument(
        "--left",
        type=int,
        default=0,
        metavar="N",
        help="live: encoder frames of left context (default: as trained)",
    )
    parser.add_argument(
        "--endpoint-pause",
        type=float,
        metavar="SECONDS",
        help=f"live: pause after which a line ends; 0: never (default: {EndpointConfig.pause})",
    )
    parser.add_argument(
        "--endpoint-longest",
        type=float,
        metavar="SECONDS",
        help="live: a line ends after a word when its audio is so long; 0: never (default: "
        f"{EndpointConfig.longest})",
    )


def transcribe(options: argparse.Namespace, console: Console) -> int:
    """Transcribe audio files of any length and sampling rate."""
    start_driver()
    # The libraries and the model make hundreds of thousands of objects, none of them garbage.
    with without_garbage_collection():
        from pruned_rnnt.pretrained.load import load
        from pruned_rnnt.transcribe.live import microphone, standard_input
        from pruned_rnnt.transcribe.transcribe_command import (
            check_transcribe,
            print_live,
            run_transcribe,
            segment_config,
            start_live,
        )

        settings = _take_settings(options)
        inputs = check_transcribe(options, settings)
        if options.skip_existing and not inputs.files:
            return EXIT_FAILED if inputs.errors else 0
        recogniser = load(
            options.model, device="auto", settings=settings, segments=segment_config(options)
        )
    if recogniser.model is not None:
        prepare_process(recogniser.model)
    if not options.microphone and options.audio != ["-"]:
        done = run_transcribe(recogniser, inputs.files, options, console)
        return 0 if done and not inputs.errors else EXIT_FAILED
    stream = start_live(recogniser, options)
    if options.microphone:
        with microphone() as source:
            print_live(stream, source)
    else:
        with standard_input() as samples:
            print_live(stream, samples, samples.layout)
    return 0


def _take_settings(options: argparse.Namespace) -> list[str]:
    """Remove the `decode.key=value` settings from `options.audio` and return them.

    Raises:
        UsageError: there is a setting of another section, without effect, or without a value.
    """
    given, _ = split_arguments(options.audio)
    settings = [each for each in given if each.startswith("decode.")]
    for each in given:
        if each not in settings and is_setting(each.partition("=")[0]):
            raise UsageError(
                f"{each}: `transcribe` takes settings of the search only, decode.key=value; leave "
                "it out"
            )
    # A method with one hypothesis needs decode.num_best=1 if the run's config.yaml has more.
    refuse_settings([each for each in settings if each != "decode.num_best=1"], _OF_DECODE)
    options.audio = [each for each in options.audio if each not in settings]
    return settings
