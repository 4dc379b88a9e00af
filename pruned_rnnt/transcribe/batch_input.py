"""The features of segments and whole recordings as one batch on the device, and the interface of
its decoder.

Nothing here waits for the device.

Axes: N batch, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pruned_rnnt.data.audio.features import FRAME_SAMPLES, batch_features, frame_count
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, as_floats
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.shape_steps import BatchPadding
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.system.device import to_device
from pruned_rnnt.transcribe.lost_speech import Stretch
from pruned_rnnt.transcribe.recordings import WholeRecording
from pruned_rnnt.transcribe.segments import Segment
from pruned_rnnt.transcribe.speech_energy import is_digital_silence

# On a GPU, numbers of frames between powers of two: 1.5 % of a batch is padding on average.
_FRAME_STEP, _STEPS = 32, 32


class BatchInput(NamedTuple):
    """A batch on the device.

    features_NTF: float32, zeros beyond the lengths.
    lengths_N: int64 frames of each utterance.
    is_silent_N: bool: a whole recording of digital silence.
    samples: (S,) of each utterance on the CPU; empty unless they were asked for.
    """

    features_NTF: Tensor
    lengths_N: Tensor
    is_silent_N: Tensor
    samples: Sequence[FloatArray | Pcm16Array] = ()


def part_frames(part: Segment | WholeRecording) -> int:
    """Feature frames of a part of a recording."""
    if isinstance(part, WholeRecording):
        return frame_count(len(part.samples_S))
    return len(part.features_TF)


def batch_input(parts: Sequence[Segment | WholeRecording], decoder: BatchDecoder) -> BatchInput:
    """The batch of `parts`, in their order; with `samples` if the decoder needs them."""
    device = decoder.device
    lengths = [part_frames(part) for part in parts]
    frames = decoder.padded_frames(max(lengths))
    whole = [n for n, part in enumerate(parts) if isinstance(part, WholeRecording)]
    others = [n for n, part in enumerate(parts) if isinstance(part, Segment)]
    found = []
    if whole:
        recordings = [part.samples_S for part in parts if isinstance(part, WholeRecording)]
        found.append(batch_features(recordings, device, frames)[0])
    if others:
        segments = [part.features_TF for part in parts if isinstance(part, Segment)]
        found.append(_padded(segments, frames, device))
    features_NTF = torch.cat(found) if len(found) > 1 else found[0]
    if len(found) > 1:
        order_N = torch.tensor([*whole, *others]).argsort()
        features_NTF = features_NTF[to_device(order_N, device)]
    lengths_N = to_device(torch.tensor(lengths), device)
    silent_NT = is_digital_silence(features_NTF.flatten(0, 1)).view(-1, frames)
    if min(lengths) < frames:
        beyond_NT = torch.arange(frames, device=device) >= lengths_N[:, None]
        features_NTF = features_NTF.masked_fill(beyond_NT[:, :, None], 0.0)
        silent_NT = silent_NT | beyond_NT
    is_whole_N = torch.tensor([isinstance(part, WholeRecording) for part in parts])
    is_silent_N = silent_NT.all(dim=1) & to_device(is_whole_N, device)
    samples = [part.samples_S for part in parts] if decoder.needs_samples else ()
    return BatchInput(features_NTF, lengths_N, is_silent_N, samples)


def parts_of_batch(
    batch: BatchInput,
    parts: Sequence[tuple[int, Stretch]],
    decoder: BatchDecoder,
    least_frames: int = 1,
) -> BatchInput:
    """A batch of parts of the utterances of another one: the row and the frames of each."""
    device = decoder.device
    features = [batch.features_NTF[row, begin:end] for row, (begin, end) in parts]
    features = [
        nn.functional.pad(x_TF.T[None], (0, max(0, least_frames - len(x_TF))), "replicate")[0].T
        for x_TF in features
    ]
    lengths = [len(each) for each in features]
    frames = decoder.padded_frames(max(lengths))
    padded_NTF = nn.utils.rnn.pad_sequence(features, batch_first=True)
    padded_NTF = nn.functional.pad(padded_NTF, (0, 0, 0, frames - padded_NTF.size(1)))
    lengths_N = to_device(torch.tensor(lengths), device)
    samples = [
        batch.samples[row][begin * FRAME_SAMPLES : end * FRAME_SAMPLES]
        for row, (begin, end) in parts
        if batch.samples
    ]
    silent_N = torch.zeros_like(lengths_N, dtype=torch.bool)
    return BatchInput(padded_NTF, lengths_N, silent_N, samples)


def amplified(batch: BatchInput, gain_NT: Tensor) -> BatchInput:
    """The batch with the energy of each frame multiplied by exp(gain)."""
    samples = []
    gains = gain_NT.cpu() if batch.samples else ()  # a copy waits for the device
    for samples_S, gain_T in zip(batch.samples, gains, strict=True):
        floats_S = as_floats(samples_S)
        factors_S = (gain_T / 2).exp().repeat_interleave(FRAME_SAMPLES).numpy()
        factors_S = np.pad(factors_S, (0, max(0, len(floats_S) - len(factors_S))), mode="edge")
        samples.append(floats_S * factors_S[: len(floats_S)])
    return batch._replace(features_NTF=batch.features_NTF + gain_NT[:, :, None], samples=samples)


def _padded(segments: Sequence[Tensor], frames: int, device: torch.device) -> Tensor:
    """Features (T, F) of segments, padded with zeros to (N, `frames`, F) on the device."""
    longest = max(segments, key=len)
    padded = [nn.functional.pad(longest, (0, 0, 0, frames - len(longest))), *segments]
    return to_device(nn.utils.rnn.pad_sequence(padded, batch_first=True)[1:], device)


# The best path through each utterance, and that of the CTC head, if there is one.
BestPaths = list[tuple[Hypothesis, HeadPath | None]]


class BatchDecoder(NamedTuple):
    """Decodes batches.

    best_paths: called with a batch and whether the paths of the CTC head are needed; makes the best
        paths, and yields before it waits for the device.
    device: where it decodes.
    least_frames: feature frames that a segment needs; shorter segments have no path.
    frame_step: feature frames of an output frame.
    needs_samples: whether the batches need samples, because the model has features of its own.
    lock: held while a batch is launched or its results are read.
    release_memory: called after a batch ran out of memory.
    """

    best_paths: Callable[[BatchInput, bool], Generator[None, None, BestPaths]]
    device: torch.device
    least_frames: int
    frame_step: int = SUBSAMPLING_FACTOR
    needs_samples: bool = False
    lock: AbstractContextManager[object] = nullcontext()
    release_memory: Callable[[], None] = lambda: None

    def padded_frames(self, frames: int) -> int:
        """The feature frames of a batch whose longest utterance has `frames`."""
        if self.device.type != "cuda":
            return frames
        padding = BatchPadding(_FRAME_STEP, _STEPS, more=self.least_frames - 1)
        return padding.frames_of(frames)
