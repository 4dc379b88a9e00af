"""Opens recordings from files and shell commands, checks them, and reads their samples.

Axes: S audio samples.
"""

from __future__ import annotations

import functools
import io
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from lhotse import AudioSource, Recording
from lhotse.audio.backend import (
    CompositeAudioBackend,
    LibsndfileBackend,
    get_current_audio_backend,
    get_default_audio_backend,
    set_current_audio_backend,
)
from lhotse.utils import fastcopy

from pruned_rnnt.data.audio.audio_file import (
    UNKNOWN_FRAMES,
    is_mp3,
    open_audio,
    without_decoder_messages,
)
from pruned_rnnt.data.audio.file_headers import describe_truncation
from pruned_rnnt.data.audio.mp3_length import with_mp3_length
from pruned_rnnt.data.audio.waveform import FloatArray

_TRUNCATED = "truncated: fewer samples than the header says"
# Samples to read at a time.
_BLOCK = 2**20
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class _WithMp3Length(LibsndfileBackend):  # type: ignore[misc]  # lhotse has no types
    def read_audio(self, path_or_fd: Any, *args: Any, **kwargs: Any) -> tuple[FloatArray, int]:
        read: tuple[FloatArray, int] = super().read_audio(
            with_mp3_length(path_or_fd), *args, **kwargs
        )
        return read

    def info(self, path_or_fd: Any, *args: Any, **kwargs: Any) -> Any:
        return super().info(with_mp3_length(path_or_fd), *args, **kwargs)


def _read_mp3_to_the_end() -> None:
    """Make lhotse's default reader find the length of mp3 files; a reader that was chosen stays."""
    default = get_default_audio_backend()
    if get_current_audio_backend() is default:
        backends = [
            _WithMp3Length() if type(b) is LibsndfileBackend else b for b in default.backends
        ]
        set_current_audio_backend(CompositeAudioBackend(backends))


# At the import, which every process that loads recordings makes, those of data loaders too.
_read_mp3_to_the_end()


class UnusableUtterance(Exception):
    """An utterance cannot be used. The same cause always has the same `reason`.

    details: file names and values of this utterance.
    """

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.details = details


def open_recording(audio: str, is_command: bool) -> Recording:
    """The recording of a file or a command. Raises UnusableUtterance."""
    found = _recording_or_reason(audio, is_command)
    if isinstance(found, UnusableUtterance):
        raise UnusableUtterance(found.reason, found.details)
    return found


@functools.lru_cache(maxsize=8)
def _recording_or_reason(audio: str, is_command: bool) -> Recording | UnusableUtterance:
    """Cached, because many segments may belong to one recording, usable or not."""
    try:
        recording = _opened(audio, is_command)
    except UnusableUtterance as reason:
        return reason
    if recording.num_samples >= UNKNOWN_FRAMES:
        # Transcription reads such files, but lhotse needs the length of recordings.
        return UnusableUtterance(
            "header without the number of samples",
            f"{audio}: its encoder wrote it to a pipe; convert it with `ffmpeg -i`",
        )
    return recording


def _opened(audio: str, is_command: bool) -> Recording:
    if is_command:
        return _recording_of_command(audio.rstrip()[:-1])
    # A relative path in a manifest would start at the prepared folder.
    path = Path(audio).absolute()
    _check_file(path)
    try:
        with without_decoder_messages():
            return Recording.from_file(path, recording_id=path.stem)
    except Exception as error:  # backends raise errors of every kind
        raise UnusableUtterance(
            "audio cannot be read", f"{audio}: {_cause(path, error)}"
        ) from error


def _cause(path: Path, error: Exception) -> str:
    """The error of our reader, which is shorter than lhotse's message about all of its readers."""
    try:
        with open_audio(path):
            return last_line(error)
    except ValueError as own_error:
        return str(own_error).removeprefix(f"{path} cannot be read as audio: ")


