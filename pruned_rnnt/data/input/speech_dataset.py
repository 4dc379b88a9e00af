"""Makes a batch from lhotse cuts: features, augmentation, symbols, padding.

Axes: N batch, T feature frames, F mel bins, U symbols.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lhotse import CutSet
from lhotse.utils import fastcopy
from torch import Tensor
from torch.utils.data import Dataset

from pruned_rnnt.data.audio.audio_file import rate_problem, without_decoder_messages
from pruned_rnnt.data.audio.features import FBANK, SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.audio.recordings import audio_files, last_line, may_be_mp3
from pruned_rnnt.data.audio.waveform import resample
from pruned_rnnt.data.input.augmentation import FeatureAugmenter, derived_seed, preserve_global_rngs
from pruned_rnnt.data.input.batch import AlignedWord, Batch, pad_features, pad_targets
from pruned_rnnt.data.input.data_config import JoiningConfig
from pruned_rnnt.data.input.filters import cut_language, cut_text
from pruned_rnnt.data.input.joining import (
    FRAMES_PER_SECOND,
    JoinedFeatures,
    groups_to_join,
    joined_utterances,
    silences_around,
    with_silence,
)
from pruned_rnnt.data.input.manifest_items import MOST_OUTSIDE
from pruned_rnnt.data.input.prepared_folder import read_cuts
from pruned_rnnt.data.input.sampler import LatticeBound
from pruned_rnnt.data.input.shar_members import with_shar_audio
from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.data.tokens.tokenizer import Tokenizer

# Number of noises drawn for an utterance; they are concatenated until it ends.
_NOISES = 8

# Features (T, F) of an utterance in each view.
Views = tuple[Tensor, ...]
BadAudioPolicy = Literal["skip", "stop"]


class _Utterance(NamedTuple):
    """One utterance of a batch, of one cut or of several that were joined."""

    id: str
    text: str
    symbols: list[int]
    language: str
    duration: float
    length_before: int
    words: tuple[AlignedWord, ...]
    views: Views


class BadAudio(Exception):
    """Features or audio of a cut cannot be read; the message names cut, files and cause."""


class SpeechDataset(Dataset[Batch]):
    """Maps (epoch, cuts) to a `Batch`; runs in the worker processes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stored: bool,
        kind: FeatureKind = FBANK,
        augmenter: FeatureAugmenter | None,
        bad_audio: BadAudioPolicy = "skip",
        substitutes: Sequence[Any] = (),
        allow_commands: bool = False,
        two_views: bool = False,
        joining: JoiningConfig | None = None,
        lattice_bound: LatticeBound | None = None,
    ) -> None:
        """stored: load the features of the cuts; otherwise compute them from the recordings.
        kind: the features to compute.
        augmenter: None leaves the features unchanged.
        bad_audio: leave an utterance that cannot be read out of its batch, or raise ValueError.
        substitutes: if no utterance of a batch can be read, the first readable one of these
            replaces it, because all processes need the same number of batches; its id ends in
            `_dup0`. Without substitutes such a batch is empty.
        allow_commands: for the noises, as in `manifest_items`.
        two_views: batches have `second_view_NTF`; needs an augmenter.
        joining: silence around utterances and joined utterances; needs an augmenter.
        lattice_bound: of a batch of joined utterances.
        """
        self.tokenizer = tokenizer
        self.augmenter = augmenter
        self.bad_audio = bad_audio
        self.two_views = two_views
        self.joining = joining or JoiningConfig()
        self.lattice_bound = lattice_bound
        self.substitutes = tuple(substitutes)
        self._stored, self._kind = stored, kind
        noise = augmenter.config.noise_cuts if augmenter is not None else ""
        self._noise_cuts = _read_noises(Path(noise), stored, allow_commands) if noise else []

    def __getitem__(self, item: tuple[int, CutSet]) -> Batch:
        epoch, cuts = item
        left_out: list[str] = []
        longest_first = sorted(cuts, key=lambda cut: (-cut.duration, cut.id))
        with preserve_global_rngs():
            read = self._read(longest_first, epoch, left_out) or self._substitute(epoch, left_out)
            utterances = [self._utterance(*each, epoch) for each in self._joined(read, epoch)]
        # The sort is stable: without changes of length, the order is that of the durations.
        utterances.sort(key=lambda utterance: -len(utterance.views[0]))
        features_NTF, feature_lengths_N = pad_features(
            [utterance.views[0] for utterance in utterances], self._kind.padding
        )
        second_view_NTF = None
        if self.two_views:
            second_views = [utterance.views[1] for utterance in utterances]
            second_view_NTF, _ = pad_features(second_views, self._kind.padding)
        targets_NU, target_lengths_N = pad_targets([utterance.symbols for utterance in utterances])
        return Batch(
            features_NTF=features_NTF,
            feature_lengths_N=feature_lengths_N,
            targets_NU=targets_NU,
            target_lengths_N=target_lengths_N,
            texts=tuple(self.tokenizer.normalise(utterance.text) for utterance in utterances),
            languages=tuple(utterance.language for utterance in utterances),
            ids=tuple(utterance.id for utterance in utterances),
            durations=tuple(utterance.duration for utterance in utterances),
            words=tuple(utterance.words for utterance in utterances),
            left_out=tuple(left_out),
            second_view_NTF=second_view_NTF,
            lengths_before=tuple(utterance.length_before for utterance in utterances),
        )

    def _read(
        self, cuts: Sequence[Any], epoch: int, left_out: list[str]
    ) -> list[tuple[Any, Tensor]]:
        """The readable cuts with their features; appends a message about each of the others."""
        read = []
        for cut in cuts:
            try:
                read.append((cut, self._with_noise(cut, epoch, left_out)))
            except BadAudio as error:
                if self.bad_audio == "stop":
                    raise ValueError(f"{error} (data.bad_audio=skip leaves it out)") from error
                left_out.append(str(error))
        return read

    def _substitute(self, epoch: int, left_out: list[str]) -> list[tuple[Any, Tensor]]:
        if not self.substitutes:
            return []
        for substitute in self.substitutes:
            for cut, features_TF in self._read([substitute], epoch, []):
                return [(fastcopy(cut, id=f"{cut.id}_dup0"), features_TF)]
        raise ValueError(
            f"no utterance of a batch can be read, and no other one to replace it: {left_out[0]}"
        )

    def _joined(
        self, read: Sequence[tuple[Any, Tensor]], epoch: int
    ) -> list[tuple[list[Any], JoinedFeatures]]:
        """The utterances of a batch with silence around them, some of them of several cuts."""
        if self.augmenter is None:
            return [([cut], JoinedFeatures(features_TF, (0,))) for cut, features_TF in read]
        ids = [cut.id for cut, _ in read]
        rng = np.random.default_rng(derived_seed(self.augmenter.seed, epoch, *ids, "joining"))
        most = len(read)
        if self.lattice_bound is not None:
            most = self._most_joined([cut for cut, _ in read], self.lattice_bound)
        durations = [float(cut.duration) for cut, _ in read]
        kind = self._kind.name
        groups = groups_to_join(durations, most, self.joining, rng)
        joined = [
            joined_utterances([read[place][1] for place in group], self.joining, rng, kind)
            for group in groups
        ]
        silences = silences_around([len(each.features_TF) for each in joined], self.joining, rng)
        return [
            ([read[place][0] for place in group], with_silence(each, *silence, rng, kind))
            for group, each, silence in zip(groups, joined, silences, strict=True)
        ]

    def _most_joined(self, cuts: Sequence[Any], bound: LatticeBound) -> int:
        """Utterances of a group, so that groups of so many or fewer do not exceed the bound."""
        sizes = [bound.size(cut) for cut in cuts]
        frames, symbols = max(size[0] for size in sizes), max(size[1] for size in sizes)
        joining = self.joining
        pause = bound.size.frames(joining.pause_seconds) if joining.pause_probability else 0
        silence = bound.size.frames(joining.silence_seconds) if joining.silence_probability else 0

        def nodes(size: int) -> int:
            groups = -(-len(cuts) // size)
            longest = size * (frames + pause) - pause + silence
            return groups * longest * size * symbols

        more = range(2, len(cuts) + 1)
        return next((size - 1 for size in more if nodes(size) > bound.most), len(cuts))

    def _utterance(self, cuts: Sequence[Any], joined: JoinedFeatures, epoch: int) -> _Utterance:
        """One utterance of the cuts, augmented unless the dataset is for validation."""
        name = "+".join(cut.id for cut in cuts)
        views: Views = (joined.features_TF,)
        if self.augmenter is not None:
            if self.two_views:
                views = self.augmenter.two_views(joined.features_TF, epoch=epoch, cut_id=name)
            else:
                views = (self.augmenter(joined.features_TF, epoch=epoch, cut_id=name),)
        texts = [cut_text(cut) for cut in cuts]
        text = ("" if all(map(written_without_spaces, texts)) else " ").join(texts)
        languages = [cut_language(cut) for cut in cuts]
        if len(set(languages)) == 1:
            symbols = self.tokenizer.encode(text, languages[0])
        else:  # each part has the tag of its language
            encoded = map(self.tokenizer.encode, texts, languages)
            symbols = [symbol for part in encoded for symbol in part]
        return _Utterance(
            id=name,
            text=text,
            symbols=symbols,
            language=languages[0],
            duration=sum(float(cut.duration) for cut in cuts),
            length_before=len(joined.features_TF),
            words=tuple(
                replace(word, start=word.start + begin / FRAMES_PER_SECOND)
                for cut, begin in zip(cuts, joined.begins, strict=True)
                for word in aligned_words(cut)
            ),
            views=views,
        )

    def _with_noise(self, cut: Any, epoch: int, left_out: list[str]) -> Tensor:
        if self.augmenter is None or not self._noise_cuts:
            return self._load(cut)
        config = self.augmenter.config
        rng = random.Random(derived_seed(self.augmenter.seed, epoch, cut.id, "noise"))
        if rng.random() >= config.noise_cuts_probability:
            return self._load(cut)
        # lhotse shuffles all noises in each call, so pass only as many as an utterance needs.
        some = rng.sample(self._noise_cuts, min(_NOISES, len(self._noise_cuts)))
        try:
            with _as_bad_audio(cut):
                if not self._stored:
                    some = [_at_rate(with_shar_audio(noise), cut.sampling_rate) for noise in some]
                mixed = CutSet.from_cuts([with_shar_audio(cut)]).mix(
                    CutSet.from_cuts(some),
                    snr=config.noise_cuts_snr_db,
                    preserve_id="left",
                    seed=rng.getrandbits(32),
                    random_mix_offset=True,
                )[0]
            return self._load(mixed)
        except BadAudio as error:
            # This raises BadAudio too if the speech itself cannot be read.
            features_TF = self._load(cut)
            if self.bad_audio == "stop":
                raise
            left_out.append(f"noise of {error}")
            return features_TF

    def _load(self, cut: Any) -> Tensor:
        with _as_bad_audio(cut):
            features_TF = self._load_unchecked(cut)
        # Log energies and samples are small numbers: the sum is finite if and only if all are.
        if features_TF.shape[0] == 0 or not math.isfinite(features_TF.sum().item()):
            raise BadAudio(f"{cut.id} ({_files(cut)}): no frames, or features not finite")
        return features_TF

    def _load_unchecked(self, cut: Any) -> Tensor:
        if self._stored:
            return torch.from_numpy(cut.load_features()).float()
        if rate_problem(cut.sampling_rate):
            raise ValueError(rate_problem(cut.sampling_rate))
        with without_decoder_messages(may_be_mp3(cut)):
            samples_S = with_shar_audio(cut).load_audio()[0]
        samples_S = resample(samples_S, cut.sampling_rate, SAMPLING_RATE)
        return self._kind.of_recording(samples_S)


@contextmanager
def _as_bad_audio(cut: Any) -> Iterator[None]:
    """Raises BadAudio that names the cut for an error of reading it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # readers of audio and features raise errors of every kind
        raise BadAudio(f"{cut.id} ({_files(cut)}): {last_line(error)}") from error


def _read_noises(path: Path, stored: bool, allow_commands: bool) -> list[Any]:
    """The cuts to mix in; errors name the setting and its file."""
    setting = f"data.augmentation.noise_cuts={path}"
    try:
        noises = list(read_cuts(path, allow_commands))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{setting}: {error}; `pruned-rnnt prepare musan` makes noises, and "
            "data.augmentation.noise_cuts= trains without them"
        ) from error
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    if not noises:
        raise ValueError(f"{setting} has no cuts")
    wanted = "features" if stored else "recording"
    for noise in noises:
        if not getattr(noise, f"has_{wanted}", False):
            raise ValueError(
                f"{setting}: {noise.id} is not a cut with {wanted}, which data.features="
                f"{'stored' if stored else 'waveform'} needs"
            )
        if not stored and rate_problem(noise.sampling_rate):
            raise ValueError(f"{setting}: {noise.id}: {rate_problem(noise.sampling_rate)}")
    return noises


def _at_rate(cut: Any, rate: int) -> Any:
    return cut if cut.sampling_rate == rate else cut.resample(rate)


def _files(cut: Any) -> str:
    """The files of a cut or a mixture, for messages."""
    found: list[str] = []
    for track in getattr(cut, "tracks", [cut]):
        part = getattr(track, "cut", track)
        if getattr(part, "has_features", False):
            found.append(str(part.features.storage_path))
        else:
            found += [str(path) for path in audio_files(part)]
    return ", ".join(dict.fromkeys(found)) or "in memory"


def aligned_words(cut: Any) -> tuple[AlignedWord, ...]:
    """Words with times from the `word` alignments of a cut; empty if there are none.

    Times are relative to the cut, as `prepare` and `align` write them; or to the recording, as in
    cuts that lhotse makes of a long one, if all words then begin in the cut, and otherwise not.
    """
    words = tuple(
        AlignedWord(
            word=item.symbol,
            start=float(item.start),
            duration=float(item.duration or 0.0),
        )
        # The order of `cut_text`.
        for supervision in sorted(cut.supervisions, key=lambda s: s.start)
        for item in (supervision.alignment or {}).get("word", ())
    )
    inside = tuple(word for word in words if word.start <= cut.duration + MOST_OUTSIDE)
    if len(inside) == len(words):
        return words
    moved = tuple(replace(word, start=round(word.start - cut.start, 6)) for word in words)
    fits = all(-MOST_OUTSIDE <= x.start <= cut.duration + MOST_OUTSIDE for x in moved)
    return moved if fits else inside
