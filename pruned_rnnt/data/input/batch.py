"""A batch of utterances, the input of the model, and what distinguishes utterances with equal ids.

Axes: N batch, T feature frames (10 ms), F mel bins, U symbols.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OtherBatchesError(ValueError):
    """The data give other batches than those that a run has used in the epoch that it continues.

    Raised when the loader is at its place in the epoch, so that it can go on with other batches.

    Attributes:
        batches: batches of the epoch before that place.
    """

    def __init__(self, message: str, batches: int) -> None:
        super().__init__(message)
        self.batches = batches


def check_seed_and_processes(
    state: Mapping[str, Any], seed: int, world_size: int, what: str
) -> None:
    """Raises ValueError if the seed or the world size is not that of a loader's saved `state`."""
    advice = {"seed": "keep data.seed={}", "world_size": "keep the number of processes at {}"}
    for key, own in (("seed", seed), ("world_size", world_size)):
        if state[key] != own:
            raise ValueError(
                f"cannot resume the {what} with {key} {own}; the saved state has {state[key]}: "
                f"{advice[key].format(state[key])}, or choose another train.folder"
            )


@dataclass(frozen=True, kw_only=True)
class AlignedWord:
    """A reference word with its start and duration, in seconds from the start of the utterance."""

    word: str
    start: float
    duration: float


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Features, targets and metadata of utterances, longest utterance first.

    features_NTF: float32 log-mel energies, padded with the log of a tiny energy; or rows of 160
        samples, padded with zeros, with model.encoder.features=samples.
    feature_lengths_N: int64, number of frames; always on the CPU.
    targets_NU: int32 symbol ids, padded with the blank 0.
    target_lengths_N: int32, number of symbols; always on the CPU.
    texts, ids: reference text, as the tokenizer spells it, and cut id of each utterance.
    durations: duration of each utterance in seconds.
    lengths_before: number of frames of each utterance before augmentation, which may change it;
        default: those of feature_lengths_N.
    words: reference words with their times, before any augmentation that changes time; empty for an
        utterance without an alignment.
    languages: language code of each reference, "" where it is unknown.
    left_out: a message for each utterance of the batch that could not be read.
    second_view_NTF: the same utterances with other SpecAugment masks, for CR-CTC; or None.
    repeats: ids of utterances that only make the numbers of batches of several ranks equal; they
        do not count.
    """

    features_NTF: Tensor
    feature_lengths_N: Tensor
    targets_NU: Tensor
    target_lengths_N: Tensor
    texts: tuple[str, ...]
    ids: tuple[str, ...]
    durations: tuple[float, ...]
    words: tuple[tuple[AlignedWord, ...], ...]
    languages: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    second_view_NTF: Tensor | None = None
    repeats: frozenset[str] = frozenset()
    lengths_before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths_before:
            object.__setattr__(self, "lengths_before", tuple(self.feature_lengths_N.tolist()))
        if not self.languages:
            object.__setattr__(self, "languages", ("",) * len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, keep_N: Tensor) -> Batch:
        """The utterances for which the mask (N,) is true; padding is not trimmed."""
        if bool(keep_N.all()):
            return self
        rows = keep_N.nonzero()[:, 0]
        places = rows.tolist()
        return replace(
            self,
            features_NTF=self.features_NTF[rows.to(self.features_NTF.device)],
            feature_lengths_N=self.feature_lengths_N[rows],
            targets_NU=self.targets_NU[rows.to(self.targets_NU.device)],
            target_lengths_N=self.target_lengths_N[rows],
            texts=tuple(self.texts[place] for place in places),
            ids=tuple(self.ids[place] for place in places),
            durations=tuple(self.durations[place] for place in places),
            words=tuple(self.words[place] for place in places),
            languages=tuple(self.languages[place] for place in places),
            lengths_before=tuple(self.lengths_before[place] for place in places),
            second_view_NTF=_optional(lambda x: x[rows.to(x.device)], self.second_view_NTF),
        )

    def to(self, device: torch.device | str) -> Batch:
        """This batch with features and targets on `device`; lengths stay on the CPU."""
        return replace(
            self,
            features_NTF=self.features_NTF.to(device, non_blocking=True),
            targets_NU=self.targets_NU.to(device, non_blocking=True),
            second_view_NTF=_optional(
                lambda x: x.to(device, non_blocking=True), self.second_view_NTF
            ),
        )

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory (called by torch's DataLoader)."""
        return replace(
            self,
            features_NTF=self.features_NTF.pin_memory(),
            targets_NU=self.targets_NU.pin_memory(),
            second_view_NTF=_optional(Tensor.pin_memory, self.second_view_NTF),
        )


def _optional(change: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    return None if x is None else change(x)


def pad_targets(targets: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Symbol ids -> targets_NU int32 padded with the blank 0, target_lengths_N int32."""
    target_lengths_N = torch.tensor([len(ids) for ids in targets], dtype=torch.int32)
    longest = max((len(ids) for ids in targets), default=0)
    targets_NU = torch.zeros((len(targets), longest), dtype=torch.int32)
    for row_U, ids in zip(targets_NU, targets, strict=True):
        row_U[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return targets_NU, target_lengths_N


def pad_features(features: Sequence[Tensor], value: float) -> tuple[Tensor, Tensor]:
    """N float matrices (T_n, F) -> features_NTF float32 padded with `value`, lengths_N int64."""
    lengths_N = torch.tensor([f.shape[0] for f in features], dtype=torch.int64)
    longest = int(lengths_N.max()) if features else 0
    shape = (len(features), longest, features[0].shape[1] if features else 0)
    features_NTF = torch.full(shape, value, dtype=torch.float32)
    for row_TF, feature_TF in zip(features_NTF, features, strict=True):
        row_TF[: feature_TF.shape[0]] = feature_TF
    return features_NTF, lengths_N


class Audio(NamedTuple):
    """What an utterance's features are recognised by, also on another machine.

    frames: number of feature frames (10 ms).
    mean: of the log-mel energies; rounding moves it by far less than the last of its 4 decimals.
    """

    frames: int
    mean: float


class BatchIdentity:
    """The identity of the utterances in batches that pass through `over`.

    audio: by utterance id.
    """

    def __init__(self) -> None:
        self.audio: dict[str, Audio] = {}
        self._digests: list[bytes] = []

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, and read each of them on the way."""
        for batch in batches:
            self.add(batch)
            yield batch

    @property
    def digest(self) -> str:
        """Hexadecimal digits, equal for equal ids, texts and features, in any order and batches."""
        return hashlib.sha256(b"".join(sorted(self._digests))).hexdigest()

    def add(self, batch: Batch) -> None:
        """Read a batch."""
        lengths = batch.feature_lengths_N.tolist()
        for n, (name, text) in enumerate(zip(batch.ids, batch.texts, strict=True)):
            features_TF = batch.features_NTF[n, : lengths[n]].cpu().contiguous()
            digest = hashlib.sha256(f"{name}\n{text}\n".encode())
            digest.update(features_TF.numpy().data)
            self._digests.append(digest.digest())
            mean = float(features_TF.double().mean()) if features_TF.numel() else 0.0
            self.audio[name] = Audio(lengths[n], round(mean, 4))
