"""Lengths of the batches of a measurement, made from the lengths of real utterances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BUCKETS = 30
FRAMES_PER_SECOND = 100
# Feature frames for the first encoder frame, and for each further one.
_FIRST, _MORE = 9, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLengths:
    """Lengths of the utterances of a batch, longest first.

    frames_N: int64, feature frames of 10 ms.
    tokens_N: int64, symbols of the text.
    """

    frames_N: np.ndarray
    tokens_N: np.ndarray

    @property
    def audio_seconds(self) -> float:
        return float(self.frames_N.sum()) / FRAMES_PER_SECOND

    @property
    def shape(self) -> tuple[int, int, int]:
        """Utterances, longest frames, longest tokens."""
        return len(self.frames_N), int(self.frames_N.max()), int(self.tokens_N.max())


def read_lengths(path: Path) -> BatchLengths:
    """All utterances of an .npz file with `frames` (encoder frames of 40 ms) and `tokens`.

    Raises:
        ValueError: an array is missing, or the arrays do not fit together.
    """
    with np.load(path) as file:
        missing = {"frames", "tokens"} - set(file.files)
        if missing:
            raise ValueError(f"{path} has no array {sorted(missing)}, needs frames and tokens")
        frames, tokens = (file[name].astype(np.int64) for name in ("frames", "tokens"))
    if frames.ndim != 1 or frames.shape != tokens.shape or min(frames.min(), tokens.min()) < 1:
        raise ValueError(
            f"{path}: frames {frames.shape} and tokens {tokens.shape} need one number of at least "
            "1 for each utterance"
        )
    order = np.argsort(-frames, kind="stable")
    return BatchLengths(frames_N=_FIRST + _MORE * (frames[order] - 1), tokens_N=tokens[order])


def make_batches(
    utterances: BatchLengths, *, seconds: float, count: int, seed: int
) -> list[BatchLengths]:
    """`count` batches in random order, no two of one shape, each with up to `seconds` of audio.

    The utterances of a batch come from one of 30 buckets of equal total duration, as with lhotse's
    DynamicBucketingSampler.

    Raises:
        ValueError: the utterances make fewer batches.
    """
    rng = np.random.default_rng(seed)
    by_shape = {batch.shape: batch for batch in _filled(utterances, seconds, rng)}
    different = list(by_shape.values())
    if len(different) < count:
        raise ValueError(
            f"the utterances of --shapes make {len(different)} different batches of {seconds:g} s, "
            f"needs {count}: lower --batches or --seconds"
        )
    return [different[index] for index in rng.permutation(len(different))[:count]]


def _filled(
    utterances: BatchLengths, seconds: float, rng: np.random.Generator
) -> Iterator[BatchLengths]:
    """Full batches of each bucket; the rest of a bucket is left out."""
    done = utterances.frames_N.cumsum()
    bucket_N = (done - 1) * BUCKETS // done[-1]
    for bucket in range(BUCKETS):
        members = rng.permutation(np.flatnonzero(bucket_N == bucket))
        first, frames = 0, 0
        for place, utterance in enumerate(members):
            frames += int(utterances.frames_N[utterance])
            if frames > seconds * FRAMES_PER_SECOND and place > first:
                # Utterances are sorted by falling length.
                chosen = np.sort(members[first:place])
                yield BatchLengths(
                    frames_N=utterances.frames_N[chosen], tokens_N=utterances.tokens_N[chosen]
                )
                first, frames = place, int(utterances.frames_N[utterance])


def save_batches(batches: Sequence[BatchLengths], path: Path) -> None:
    np.savez(
        path,
        frames=np.concatenate([batch.frames_N for batch in batches]),
        tokens=np.concatenate([batch.tokens_N for batch in batches]),
        utterances=np.array([len(batch.frames_N) for batch in batches]),
    )


def load_batches(path: Path) -> list[BatchLengths]:
    """Read a file that `save_batches` wrote."""
    with np.load(path) as file:
        ends = file["utterances"].cumsum()[:-1]
        frames, tokens = np.split(file["frames"], ends), np.split(file["tokens"], ends)
    return [
        BatchLengths(frames_N=frames_N, tokens_N=tokens_N)
        for frames_N, tokens_N in zip(frames, tokens, strict=True)
    ]
