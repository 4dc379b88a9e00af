"""Transcribe audio files with the exported model in this folder; needs sherpa-onnx and soundfile.

    python recognise.py a.wav b.flac

Prints one line of JSON per file: text, tokens, their times in seconds, the seconds of computation,
and the language if the model writes one. If a file cannot be read, prints an error and continues
with the next file; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import sherpa_onnx
import soundfile

# Speech recordings have rates in this range; resampling from other rates would need much memory.
LOWEST_RATE, HIGHEST_RATE = 1000, 768_000
# No audio up to this length is called long; also the limit if the training is unknown.
_USUAL_SECONDS = 30.0
# Samples to read at a time.
_BLOCK = 2**20
# The length of an mp3 file, in its first frame: flags, and the number of frames.
_LENGTH = re.compile(rb"(?:Xing|Info)\0{3}[\1\3\5\7\x09\x0b\x0d\x0f](.{4})", re.DOTALL)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("audio", nargs="+", help="wav, flac, ogg or mp3 files")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(__file__).parent,
        help="folder of the exported model (default: the script's)",
    )
    parser.add_argument("--precision", choices=("fp32", "int8", "int4", "fp16"), default="fp32")
    parser.add_argument(
        "--method", default="greedy_search", help="greedy_search (default) or modified_beam_search"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = json.loads((options.folder / "settings.json").read_text(encoding="utf-8"))
    suffix = "" if options.precision == "fp32" else f".{options.precision}"
    shared = {
        "tokens": str(options.folder / "tokens.txt"),
        "num_threads": options.threads,
        "sample_rate": settings["sample_rate"],
        "feature_dim": settings["feature_dim"],
        "decoding_method": options.method,
    }
    is_ctc = settings["kind"] in ("ctc", "nemo_ctc")
    names = ("model",) if is_ctc else ("encoder", "decoder", "joiner")
    files = {name: str(options.folder / f"{name}{suffix}.onnx") for name in names}
    if missing := [file for file in files.values() if not Path(file).is_file()]:
        # sherpa-onnx would end the process.
        parser.error(
            f"--precision {options.precision} needs {missing[0]}, which does not exist; export the "
            f"model again: {_export_command(options, settings)}"
        )
    kind = sherpa_onnx.OnlineRecognizer if settings["streaming"] else sherpa_onnx.OfflineRecognizer
    if is_ctc:
        make = kind.from_zipformer2_ctc if settings["streaming"] else kind.from_zipformer_ctc
        if settings["kind"] == "nemo_ctc":
            make = kind.from_nemo_ctc
        recogniser = make(**files, **shared)
    else:
        recogniser = kind.from_transducer(**files, **shared, model_type=settings["model_type"])
    code = 0
    for path in options.audio:
        try:
            samples, rate = _read(path)
        except (OSError, ValueError, MemoryError, soundfile.SoundFileError) as error:
            print(f"cannot read {path}: {error or type(error).__name__}", file=sys.stderr)
            code = 1
            continue
        _warn_if_long(path, len(samples) / rate, settings)
        started = time.perf_counter()
        result = None
        # The model may emit words for digital silence.
        if samples.any():
            result = _recognise(recogniser, samples, rate, settings)
        seconds = result.timestamps if result else []
        if settings["streaming"] and settings["kind"] == "nemo_ctc":
            # sherpa-onnx counts frames of 40 ms there, for any model.
            seconds = [second * settings["frame_ms"] / 40 for second in seconds]
        text, language = text_of_tokens(result.tokens if result else [], settings)
        line = {
            "file": path,
            "text": text,
            **({"language": language} if language else {}),
            "tokens": list(result.tokens) if result else [],
            "timestamps": [round(second, 3) for second in seconds],
            "audio_seconds": round(len(samples) / rate, 3),
            "elapsed_seconds": round(time.perf_counter() - started, 4),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)
    return code


def _export_command(options: argparse.Namespace, settings: dict[str, Any]) -> str:
    """What writes the files; RUN is the model's run, which the folder does not name."""
    parts = ["pruned-rnnt export RUN --output", shlex.quote(str(options.folder))]
    if settings["streaming"]:
        parts.append("--streaming")
    parts += [
        f"--{name} {settings[f'{name}_frames']}"
        for name in ("chunk", "left")
        if f"{name}_frames" in settings
    ]
    # Files that the command does not ask for are removed.
    wanted = {options.precision, *settings.get("precisions", ())}
    if quantised := [name for name in ("int8", "int4") if name in wanted]:
        parts += ["--precision", *quantised]
    if "fp16" in wanted:
        parts.append("--fp16")
    return " ".join(parts)


def text_of_tokens(tokens: list[str], settings: dict[str, Any]) -> tuple[str, str]:
    """The text of tokens, and its language if the first tag names one.

    sherpa-onnx's own text has the tags of languages in it, and for transducers no space before
    punctuation.
    """
    languages = {f"<|{language}|>": language for language in settings.get("languages", ())}
    has_bytes = settings.get("byte_tokens", False)
    parts = []
    for token in tokens:
        byte = _BYTE.fullmatch(token) if has_bytes else None
        parts.append(bytes.fromhex(byte[1]) if byte else token.encode())
        if token in languages:
            parts[-1] = b" "
    text = b"".join(parts).decode(errors="ignore")
    return " ".join(text.split()), next((languages[t] for t in tokens if t in languages), "")


