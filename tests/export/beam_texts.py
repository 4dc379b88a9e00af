"""Texts of beam search for audio files, and word error rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.decode.scoring.error_rates import Transcript, count_errors
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.train.run import LoadedModel


def error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Word error rate of hypotheses."""
    transcripts = [
        Transcript(id="", reference=tuple(one.split()), hypothesis=tuple(other.split()))
        for one, other in zip(references, hypotheses, strict=True)
    ]
    return count_errors(transcripts).rate


@torch.inference_mode()
def beam_texts(loaded: LoadedModel, paths: Sequence[Path]) -> list[str]:
    """Decode each file alone with our modified beam search."""
    search = ModifiedBeamSearch(loaded.model, silent_symbols=[UNKNOWN_ID])
    texts = []
    for path in paths:
        features = audio_features(read_audio(path))
        encoded = loaded.model.encode(features[None], torch.tensor([len(features)]))
        ((best, *_),) = search(*encoded)
        texts.append(loaded.tokenizer.decode(best.symbols))
    return texts
