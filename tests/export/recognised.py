"""What is heard in audio files, and how wrong it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pruned_rnnt.data.audio.load_audio import audio_features, read_audio
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.decode.scoring.wer import Transcript, count_errors
from pruned_rnnt.decode.search.beam import modified_beam_search
from pruned_rnnt.train.run import LoadedModel


def error_rate(texts: Sequence[str], heard: Sequence[str]) -> float:
    """Word error rate of what was heard."""
    transcripts = [
        Transcript(id="", reference=tuple(text.split()), hypothesis=tuple(words.split()))
        for text, words in zip(texts, heard, strict=True)
    ]
    return count_errors(transcripts).rate


@torch.inference_mode()
def beam_texts(loaded: LoadedModel, paths: Sequence[Path]) -> list[str]:
    """By our modified beam search, of each file alone."""
    texts = []
    for path in paths:
        features = audio_features(read_audio(path))
        encoded = loaded.model.encode(features[None], torch.tensor([len(features)]))
        found = modified_beam_search(loaded.model, *encoded, silent_symbols=[UNKNOWN_ID])
        texts.append(loaded.tokenizer.decode(found[0][0].symbols))
    return texts