def _read(path: str) -> tuple[Any, int]:
    """The samples, mixed to one channel, and their rate."""
    with _silence_stderr(), _opened(path) as file:
        rate = file.samplerate
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            limits = f"{LOWEST_RATE:,} to {HIGHEST_RATE:,} Hz"
            raise ValueError(f"sampling rate is {rate:,} Hz, needs {limits}")
        # soundfile seeks after each block, which fails in a pipe and in flac of unknown length.
        file.seekable = lambda: False
        blocks = []
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            blocks.append(block.mean(axis=1))
    samples = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)
    if not len(samples):
        raise ValueError("no samples")
    if not np.isfinite(samples).all():
        raise ValueError("NaN or infinite samples")
    return samples, rate


@contextmanager
def _opened(path: str) -> Iterator[soundfile.SoundFile]:
    """Open a file; one without a known end for mp3 files that do not state their length.

    libsndfile would estimate it from the size of the file, and of a variable bit rate leave out the
    end. In a pipe there is no size.
    """
    with soundfile.SoundFile(path) as file:
        if file.format not in ("MP3", "MPEG"):
            yield file
            return
    data = Path(path).read_bytes()
    if (whole := _with_length_of_all(data)) is not None:
        with soundfile.SoundFile(io.BytesIO(whole)) as file:
            yield file
        return
    reader, writer = os.pipe()
    copying = threading.Thread(target=_copy, args=(data, writer))
    copying.start()
    try:
        with soundfile.SoundFile(reader, closefd=False) as file:
            yield file
    finally:
        os.close(reader)
        copying.join()


def _with_length_of_all(data: bytes) -> bytes | None:
    """An mp3 file with the length of all of the files that it was joined from, not the first only.

    None if the first frame has no length.
    """
    begin = 0
    while data[begin : begin + 3] == b"ID3":
        # The size of the tag, seven bits in each byte.
        size = data[begin + 6 : begin + 10]
        begin += 10 + sum(value << 7 * (3 - i) for i, value in enumerate(size))
    found = list(_LENGTH.finditer(data, begin))
    if not found or found[0].start() > begin + 64:
        return None
    # The frame of a length counts, but for the first.
    frames = sum(int.from_bytes(length[1], "big") for length in found) + len(found) - 1
    stated = min(frames, 2**32 - 1).to_bytes(4, "big")
    return data[: found[0].start(1)] + stated + data[found[0].end(1) :]


def _copy(data: bytes, writer: int) -> None:
    # The reader may close the pipe before the end.
    with suppress(OSError), os.fdopen(writer, "wb") as pipe:
        pipe.write(data)


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Discard what libmpg123 prints to standard error about damaged mp3 files."""
    stderr = os.dup(2)
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _warn_if_long(path: str, seconds: float, settings: dict[str, Any]) -> None:
    """Warn of audio that is decoded as a whole and far longer than utterances of the training."""
    usual = settings.get("p99_duration")
    if not settings["streaming"] and seconds > max(_USUAL_SECONDS, 1.25 * (usual or 0.0)):
        known = f" (99% of the training's utterances have at most {usual:.0f} s)" if usual else ""
        print(
            f"warning: {path} has {seconds:.0f} s and is decoded as a whole{known}: words may be "
            "missing, and memory may grow with the square of the length; "
            "pruned_rnnt.load(FOLDER).transcribe(FILE) cuts it at pauses",
            file=sys.stderr,
        )


def _recognise(recogniser: Any, samples: Any, rate: int, settings: dict[str, Any]) -> Any:
    stream = recogniser.create_stream()
    stream.accept_waveform(rate, samples)
    # Audio shorter than one encoder frame would crash sherpa-onnx.
    missing = int(settings["shortest_seconds"] * rate) + 1 - len(samples)
    if missing > 0:
        stream.accept_waveform(rate, np.zeros(missing, dtype=np.float32))
    if settings["streaming"]:
        return _finish_stream(recogniser, stream, rate, settings["tail_seconds"])
    recogniser.decode_stream(stream)
    return stream.result


def _finish_stream(recogniser: Any, stream: Any, rate: int, tail_seconds: float) -> Any:
    """Append quiet noise, so that the last chunk with speech becomes full, and decode the stream.

    Noise is used instead of digital silence, for which some models emit words.
    """
    noise = 1e-3 * np.random.default_rng(0).standard_normal(int(tail_seconds * rate))
    stream.accept_waveform(rate, noise.astype(np.float32))
    stream.input_finished()
    while recogniser.is_ready(stream):
        recogniser.decode_stream(stream)
    return recogniser.get_result_all(stream)


if __name__ == "__main__":
    sys.exit(main())
