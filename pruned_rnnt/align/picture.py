"""`pruned-rnnt decode RUN --plot ID`: pictures of single utterances of prepared data.

Axes: N = 1 utterance, T frames, E encoder width, U symbols.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lhotse import CutSet

from pruned_rnnt.align.best_path import (
    SymbolAlignment,
    TargetBatch,
    align_symbols,
    lattice_rows,
    too_long,
)
from pruned_rnnt.data.audio.features import FeatureKind
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.decode_set import decode_set
from pruned_rnnt.decode.head_paths import head_paths
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import frame_seconds, timed_tokens, timed_words
from pruned_rnnt.diagnostics import (
    Alignment,
    Track,
    lattice_occupancy,
    utterance_figure,
)
from pruned_rnnt.diagnostics.labels import isolated
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import TransducerModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Similar utterance ids named in an error.
_MAX_SIMILAR = 5


class DrawnUtterance(NamedTuple):
    """The picture of an utterance, and the batch with its features."""

    id: str
    batch: Batch
    figure: Figure


def draw_utterances(
    loaded: tuple[TransducerModel, Tokenizer],
    data: DataModule,
    ids: Sequence[str],
    config: DecodeConfig,
    language_model: LanguageModel | None = None,
) -> Iterator[DrawnUtterance]:
    """Decode and draw utterances of the split `config.split`.

    Args:
        language_model: the model that `config.fusion.lm` names.

    Raises:
        ValueError: the split has no utterance with such an id; the message names similar ones.
    """
    model, tokenizer = loaded
    cuts = find_cuts(data.folder.cuts(config.split, lazy=True), ids, config.split)
    to_batch = SpeechDataset(
        tokenizer, stored=data.config.features == "stored", kind=data.kind, augmenter=None
    )
    for cut in cuts:
        batch = to_batch[0, CutSet.from_cuts([cut])]
        (decoded,) = decode_set(model, [batch], tokenizer, config, language_model).utterances
        best = decoded.hypotheses[0] if decoded.hypotheses else None
        yield DrawnUtterance(cut.id, batch, draw_utterance(model, tokenizer, batch, best))


def find_cuts(cuts: Iterable[Any], wanted: Sequence[str], split: str) -> list[Any]:
    """The cuts with these ids, in the order of `wanted`; raises as `draw_utterances` does."""
    found: dict[str, Any] = {}
    names = []
    for cut in cuts:
        names.append(cut.id)
        if cut.id in wanted:
            found[cut.id] = cut
    for name in wanted:
        if name not in found:
            similar = difflib.get_close_matches(name, names, n=_MAX_SIMILAR, cutoff=0.3)
            hint = (
                f"did you mean {', '.join(similar)}?"
                if similar
                else f"it has {names[:_MAX_SIMILAR]} ..."
            )
            raise ValueError(f"no utterance {name!r} among the {len(names)} of {split}; {hint}")
    return [found[name] for name in wanted]


@torch.inference_mode()
def draw_utterance(
    model: TransducerModel, tokenizer: Tokenizer, batch: Batch, hypothesis: Hypothesis | None
) -> Figure:
    """Spectrogram, hypothesis, words and lattice of the one utterance of a batch.

    The occupancy is that of the model's joiner over the whole lattice. The band is the one that the
    simple loss chooses for the pruned loss.

    Raises:
        ValueError: the utterance is too short for a frame of the encoder, or too long for one
            search in memory.
    """
    batch = batch.to(next(model.parameters()).device)
    encoded_NTE, frames_N = model.encode(batch.features_NTF, batch.feature_lengths_N)
    frames, symbol_count = int(frames_N[0]), int(batch.target_lengths_N[0])
    if frames == 0:
        raise ValueError(f"{batch.ids[0]} is too short for one encoder frame")
    if reason := too_long(model, frames, symbol_count):
        raise ValueError(f"{batch.ids[0]}: {reason}")
    targets = TargetBatch(encoded_NTE, frames_N, batch.targets_NU, batch.target_lengths_N)
    rows = lattice_rows(model, targets)
    loss = model.loss_config
    occupancy = lattice_occupancy(
        rows,
        frames_N,
        batch.target_lengths_N,
        rnnt_type=loss.rnnt_type,
        durations=loss.durations,
    )
    (path,) = align_symbols(model, targets)
    bounds = None
    if model.pruned_loss is not None:
        losses = model(
            batch.features_NTF,
            batch.feature_lengths_N,
            batch.targets_NU,
            batch.target_lengths_N,
            step=0,
        )
        bounds = losses.bounds
    symbols = batch.targets_NU[0, :symbol_count].tolist()
    names = tokenizer.symbols
    seconds, frame = batch.durations[0], frame_seconds(model.encoder)

    def timed_track(name: str, ids: Sequence[int], path: SymbolAlignment) -> Track:
        (head,) = head_paths(model, encoded_NTE, frames_N, [ids])
        tokens = timed_tokens(
            names,
            ids,
            path.frames,
            path.log_probs,
            head,
            durations=path.durations,
            frame_seconds=frame,
        )
        words = timed_words(tokenizer, tokens, seconds)
        return _track(name, [(w.word, w.start, w.end) for w in words], frame)

    tracks = []
    if batch.words[0]:
        spoken = [(w.word, w.start, w.start + w.duration) for w in batch.words[0]]
        tracks.append(_track("spoken", spoken, frame))
    alignment = None
    if path is not None:
        tracks.append(timed_track("reference", symbols, path))
        alignment = Alignment(torch.tensor([path.frames]), torch.tensor([path.score]))
    emissions: list[tuple[str, int]] = []
    text = ""
    if hypothesis is not None:
        ids, at, scores = hypothesis.symbols, hypothesis.frames, hypothesis.symbol_scores
        found = SymbolAlignment(at, scores, hypothesis.score, hypothesis.durations)
        tracks.append(timed_track("recognised", ids, found))
        emissions = list(zip([names[symbol] for symbol in ids], at, strict=True))
        text = tokenizer.decode(ids)
    kind = FeatureKind.of_encoder(model.encoder.config)
    return utterance_figure(
        kind.energies(batch.features_NTF[0, : int(batch.feature_lengths_N[0])]),
        emissions,
        tracks,
        occupancy,
        bounds,
        alignment,
        target_length=len(symbols),
        logit_length=frames,
        tokens=[names[symbol] for symbol in symbols],
        frame_seconds=frame,
        title=f"{batch.ids[0]}\nreference:  {isolated(batch.texts[0])}\n"
        f"recognised: {isolated(text)}",
    )


def _track(name: str, words: Iterable[tuple[str, float, float]], frame: float) -> Track:
    return Track(name, [(word, start / frame, end / frame) for word, start, end in words])