def _recording_of_command(command: str) -> Recording:
    import soundfile

    try:
        data = _output(command)
        with without_decoder_messages():
            info = soundfile.info(with_mp3_length(io.BytesIO(data)))
    except soundfile.LibsndfileError as error:
        raise UnusableUtterance(
            "command of wav.scp wrote no audio", f"{command}: {error}"
        ) from error
    return Recording(
        id=command,
        sources=[AudioSource(type="command", channels=list(range(info.channels)), source=command)],
        sampling_rate=info.samplerate,
        num_samples=info.frames,
        duration=info.frames / info.samplerate,
    )


@functools.lru_cache(maxsize=1)
def _output(command: str) -> bytes:
    """The output of a command; cached, because the segments of one recording follow each other."""
    done = subprocess.run(command, shell=True, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-200:]
        raise UnusableUtterance(
            "command of wav.scp failed", f"{command}: {said or done.returncode}"
        )
    return done.stdout


def _with_command_output(cut: Any) -> Any:
    recording = getattr(cut, "recording", None)
    if recording is None or all(source.type != "command" for source in recording.sources):
        return cut
    sources = [
        AudioSource(type="memory", channels=source.channels, source=_output(source.source))
        if source.type == "command"
        else source
        for source in recording.sources
    ]
    return fastcopy(cut, recording=fastcopy(recording, sources=sources))


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise UnusableUtterance("audio file not found", str(path)) from error
    except OSError as error:
        raise UnusableUtterance(
            "audio file cannot be opened", f"{path}: {error.strerror}"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnusableUtterance("not a file", str(path))
    if runs_shell(str(path)):
        raise UnusableUtterance(
            "name of a .sph file has characters that a shell interprets", str(path)
        )
    if status.st_size == 0:
        raise UnusableUtterance("empty audio file", str(path))
    truncation = describe_truncation(path)
    if truncation:
        raise UnusableUtterance(_TRUNCATED, f"{path}: {truncation}")


def read_samples(cut: Any) -> FloatArray:
    """The cut's samples, (S,) float32 at its own rate. Raises UnusableUtterance."""
    for path in audio_files(cut):
        _check_file(path)
    try:
        with without_decoder_messages(may_be_mp3(cut)):
            samples_S: FloatArray = _with_command_output(cut).load_audio()[0]
    except Exception as error:  # lhotse's backends raise errors of every kind
        raise _unreadable(cut, error) from error
    if samples_S.size == 0:
        raise UnusableUtterance("no samples")
    if not np.isfinite(samples_S).all():
        raise UnusableUtterance("samples that are infinite or NaN")
    if not samples_S.any():
        channels = getattr(getattr(cut, "recording", None), "channel_ids", None) or ()
        other = f"channel {cut.channel} of {len(channels)}: see --channel"
        raise UnusableUtterance("silent: every sample is zero", other if len(channels) > 1 else "")
    return samples_S


def _unreadable(cut: Any, error: Exception) -> UnusableUtterance:
    """Why a cut's audio cannot be read, as for transcription; else lhotse's error."""
    for path in audio_files(cut):
        try:
            with open_audio(path) as file:
                for _ in file.blocks(_BLOCK):
                    pass
                truncation = file.truncation()
        except OSError:
            continue
        except ValueError as reason:
            return UnusableUtterance("audio cannot be read", str(reason))
        if truncation:
            return UnusableUtterance(_TRUNCATED, f"{path}: {truncation}")
    return UnusableUtterance("audio cannot be read", last_line(error))


def audio_files(cut: Any) -> list[Path]:
    """The files of a cut's recording, without sources that are commands or in memory."""
    recording = getattr(cut, "recording", None)
    sources = recording.sources if recording is not None else []
    return [Path(source.source) for source in sources if source.type == "file"]


def may_be_mp3(cut: Any) -> bool:
    """True if libmpg123 may print messages while it decodes the cut's audio."""
    files = audio_files(cut)
    return not files or any(map(is_mp3, files))


def last_line(error: BaseException) -> str:
    """The last line of an error's message, without lhotse's hints and control characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Set LHOTSE_", "[extra info]"))]
    return _CONTROL.sub("?", lines[-1] if lines else type(error).__name__)[:300]


def runs_shell(path: str) -> bool:
    """True if a shell would interpret characters in the name of this file.

    lhotse decodes .sph files with sph2pipe and puts their names unquoted into the command.
    """
    return path.lower().endswith(".sph") and shlex.quote(path) != path
