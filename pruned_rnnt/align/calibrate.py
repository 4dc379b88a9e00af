"""`pruned-rnnt decode RUN --calibrate`: word times and confidences from a decoded set.

Axes: N batch, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.align.best_path import TargetBatch, align_symbols
from pruned_rnnt.data.audio.features import FeatureKind
from pruned_rnnt.data.input.batch import AlignedWord, Batch
from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration, Distance, fit_confidence, fit_times
from pruned_rnnt.decode.decode_set import Decoded
from pruned_rnnt.decode.encode import encode_batch
from pruned_rnnt.decode.head_paths import head_paths
from pruned_rnnt.decode.scoring.error_statistics import can_align, right_words
from pruned_rnnt.decode.word_times import (
    FEATURE_SECONDS,
    WORD_START,
    TimedToken,
    frame_seconds,
    timed_tokens,
    timed_words,
    word_spans,
    worst_scores,
)
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.transcribe.speech_energy import EnergyDetector

# The detector finds the start of speech this much too late, and its end this much too early: faint
# sounds are close to the noise (synthetic corpus, 120 utterances).
_FAINT_BEGIN, _FAINT_END = 0.03, 0.04


def calibrate(
    model: SpeechModel,
    tokenizer: Tokenizer,
    batches: Iterable[Batch],
    decoded: Sequence[Decoded],
    source: str,
) -> Calibration:
    """Fit word times to the references of a set, and confidences to its best hypotheses.

    Args:
        batches: of the set.
        decoded: its utterances.
        source: name of set and checkpoint.
    """
    times = fit_times(_distances(model, tokenizer, batches), _letters(tokenizer))
    scores, right = [], []
    for utterance in decoded:
        for part, is_right in _words(utterance, tokenizer):
            scores.append(worst_scores(part))
            right.append(is_right)
    return Calibration(times=times, confidence=fit_confidence(scores, right), source=source)


def word_confidences(
    decoded: Iterable[Decoded], tokenizer: Tokenizer, calibration: Calibration | None
) -> tuple[list[float], list[bool]]:
    """The confidence of each word of the best hypotheses, and whether the word is correct."""
    confidences, right = [], []
    for utterance in decoded:
        for part, is_right in _words(utterance, tokenizer):
            (word,) = timed_words(tokenizer, part, calibration=calibration)
            confidences.append(word.confidence)
            right.append(is_right)
    return confidences, right


def _words(utterance: Decoded, tokenizer: Tokenizer) -> list[tuple[Sequence[TimedToken], bool]]:
    """The tokens of each word of the best hypothesis, and whether the word is correct.

    Phrases in scripts without spaces are left out, because it is unknown where their words end.
    Empty if the words are not those of the text, and for texts that are too long to align.
    """
    if not utterance.hypotheses:
        return []
    best, head = utterance.hypotheses[0], utterance.heads[0]
    tokens = timed_tokens(tokenizer.symbols, best.symbols, best.frames, best.symbol_scores, head)
    texts = utterance.transcript.reference, utterance.transcript.hypothesis
    parts = [tokens[i:j] for i, j in word_spans([token.token for token in tokens])]
    words = tokenizer.decode_all([[token.symbol for token in part] for part in parts])
    spelt = [(part, word) for part, word in zip(parts, words, strict=True) if word]
    if tuple(word for _, word in spelt) != texts[1] or not can_align(*texts):
        return []
    return [
        (part, is_right)
        for (part, word), is_right in zip(spelt, right_words(*texts), strict=True)
        if not written_without_spaces(word)
    ]


@torch.inference_mode()
def _distances(
    model: SpeechModel, tokenizer: Tokenizer, batches: Iterable[Batch]
) -> list[Distance]:
    """Distances between symbols and word or speech boundaries, from the references of a set."""
    names = tokenizer.symbols
    found: list[Distance] = []
    kind = FeatureKind.of_encoder(model.encoder.config)
    for batch in batches:
        encoded_NTE, lengths = encode_batch(model, batch)
        counts = batch.target_lengths_N.tolist()
        texts = [batch.targets_NU[n, :count].tolist() for n, count in enumerate(counts)]
        heads = head_paths(model, encoded_NTE, lengths, texts)
        targets = TargetBatch(
            encoded_NTE,
            lengths,
            batch.targets_NU.to(encoded_NTE.device),
            batch.target_lengths_N,
        )
        for n, path in enumerate(align_symbols(model, targets)):
            if path is None or not texts[n]:
                continue
            tokens = timed_tokens(
                names,
                texts[n],
                path.frames,
                path.log_probs,
                heads[n],
                frame_seconds=frame_seconds(model.encoder),
            )
            spoken = batch.words[n]
            spans = word_spans([token.token for token in tokens])
            if len(spoken) == len(spans):
                found += _of_words([tokens[i:j] for i, j in spans], spoken)
            elif heads[n] is not None and kind.name != "nemo":
                # Without a CTC head, symbols may be far from their sounds, so the boundaries of the
                # speech give no information about them. The detector does not know NeMo's features.
                features_TF = batch.features_NTF[n, : int(batch.feature_lengths_N[n])]
                found += _of_speech(tokens, kind.energies(features_TF))
    return found


def _of_words(
    parts: Sequence[Sequence[TimedToken]], spoken: Sequence[AlignedWord]
) -> list[Distance]:
    found = []
    for tokens, word in zip(parts, spoken, strict=True):
        first, last = tokens[0], tokens[-1]
        found.append(Distance(None, first.symbol, first.start - word.start))
        found.append(Distance(last.symbol, None, word.start + word.duration - last.start))
    return found


def _of_speech(tokens: Sequence[TimedToken], features_TF: Tensor) -> list[Distance]:
    detector = EnergyDetector()
    nothing = np.zeros(0, dtype=np.float32)
    is_speech_T = torch.cat((detector.accept(nothing, features_TF.cpu()), detector.finish()))
    speech = is_speech_T.nonzero()[:, 0].tolist()
    if not speech:
        return []
    begin = speech[0] * FEATURE_SECONDS - _FAINT_BEGIN
    end = (speech[-1] + 1) * FEATURE_SECONDS + _FAINT_END
    between = [
        Distance(one.symbol, other.symbol, other.start - one.start)
        for one, other in pairwise(tokens)
    ]
    return [
        Distance(None, tokens[0].symbol, tokens[0].start - begin),
        *between,
        Distance(tokens[-1].symbol, None, end - tokens[-1].start),
    ]


def _letters(tokenizer: Tokenizer) -> list[int]:
    return [max(1, len(name.replace(WORD_START, ""))) for name in tokenizer.symbols]
