"""What `pruned-rnnt export` and `pruned-rnnt transcribe` do, once the model is loaded."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.data.audio_file import known_seconds
from pruned_rnnt.data.tokens import Tokenizer
from pruned_rnnt.decode.search import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.extras import ONNX_PACKAGES, VERIFY_PACKAGES, ExportError
from pruned_rnnt.export.icefall_folder import export_icefall
from pruned_rnnt.export.inputs import AudioInput, audio_inputs
from pruned_rnnt.export.live import LiveRecogniser, RawSource, transcribe_raw
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.recogniser import Recogniser, Transcription
from pruned_rnnt.export.torch_folder import export_torch
from pruned_rnnt.export.transcripts import transcript
from pruned_rnnt.export.verify import verify
from pruned_rnnt.model.transducer import TransducerModel
from pruned_rnnt.optional_packages import require
from pruned_rnnt.out_of_memory import is_out_of_memory
from pruned_rnnt.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

# Suffixes of files that are not called like their format.
_SUFFIXES = {"text": "txt"}
# What is encoded at once takes memory.
_LONGEST_WINDOW = 3600


def check_export(options: argparse.Namespace) -> None:
    """Refuse what cannot be done before the model is loaded.

    Raises:
        ExportError: options that do not go together.
        MissingPackageError: a package of the extra `export` is not installed.
    """
    if options.format != "onnx" and (options.int8 or options.fp16 or options.verify):
        raise ExportError("--int8, --fp16 and --verify are for --format onnx")
    if options.format == "onnx":
        require(*ONNX_PACKAGES, *(VERIFY_PACKAGES if options.verify else ()))
    for path in options.verify or ():
        if not path.is_file():
            raise ExportError(f"audio file not found: {path}")


def run_export(
    options: argparse.Namespace,
    model: TransducerModel,
    tokenizer: Tokenizer,
    folder: Path,
    source: str,
    decode: DecodeConfig,
    usual_longest: float | None,
) -> bool:
    """Write the folder, print what was written and verified; False where verifying failed."""
    # The exporters' remarks are about operators that no model here has.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = model.cpu().eval()
    sizes = OnnxOptions(
        streaming=options.streaming,
        chunk=options.chunk,
        left=options.left,
        int8=options.int8,
        fp16=options.fp16,
    )
    if options.format == "torch":
        export_torch(model, tokenizer, folder, sizes, source, usual_longest)
        print(f'wrote {folder}; use it with pruned_rnnt.load("{folder}").transcribe("a.wav")')
        return True
    if options.format == "icefall":
        export_icefall(model, tokenizer, folder)
        print(f"wrote {folder}; icefall's scripts take it as --checkpoint {folder}/pretrained.pt")
        return True
    graphs = export_onnx(model, tokenizer, folder, sizes, source, decode)
    print(f"wrote {folder}; use it with: python {folder / 'recognise.py'} a.wav")
    for line in differences(model, decode):
        print(f"differs: {line}")
    exact = True
    if options.verify:
        for result in verify(model, tokenizer, graphs, folder, options.verify):
            print("\n".join(result.lines()))
            # Smaller numbers round differently: their differences are listed, and no failure.
            exact = exact and (result.exact or result.precision != "fp32")
        print("verified" if exact else "NOT VERIFIED: the exported model differs, see above")
    return exact


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
    with progress_bar(console, f"{name}, seconds", known_seconds(path)) as bar:
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
