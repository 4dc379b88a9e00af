"""The files of transcripts, which threads write while the next recordings are decoded.

Creating a file may take a millisecond, on a network disk or in a container, and the thread that
decodes would give a GPU no work in that time.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pruned_rnnt.system.console import naming_stdout
from pruned_rnnt.system.whole_files import write_whole
from pruned_rnnt.transcribe.transcription import on_one_line

_THREADS = 2
# Files that are being written or wait for a thread.
_MOST_WAITING = 256
# Errors of a disk that later transcripts would have, too.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_OF_THE_NAME = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EILSEQ)
# File name suffixes that differ from the name of the format.
_SUFFIXES = {"text": "txt"}


class AudioInput(NamedTuple):
    """An audio file and the name of its transcript.

    name: without the suffix: the file's name, or its path below the folder that was searched.
    """

    path: Path
    name: str


def transcript_file(item: AudioInput, options: argparse.Namespace) -> Path:
    """The file in the folder `options.output` that a transcript is written to."""
    suffix = _SUFFIXES.get(options.format, options.format)
    target: Path = options.output / f"{item.name}.{suffix}"
    return target


class _Writing(NamedTuple):
    item: AudioInput
    target: Path
    written: Future[None]


class TranscriptFiles:
    """Writes files, and prints the name of each once it is written, in the order of `add`.

    A context, at whose end all files are written, also those added before an error.

    Attributes:
        all_written: False, and an error was printed, once a file could not be written.
    """

    def __init__(self) -> None:
        self.all_written = True
        self._pool = ThreadPoolExecutor(_THREADS, "transcripts")
        self._waiting: deque[_Writing] = deque()

    def add(self, text: str, item: AudioInput, target: Path) -> None:
        """Write the transcript of a file soon.

        Raises:
            OSError: the disk is full or fails, or standard output cannot be written to.
        """
        written = self._pool.submit(write_whole, target, text.encode())
        self._waiting.append(_Writing(item, target, written))
        while self._waiting and (
            self._waiting[0].written.done() or len(self._waiting) > _MOST_WAITING
        ):
            self._report(self._waiting.popleft())

    def __enter__(self) -> TranscriptFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_lost = isinstance(error, OSError) and error.errno in _OF_THE_DISK
        self._pool.shutdown(cancel_futures=is_lost)
        while self._waiting:
            writing = self._waiting.popleft()
            if error is None:
                self._report(writing)
            elif not writing.written.cancelled():
                with suppress(OSError):  # one error is enough
                    self._report(writing)

    def _report(self, writing: _Writing) -> None:
        try:
            writing.written.result()
        except OSError as error:
            if error.errno in _OF_THE_DISK:
                raise
            rename = "rename the audio file, or " if error.errno in _OF_THE_NAME else ""
            print(
                f"pruned-rnnt transcribe: {writing.item.path}: its transcript cannot be written: "
                f"{error}; {rename}choose another --output",
                file=sys.stderr,
            )
            self.all_written = False
            return
        with naming_stdout():
            print(f"wrote {on_one_line(str(writing.target))}", flush=True)
