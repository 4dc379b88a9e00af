"""Align a split of prepared data, or one audio file with its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from pruned_rnnt.align.utterance import (
    AlignedUtterance,
    NotAligned,
    align_batches,
    align_encoded,
)
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.feature_kinds import FeatureKind
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.input.batch import Batch, pad_targets
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.transcribe.windows import WindowEncoder

# The search needs about 40 bytes per lattice node: 8 GB.
_MAX_NODES = 2 * 10**8


def align_set(
    model: SpeechModel,
    tokenizer: Tokenizer,
    data: DataModule,
    batches: Iterable[Batch],
    calibration: Calibration | None = None,
) -> Iterator[AlignedUtterance | NotAligned]:
    """Align every utterance of the batches, which come from a loader of `data`.

    Raises:
        ValueError: the data were prepared with tokens other than the model's.
    """
    if data.tokenizer.symbols != tokenizer.symbols:
        raise ValueError(
            f"the tokens of {data.config.path} differ from those of the model: "
            "prepare these data again with the run's tokens, by `pruned-rnnt prepare ... "
            "--tokenizer-from RUN`"
        )
    return align_batches(model, batches, tokenizer, calibration)


def align_file(
    model: SpeechModel,
    tokenizer: Tokenizer,
    path: Path,
    text: str,
    p99_duration: float | None = None,
    calibration: Calibration | None = None,
) -> Iterator[AlignedUtterance | NotAligned]:
    """Align one audio file, with its stem as the utterance id; long audio is encoded in windows.

    Args:
        p99_duration: as for `WindowEncoder.as_trained`.
        calibration: of the model.

    Raises:
        FileNotFoundError, ValueError: as `read_audio`, or the audio and text are too long for
            one search in memory.
    """
    samples_S = read_audio(path)
    features_TF = FeatureKind.of_encoder(model.config.encoder).of_recording(samples_S)
    text = tokenizer.normalise(text)
    targets_NU, target_lengths = pad_targets([tokenizer.encode(text)])
    windows = WindowEncoder.as_trained(model, p99_duration)([features_TF])
    encoded_NTE = torch.cat([window.encoded_NTE for window in windows], dim=1)
    frames, symbols = encoded_NTE.size(1), targets_NU.size(1)
    if frames * (symbols + 1) > _MAX_NODES:
        raise ValueError(
            f"{path} has {frames} frames and the text {symbols} symbols; their product is above "
            f"{_MAX_NODES}: split the audio and align the parts"
        )
    batch = Batch(
        features_NTF=features_TF[None],
        feature_lengths_N=torch.tensor([len(features_TF)]),
        targets_NU=targets_NU.to(encoded_NTE.device),
        target_lengths_N=target_lengths,
        texts=(text,),
        ids=(path.stem,),
        durations=(len(samples_S) / SAMPLING_RATE,),
        words=((),),
    )
    yield from align_encoded(
        model, encoded_NTE, torch.tensor([frames]), batch, tokenizer, calibration
    )
