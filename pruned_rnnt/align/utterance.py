"""Align a split of prepared data, or one audio file with its text: utterances with the times of
their tokens and words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import Tensor

from pruned_rnnt.align.best_path import TargetBatch, align_symbols, too_long
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.features import SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.input.batch import Batch, pad_targets
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.text_normalisation import NO_SPACES
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.decode.encode import encode_padded
from pruned_rnnt.decode.head_paths import head_paths
from pruned_rnnt.decode.word_times import (
    WORD_START,
    TimedToken,
    TimedWord,
    frame_seconds,
    timed_tokens,
    timed_words,
    word_parts,
    words_of_parts,
)
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.transcribe.windows import WindowEncoder

# A word is a character of a script without spaces, or other text between spaces.
_WORDS = re.compile(rf"[{NO_SPACES}]|[^\s{NO_SPACES}]+")


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
        FileNotFoundError, ValueError: as `read_audio`.
    """
    samples_S = read_audio(path)
    features_TF = FeatureKind.of_encoder(model.config.encoder).of_recording(samples_S)
    text = tokenizer.normalise(text)
    targets_NU, target_lengths = pad_targets([tokenizer.encode(text)])
    windows = WindowEncoder.as_trained(model, p99_duration)([features_TF])
    encoded_NTE = torch.cat([window.encoded_NTE for window in windows], dim=1)
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
    frames_N = torch.tensor([encoded_NTE.size(1)])
    yield from align_encoded(model, encoded_NTE, frames_N, batch, tokenizer, calibration)


@dataclass(frozen=True, kw_only=True)
class AlignedUtterance:
    """The alignment of one utterance.

    seconds: length of the audio.
    score: log-probability of the path.
    words: have the spelling of the text.
    unknown: words or characters of the text without a token, which were aligned as `<unk>`.
    """

    id: str
    text: str
    seconds: float
    tokens: tuple[TimedToken, ...]
    words: tuple[TimedWord, ...]
    score: float
    unknown: tuple[str, ...] = ()

    @property
    def word_score(self) -> float:
        """`score` per word; each character of a script without spaces
        counts as a word."""
        return self.score / max(1, len(_WORDS.findall(self.text)))


@dataclass(frozen=True, kw_only=True)
class NotAligned:
    """An utterance without an alignment, and the reason."""

    id: str
    reason: str


def align_batches(
    model: SpeechModel,
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    calibration: Calibration | None = None,
) -> Iterator[AlignedUtterance | NotAligned]:
    """Align every utterance of the batches; calibration: of the model."""
    device = next(model.parameters()).device
    model.eval()
    for batch in batches:
        batch = batch.to(device)
        encoded_NTE, lengths = encode_padded(model, batch.features_NTF, batch.feature_lengths_N)
        yield from align_encoded(model, encoded_NTE, lengths, batch, tokenizer, calibration)


def align_encoded(
    model: SpeechModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    batch: Batch,
    tokenizer: Tokenizer,
    calibration: Calibration | None = None,
) -> Iterator[AlignedUtterance | NotAligned]:
    """Align a batch whose encoder output (N, T, E) with (N,) lengths is given.

    Times are those of the CTC head if the model has one, scores those of the joiner.
    """
    names = tokenizer.symbols
    texts = [
        targets[:count].tolist()
        for targets, count in zip(batch.targets_NU, batch.target_lengths_N.tolist(), strict=True)
    ]
    heads = head_paths(model, encoded_NTE, lengths, texts)
    targets = TargetBatch(encoded_NTE, lengths, batch.targets_NU, batch.target_lengths_N)
    for n, path in enumerate(align_symbols(model, targets)):
        symbols = texts[n]
        if path is None or not symbols:
            reason = _failure_reason(model, symbols, int(lengths[n]))
            yield NotAligned(id=batch.ids[n], reason=reason)
            continue
        tokens = timed_tokens(
            names,
            symbols,
            path.frames,
            path.log_probs,
            heads[n],
            durations=path.durations,
            frame_seconds=frame_seconds(model.encoder),
        )
        seconds = batch.durations[n]
        yield AlignedUtterance(
            id=batch.ids[n],
            text=batch.texts[n],
            seconds=seconds,
            tokens=tokens,
            words=_words(tokenizer, batch.texts[n], tokens, seconds, calibration),
            score=path.score,
            unknown=(
                tuple(tokenizer.unknown_parts(batch.texts[n])) if UNKNOWN_ID in symbols else ()
            ),
        )


def _words(
    tokenizer: Tokenizer,
    text: str,
    tokens: Sequence[TimedToken],
    seconds: float,
    calibration: Calibration | None,
) -> tuple[TimedWord, ...]:
    """The words of a path for `text`, as `timed_words`, but without `<unk>`."""
    symbols = [token.symbol for token in tokens]
    encoded = tokenizer.encode(text) if UNKNOWN_ID in symbols else []
    # A language tag may come first.
    tags = len(symbols) - len(encoded)
    if not encoded or symbols[max(tags, 0) :] != encoded:
        return timed_words(tokenizer, tokens, seconds, calibration)
    pieces = [""] * tags + tokenizer.pieces(text)
    spelt = [token._replace(token=piece) for token, piece in zip(tokens, pieces, strict=True)]
    parts = word_parts(spelt, seconds, calibration)
    rest = iter(pieces)
    texts = ["".join(islice(rest, len(part.symbols))) for part in parts]
    words = words_of_parts(parts, [text.replace(WORD_START, " ").strip() for text in texts])
    return tuple(part for word in words for part in _divided(word))


def _divided(word: TimedWord) -> list[TimedWord]:
    """Unknown words in a row, which share one symbol, with equal parts of its time."""
    texts = word.word.split()
    share = (word.end - word.start) / len(texts)
    times = [round(word.start + n * share, 4) for n in range(len(texts))] + [word.end]
    return [
        TimedWord(text, start, end, word.confidence)
        for text, (start, end) in zip(texts, pairwise(times), strict=True)
    ]


def _failure_reason(model: SpeechModel, symbols: list[int], frames: int) -> str:
    loss = model.loss_config
    if not symbols:
        return "the text is empty"
    if frames == 0:
        return "the audio is too short for one encoder frame"
    if reason := too_long(model, frames, len(symbols)):
        return reason
    if loss.kind == "ctc":
        repetitions = sum(before == after for before, after in pairwise(symbols))
        if len(symbols) + repetitions > frames:
            return (
                f"{len(symbols)} symbols do not fit into {frames} frames: CTC needs one for each "
                f"and one between equal neighbours, of which there are {repetitions}"
            )
    if loss.durations and min(loss.durations) > 0 and len(symbols) >= frames:
        return (
            f"{len(symbols)} symbols do not fit into {frames} frames: a model of loss.durations "
            f"{list(loss.durations)} needs one for each and one for a blank"
        )
    usable = frames - 1 if loss.rnnt_type == "rna" else frames
    if loss.kind != "ctc" and loss.rnnt_type != "regular" and len(symbols) > usable:
        return (
            f"{len(symbols)} symbols do not fit into {usable} frames: a model of rnnt_type "
            f"{loss.rnnt_type!r} emits at most one per frame"
        )
    return "no path has a finite probability (infinite or NaN values in the model's output)"
