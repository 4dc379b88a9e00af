"""Finds speech with the neural network of the optional package silero-vad, in a stream.

The package contains the network as an ONNX file, which onnxruntime runs here; its code, which needs
other packages, is not imported.

Axes: S samples at 16 kHz, C samples of a chunk, T feature frames (10 ms).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FRAME_SAMPLES, SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.system.optional_packages import require

# The network's sizes at 16 kHz: new samples of a chunk, samples before them, and the state.
_CHUNK, _BEFORE, _STATE_SHAPE = 512, 64, (2, 1, 128)
# Speech begins where the probability is above the first value, and ends where it is below the
# second one.
_BEGINS_ABOVE, _ENDS_BELOW = 0.5, 0.35


class SileroDetector:
    """Distinguishes speech from all other sounds; one object for one stream.

    Raises:
        MissingPackageError: silero-vad or onnxruntime is not installed.
        FileNotFoundError: the installed silero-vad has no ONNX file.
    """

    def __init__(self) -> None:
        require("silero_vad", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # The chunks are so small that more threads would wait for each other.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(
            str(_network_path()), options, providers=["CPUExecutionProvider"]
        )
        self._samples_S = np.zeros(_BEFORE, dtype=np.float32)
        self._state = np.zeros(_STATE_SHAPE, dtype=np.float32)
        self._is_speech = False
        # Chunks decided so far, and frames returned.
        self._chunks = self._frames = 0

    def accept(self, samples_S: FloatArray, features_TF: Tensor) -> Tensor:
        """More (S,) samples -> (T,) bool, True for speech: the next frames that are decided."""
        self._samples_S = np.concatenate((self._samples_S, samples_S))
        decided = [self._next_chunk() for _ in range((len(self._samples_S) - _BEFORE) // _CHUNK)]
        return self._of_frames(decided)

    def finish(self) -> Tensor:
        """(T,) bool of the remaining frames, at the end of the stream."""
        left = len(self._samples_S) - _BEFORE
        if not left:
            return torch.zeros(0, dtype=torch.bool)
        self._samples_S = np.pad(self._samples_S, (0, _CHUNK - left))
        return self._of_frames([self._next_chunk()])

    def _next_chunk(self) -> bool:
        chunk_NC = self._samples_S[None, : _BEFORE + _CHUNK]
        values = {
            "input": chunk_NC.astype(np.float32),
            "state": self._state,
            "sr": np.array(SAMPLING_RATE, dtype=np.int64),
        }
        probability, self._state = self._session.run(None, values)
        self._samples_S = self._samples_S[_CHUNK:]
        threshold = _ENDS_BELOW if self._is_speech else _BEGINS_ABOVE
        self._is_speech = float(probability[0, 0]) > threshold
        return self._is_speech

    def _of_frames(self, decided: list[bool]) -> Tensor:
        """The frames whose centres are in these chunks."""
        first = self._chunks
        self._chunks += len(decided)
        centre = FRAME_SAMPLES // 2
        frames = max(0, -(-(self._chunks * _CHUNK - centre) // FRAME_SAMPLES))
        centres_T = torch.arange(self._frames, frames) * FRAME_SAMPLES + centre
        self._frames = frames
        return torch.tensor(decided, dtype=torch.bool)[centres_T // _CHUNK - first]


def _network_path() -> Path:
    spec = find_spec("silero_vad")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        if (path := Path(folder) / "data/silero_vad.onnx").is_file():
            return path
    raise FileNotFoundError(
        "the installed silero-vad has no file data/silero_vad.onnx: pip install 'silero-vad>=6.2.3'"
    )
