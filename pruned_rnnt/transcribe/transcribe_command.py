"""`pruned-rnnt transcribe`: check the options, find the files, transcribe files or live audio."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES, seconds_in_header
from pruned_rnnt.decode.word_times import ctm_name
from pruned_rnnt.export.stream_sizes import stream_sizes
from pruned_rnnt.run.folder import require_writable
from pruned_rnnt.system.console import naming_stdout, progress_bar
from pruned_rnnt.system.folders import files_below
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.live import RawLayout, RawSource, transcribe_raw
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.segments import SegmentConfig
from pruned_rnnt.transcribe.stream import Stream
from pruned_rnnt.transcribe.transcript_files import (
    AudioInput,
    TranscriptFiles,
    transcript_file,
)
from pruned_rnnt.transcribe.transcription import (
    NumberedResult,
    is_transcript,
    mark_text,
    transcript,
)

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class AudioInputs(NamedTuple):
    """The audio files to transcribe, and the errors of folders that could not be listed."""

    files: list[AudioInput]
    errors: list[OSError]


def audio_inputs(arguments: Sequence[str]) -> AudioInputs:
    """The files named, and the audio files in the folders named, at any depth, sorted by path.

    Links to folders are followed; each folder is read once. A folder that cannot be listed is
    logged, as disks have some at their top.
    Names of audio files that cannot be read are among them, such as links to nothing.

    Raises:
        UsageError: a folder has no audio files.
        OSError: it has none, and a folder in it cannot be listed.
    """
    found = AudioInputs([], [])
    for argument in arguments:
        _add_inputs(found, Path(argument))
    return found


def _add_inputs(inputs: AudioInputs, path: Path) -> None:
    if not path.is_dir():
        inputs.files.append(AudioInput(path, path.stem))
        return
    errors: list[OSError] = []
    found = (parent / name for parent, names in files_below(path, errors.append) for name in names)
    files = sorted(file for file in found if file.suffix.lower() in AUDIO_SUFFIXES)
    if not files:
        if errors:
            raise errors[0]
        raise UsageError(
            f"no audio files below {path}: expected files that end in {', '.join(AUDIO_SUFFIXES)}"
        )
    for error in errors:
        logger.warning("audio in %s is not transcribed: %s", error.filename, error.strerror)
    inputs.errors.extend(errors)
    for file in files:
        name = file.relative_to(path).with_suffix("").as_posix()
        inputs.files.append(AudioInput(file, name))


def start_live(recogniser: AudioRecogniser, options: argparse.Namespace) -> Stream:
    """A stream for live audio.

    Raises:
        UsageError: the model cannot stream.
        ExportError: it cannot have such chunks.
    """
    endpoints = _endpoints(options)
    if recogniser.model is not None and (options.chunk or options.left):
        stream_sizes(recogniser.model, options.chunk, options.left)  # errors name the options
    return recogniser.stream(chunk=options.chunk, left=options.left, endpoints=endpoints)


def _endpoints(options: argparse.Namespace) -> EndpointConfig:
    try:
        return EndpointConfig(**_endpoint_rules(options))
    except ValueError as error:
        raise UsageError(f"--endpoint-pause and --endpoint-longest: {error}") from error


def _endpoint_rules(options: argparse.Namespace) -> dict[str, float]:
    """The rules that the user has chosen."""
    chosen = {"pause": options.endpoint_pause, "longest": options.endpoint_longest}
    return {name: seconds for name, seconds in chosen.items() if seconds is not None}


def print_live(stream: Stream, source: RawSource, layout: RawLayout | None = None) -> None:
    """Print the text of live audio as it is transcribed, and marks to stderr."""

    def show(mark: Mark) -> None:
        print(mark_text(mark), file=sys.stderr, flush=True)

    for text in transcribe_raw(stream, source, show, layout):
        with naming_stdout():
            print(text, end="", flush=True)


def run_transcribe(
    recogniser: AudioRecogniser,
    inputs: Sequence[AudioInput],
    options: argparse.Namespace,
    console: Console | None = None,
) -> bool:
    """Print the transcript of each file, or write them as soon as they are known; False if a file
    has none.

    An error is printed for each such file, and the other files are still transcribed, unless the
    disk is full or fails. Marks of speech without text, or text without speech, are printed to
    stderr. A truncated file is a warning, with `options.strict` an error.

    Args:
        console: shows a progress bar for each file.

    Raises:
        OSError: the disk is full or fails, or standard output cannot be written to.
    """
    if options.output is not None:
        require_writable(options.output, "choose another --output")
    done = True
    words = options.times or options.format != "text"
    paths = [item.path for item in inputs]
    results = _transcriptions(
        recogniser,
        paths,
        words=words,
        channel=options.channel,
        in_order=options.output is None,
        console=console,
    )
    with TranscriptFiles() as files:
        for number, result in results:
            item = inputs[number]
            if isinstance(result, Exception):
                print(f"pruned-rnnt transcribe: {_reason(item.path, result)}", file=sys.stderr)
                done = False
                continue
            if result.warning:
                kind = "" if options.strict else "warning: "
                line = f"{kind}{item.path}: {result.warning}"
                print(f"pruned-rnnt transcribe: {line}", file=sys.stderr)
                if options.strict:
                    done = False
                    continue
            name = item.name if options.format == "ctm" else str(item.path)
            text = transcript(result, name, options.format, options.times)
            if options.output is not None:
                files.add(text, item, transcript_file(item, options))
            else:
                with naming_stdout():
                    print(text, end="", flush=True)
            for mark in result.marks:
                print(f"{item.path}: {mark_text(mark)}", file=sys.stderr)
    return done and files.all_written


def _reason(path: Path, error: Exception) -> str:
    """Why a file has no transcript; raises errors that have another cause than the file."""
    if isinstance(error, OSError | ValueError):
        return str(error)
    if not is_out_of_memory(error):
        raise error
    return f"{path}: out of memory: {(str(error) or type(error).__name__).splitlines()[0]}"


def _transcriptions(
    recogniser: AudioRecogniser,
    paths: Sequence[Path],
    *,
    words: bool,
    channel: int | None,
    in_order: bool,
    console: Console | None,
) -> Iterator[NumberedResult]:
    """The results of files, each with its place, under a progress bar: of all files, or in seconds
    if one takes long."""
    if recogniser.batch_seconds and len(paths) > 1:
        with progress_bar(console, "transcribing, files", len(paths)) as bar:
            results: Iterable[NumberedResult]
            if in_order:
                each = recogniser.transcribe_each(paths, channel=channel, words=words)
                results = starmap(NumberedResult, enumerate(each))
            else:
                results = recogniser.transcribe_numbered(paths, channel=channel, words=words)
            for count, result in enumerate(results, start=1):
                bar.show(count)
                yield result
        return
    for number, path in enumerate(paths):
        name = f"{number + 1}/{len(paths)} {path.name}, seconds"
        with progress_bar(console, name, seconds_in_header(path)) as bar:
            found = recogniser.transcribe_each(
                [path], channel=channel, on_seconds=bar.show, words=words
            )
            done = list(found)
        yield from (NumberedResult(number, result) for result in done)


def segment_config(options: argparse.Namespace) -> SegmentConfig:
    """The options that say how audio is cut.

    Raises:
        UsageError: a value is out of range.
    """
    try:
        return SegmentConfig(
            window=options.window,
            shortest=options.shortest,
            pause=options.pause,
            padding=options.padding,
            detector=options.detector,
            lost_speech=options.lost_speech,
        )
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def check_transcribe(options: argparse.Namespace, settings: Sequence[str] = ()) -> AudioInputs:
    """Check the options before the model is loaded; returns the files to transcribe.

    With `options.skip_existing`, those that have a transcript are left out.

    Args:
        settings: `decode.key=value`.

    Raises:
        UsageError: options exclude each other, standard input or output is closed, a folder has no
            audio files, two audio files would be written to the same transcript, or a transcript
            would replace what is not a file.
    """
    live = options.microphone or options.audio == ["-"]
    if live and options.strict:
        raise UsageError("--strict needs audio files")
    if live and options.channel is not None:
        raise UsageError("--channel needs audio files: of live audio, the mean is used")
    if options.channel is not None and options.channel < 0:
        raise UsageError(f"--channel is {options.channel}, needs 0 or more")
    if options.microphone and options.audio:
        raise UsageError("--microphone cannot be combined with audio files")
    if not options.microphone and not options.audio:
        raise UsageError(
            "nothing to transcribe: pass audio files or folders, - to read raw samples from "
            "standard input, or --microphone"
        )
    if "-" in options.audio and len(options.audio) > 1:
        raise UsageError("- (standard input) cannot be combined with audio files")
    if "-" in options.audio and sys.stdin is None:
        raise UsageError("- is standard input, which is closed: pipe samples to it")
    if options.output is None and sys.stdout is None:
        raise UsageError(
            "the text is printed to standard output, which is closed: redirect it, or write the "
            "transcripts of audio files with --output FOLDER"
        )
    if live and (options.format != "text" or options.output or options.times):
        raise UsageError(
            "--format, --output and --times need audio files: live audio is printed as text"
        )
    if not live and (options.chunk or options.left):
        raise UsageError("--chunk and --left need live audio: - or --microphone")
    for name in ("chunk", "left"):
        size = getattr(options, name)
        given = [each for each in settings if each.startswith(f"decode.{name}=")]
        if size and given and given[-1] != f"decode.{name}={size}":
            raise UsageError(f"--{name} {size} contradicts {given[-1]}: leave out one of them")
    if not live and _endpoint_rules(options):
        raise UsageError(
            "--endpoint-pause and --endpoint-longest need live audio: - or --microphone"
        )
    _endpoints(options)
    segments = segment_config(options)
    if live and replace(segments, lost_speech="retry") != SegmentConfig():
        raise UsageError(
            "--window, --shortest, --pause, --padding and --detector need audio files: live audio "
            "ends lines by --endpoint-pause and --endpoint-longest"
        )
    if options.skip_existing and options.output is None:
        raise UsageError("--skip-existing needs --output: what is printed cannot be continued")
    if options.times and options.format != "text":
        raise UsageError("--times needs --format text: the other formats always have times")
    inputs = AudioInputs([], []) if live else audio_inputs(options.audio)
    files = inputs.files
    if options.output is None:
        if options.format == "srt" and len(files) > 1:
            raise UsageError("--format srt with several audio files needs --output FOLDER")
        if options.format == "ctm" and (
            different := _first_repeated(ctm_name(item.name) for item in files)
        ):
            raise UsageError(
                f"{different.files} audio files are called {different.name} in CTM: write each to "
                "a file of its own with --output FOLDER, or rename them"
            )
        return inputs
    if different := _first_repeated(item.name for item in files):
        raise UsageError(
            f"{different.files} audio files are called {different.name}: their transcripts in "
            f"{options.output} would overwrite each other. Give the folder above all of them, "
            "whose folders the names then keep; or rename one, or write to other folders"
        )
    targets = {transcript_file(item, options) for item in files}
    for target in targets:
        if different_folder := targets.intersection(target.parents):
            raise UsageError(
                f"the transcripts {different_folder.pop()} and {target} cannot both be written: "
                "rename one of the audio files"
            )
    for folder in (options.output, *options.output.parents):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--output is {options.output}, but {folder} is a file, not a folder")
    existing = set()
    for item in files:
        target = transcript_file(item, options)
        # Not Path.exists, which raises an error for a name that is too long.
        if not os.access(target, os.F_OK):
            continue
        # Often the text that a person wrote.
        is_beside = target.resolve().parent == item.path.resolve().parent
        if is_beside or not is_transcript(target, item.path.name, options.format):
            which = " beside its audio" if is_beside else ", which is no earlier transcript"
            raise UsageError(
                f"--output {options.output} would overwrite {target}{which}: choose another "
                "folder, or move that file away"
            )
        if target.stat().st_size:
            existing.add(item)
    if not options.skip_existing:
        return inputs
    print(
        f"{len(existing):,} of {len(files):,} files have transcripts in {options.output}",
        file=sys.stderr,
    )
    return inputs._replace(files=[item for item in files if item not in existing])


class _Repeated(NamedTuple):
    name: str
    files: int


def _first_repeated(names: Iterable[str]) -> _Repeated | None:
    repeated = (_Repeated(*each) for each in Counter(names).items() if each[1] > 1)
    return next(repeated, None)
