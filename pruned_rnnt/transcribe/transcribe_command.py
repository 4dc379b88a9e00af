"""`pruned-rnnt transcribe`: options, files or live audio to transcripts."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.data.audio.audio_file import seconds_in_header
from pruned_rnnt.out_of_memory import is_out_of_memory
from pruned_rnnt.progress import progress_bar
from pruned_rnnt.transcribe.inputs import AudioInput, audio_inputs
from pruned_rnnt.transcribe.live import LiveRecogniser, RawSource, transcribe_raw
from pruned_rnnt.transcribe.recogniser import Recogniser, Transcription
from pruned_rnnt.transcribe.transcripts import transcript
from pruned_rnnt.usage_errors import ExportError

if TYPE_CHECKING:
    from rich.console import Console

# File name suffixes where they differ from the name of the format.
_SUFFIXES = {"text": "txt"}
# The encoder takes a whole window, so that its memory grows with it.
_LONGEST_WINDOW = 3600


def print_live(recogniser: LiveRecogniser, source: RawSource) -> None:
    """The text of raw audio as it comes."""
    for text in transcribe_raw(recogniser, source):
        print(text, end="", flush=True)
    print()


def run_transcribe(
    recogniser: Recogniser,
    inputs: Sequence[AudioInput],
    options: argparse.Namespace,
    console: Console | None = None,
) -> bool:
    """Print or write the transcript of each file; False where a file could not be read.

    Such files are named, and the others are done. `console` is for a progress bar of each file.
    """
    done = True
    for number, (path, short_name) in enumerate(inputs, start=1):
        try:
            result = _transcribed(recogniser, path, f"{number}/{len(inputs)} {path.name}", console)
        except (OSError, ValueError) as error:
            print(f"pruned-rnnt transcribe: {error}", file=sys.stderr)
            done = False
            continue
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(f"pruned-rnnt transcribe: {path}: memory ran out: {reason}", file=sys.stderr)
            done = False
            continue
        name = short_name if options.format == "ctm" else str(path)
        text = transcript(result, name, options.format, options.times)
        if options.output is None:
            print(text, end="", flush=True)
            continue
        target = options.output / f"{short_name}.{_SUFFIXES.get(options.format, options.format)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        print(f"wrote {target}")
    return done


def _transcribed(
    recogniser: Recogniser, path: Path, name: str, console: Console | None
) -> Transcription:
    """The transcript of a file, with a bar that counts its seconds and is erased at its end."""
    with progress_bar(console, f"{name}, seconds", seconds_in_header(path)) as bar:
        return recogniser.transcribe(path, on_seconds=lambda seconds: bar.show(int(seconds)))


def take_settings(options: argparse.Namespace) -> list[str]:
    """The `decode.key=value` among the audio files, which they are taken from."""
    settings = [item for item in options.audio if item.startswith("decode.") and "=" in item]
    options.audio = [item for item in options.audio if item not in settings]
    return settings


def check_transcribe(options: argparse.Namespace, settings: Sequence[str] = ()) -> list[AudioInput]:
    """Refuse what cannot be done before the model is loaded; the files to transcribe.

    Args:
        settings: `decode.key=value`.

    Raises:
        ExportError: options that do not go together, a folder without audio, or files that would
            be written twice.
    """
    live = options.microphone or options.audio == ["-"]
    if options.microphone and options.audio:
        raise ExportError("--microphone goes without audio files")
    if not options.microphone and not options.audio:
        raise ExportError(
            "name audio files or folders, - for raw samples on standard input, or --microphone"
        )
    if "-" in options.audio and len(options.audio) > 1:
        raise ExportError("- for standard input goes without audio files")
    if live and (options.format != "text" or options.output or options.times):
        raise ExportError("--format, --output and --times are for audio files")
    if live and settings:
        raise ExportError(f"{settings[0]} is for audio files; live audio is searched greedily")
    if not live and (options.chunk or options.left):
        raise ExportError("--chunk and --left are for live audio")
    if options.window is not None and not 0 < options.window <= _LONGEST_WINDOW:
        needs = f"more than 0 seconds, and {_LONGEST_WINDOW} at most"
        raise ExportError(f"--window is {options.window:g}, needs {needs}")
    if options.times and options.format != "text":
        raise ExportError("--times is for --format text; the others have times")
    inputs = [] if live else audio_inputs(options.audio)
    if options.output is None:
        if options.format == "srt" and len(inputs) > 1:
            raise ExportError("--format srt of several files needs --output FOLDER")
        return inputs
    names = Counter(item.name for item in inputs)
    for name, count in names.items():
        if count > 1:
            raise ExportError(f"{count} audio files are called {name}: {options.output} has one")
    return inputs
