"""From lhotse cuts to a batch: features, augmentation, symbols, padding.

Axes: N batch, T feature frames, F mel bins, U symbols.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lhotse import CutSet
from lhotse.utils import LOG_EPSILON
from torch import Tensor
from torch.utils.data import Dataset

from pruned_rnnt.data.augmentation import FeatureAugmenter, derived_seed
from pruned_rnnt.data.batch import AlignedWord, Batch, pad_features, pad_targets
from pruned_rnnt.data.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.filters import cut_text
from pruned_rnnt.data.prepared import read_cuts
from pruned_rnnt.data.tokens import Tokenizer
from pruned_rnnt.data.waveform import resample


class CutsToBatch(Dataset[Batch]):
    """Maps (epoch, cuts) to a Batch; runs in the worker processes."""

    def __init__(
        self, tokenizer: Tokenizer, *, stored: bool, augmenter: FeatureAugmenter | None
    ) -> None:
        """stored: load the features of the cuts; otherwise compute them from the recordings.

        augmenter: None leaves the features as they are.
        """
        self.tokenizer = tokenizer
        self.augmenter = augmenter
        self._fbank = None if stored else fbank_extractor()
        noise = augmenter.config.noise_cuts if augmenter is not None else ""
        self._noise_cuts = read_cuts(Path(noise)).to_eager() if noise else None

    def __getitem__(self, item: tuple[int, CutSet]) -> Batch:
        epoch, cuts = item
        ordered = sorted(cuts, key=lambda cut: (-cut.duration, cut.id))
        features = [self._features(cut, epoch) for cut in ordered]
        if self.augmenter is not None and self.augmenter.config.tempo > 0:
            order = sorted(range(len(ordered)), key=lambda i: -features[i].shape[0])
            ordered = [ordered[i] for i in order]
            features = [features[i] for i in order]
        features_NTF, feature_lengths_N = pad_features(features, LOG_EPSILON)
        texts = tuple(cut_text(cut) for cut in ordered)
        targets_NU, target_lengths_N = pad_targets([self.tokenizer.encode(t) for t in texts])
        return Batch(
            features_NTF=features_NTF,
            feature_lengths_N=feature_lengths_N,
            targets_NU=targets_NU,
            target_lengths_N=target_lengths_N,
            texts=texts,
            ids=tuple(cut.id for cut in ordered),
            durations=tuple(float(cut.duration) for cut in ordered),
            words=tuple(aligned_words(cut) for cut in ordered),
        )

    def _features(self, cut: Any, epoch: int) -> Tensor:
        if self.augmenter is None:
            return self._load(cut)
        if self._noise_cuts is not None:
            config = self.augmenter.config
            mixed = CutSet.from_cuts([cut]).mix(
                self._noise_cuts,
                snr=config.noise_cuts_snr_db,
                mix_prob=config.noise_cuts_probability,
                preserve_id="left",
                seed=derived_seed(self.augmenter.seed, epoch, cut.id, "noise"),
                random_mix_offset=True,
            )
            return self.augmenter(self._load(mixed[0]), epoch=epoch, cut_id=cut.id)
        return self.augmenter(self._load(cut), epoch=epoch, cut_id=cut.id)

    def _load(self, cut: Any) -> Tensor:
        if self._fbank is None:
            return torch.from_numpy(cut.load_features())
        samples_S = resample(cut.load_audio()[0], cut.sampling_rate, SAMPLING_RATE)
        return torch.from_numpy(self._fbank.extract(samples_S, SAMPLING_RATE))


def aligned_words(cut: Any) -> tuple[AlignedWord, ...]:
    """Words with times from the `word` alignments of a cut; empty if there are none."""
    return tuple(
        AlignedWord(
            word=item.symbol,
            start=float(item.start),
            duration=float(item.duration or 0.0),
        )
        for supervision in cut.supervisions
        for item in (supervision.alignment or {}).get("word", ())
    )
