"""How long the stages of a transcription take, one after the other: seconds by stage.

The command overlaps them, so that a pass takes about as long as the slowest one. Here the host
waits for the device after every stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from pruned_rnnt.transcribe import audio_recogniser, batches, recogniser, transcript_files
from pruned_rnnt.transcribe.joined_path import RecordingPath

# Stage, and where the function that it consists of is looked up. `text`: from symbols on the host
# to transcriptions; `files`: from texts to files, in threads.
_STAGES: tuple[tuple[str, Any, str], ...] = (
    ("features", batches, "batch_input"),
    ("encoder", recogniser, "encode_padded"),
    ("search", recogniser, "launch_search"),
    ("alignment", recogniser, "launch_head_paths"),
    ("text", RecordingPath, "decoded"),
    ("text", audio_recogniser, "transcriptions"),
    ("files", transcript_files, "write_whole"),
)


@contextmanager
def timed_stages(device: torch.device) -> Iterator[dict[str, float]]:
    """The seconds of each stage of the transcriptions in this context, which it lengthens."""
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        for stage, place, name in _STAGES:
            function = _timed(getattr(place, name), stage, seconds, device)
            stack.enter_context(mock.patch.object(place, name, function))
        yield seconds


def _timed(
    function: Callable[..., Any], stage: str, seconds: dict[str, float], device: torch.device
) -> Callable[..., Any]:
    seconds.setdefault(stage, 0.0)

    def timed(*arguments: Any, **named: Any) -> Any:
        wait(device)
        begin = time.perf_counter()
        result = function(*arguments, **named)
        wait(device)
        seconds[stage] += time.perf_counter() - begin
        return result

    return timed


def wait(device: torch.device) -> None:
    """Wait for the work launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
