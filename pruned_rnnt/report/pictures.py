"""Pictures of utterances: spectrogram, words, and the lattice with its band; ranges of the model.

Without a transducer (no checkpoint, or a CTC model) a picture is the spectrogram alone.

Axes: T feature frames, F mel bins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lhotse import CutSet

from pruned_rnnt.align.picture import draw_utterance
from pruned_rnnt.data.audio.feature_kinds import FBANK, FeatureKind
from pruned_rnnt.data.audio.recordings import last_line
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS, frame_seconds
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.diagnostics.labels import drawn_by_browser
from pruned_rnnt.diagnostics.utterance_figure import spectrogram_figure
from pruned_rnnt.model.activation_ranges import activation_ranges
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.report.clips import Clip, picture_clip
from pruned_rnnt.report.ranges import RangeSection, range_section
from pruned_rnnt.report.scored_set import ScoredUtterance
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.result_file import ResultFile
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.run_files import run_tokenizer
from pruned_rnnt.train.engine.train_config import AVERAGED_CHECKPOINTS
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class UtterancePictures:
    """Draws utterances of one result with the model that decoded it.

    problem: the reason if lattices are missing or come from another checkpoint; otherwise empty.
    """

    def __init__(self, config: ExperimentConfig, result: ResultFile) -> None:
        self.model: TransducerModel | None = None
        self.encoder: Encoder | None = None
        self.problem = ""
        self.stored, self.kind = config.data.features == "stored", config.feature_kind
        self.tokenizer = run_tokenizer(config.folder)
        checkpoint = _checkpoint_of(config, result)
        if checkpoint is None:
            checkpoint = config.decode.checkpoint
            self.problem = (
                f"The lattices are those of the checkpoint {checkpoint!r}, because that of the "
                f"result {result.setting} no longer exists."
            )
        decode = dataclasses.replace(config.decode, checkpoint=checkpoint, **_of_model(result))
        try:
            loaded = load_model(dataclasses.replace(config, decode=decode))
            self.encoder = loaded.model.encoder
            self.model = as_transducer(loaded.model, "a picture of the lattice")
        except (OSError, ValueError) as error:
            self.problem = f"Pictures have no lattice: {last_line(error)}."

    def clip(self, utterance: ScoredUtterance, cut: Any | None) -> Clip:
        """The picture of one utterance, or why there is none."""
        if cut is None:
            return Clip("", "no picture: the utterance is not in the data")
        try:
            with drawn_by_browser():
                return picture_clip(self._draw(utterance, cut))
        except Exception as error:  # readers of audio and features raise errors of every kind
            return Clip("", f"no picture: {last_line(error)}")

    def ranges(self, cuts: Sequence[Any]) -> RangeSection | None:
        """The ranges of the encoder's inputs of matrix products on some utterances.

        None without a checkpoint, or if an utterance cannot be read.
        """
        if self.encoder is None:
            return None
        try:
            features = [self._batch(cut, self.kind).features_NTF[0] for cut in cuts]
        except Exception:  # as in `clip`, which says why
            return None
        least = self.encoder.receptive_field + int(self.kind.needs_samples)
        features = [each_TF for each_TF in features if len(each_TF) >= least]
        found = activation_ranges(self.encoder, features)
        return range_section(found, len(features), self.encoder.config.kind)

    def _batch(self, cut: Any, kind: FeatureKind) -> Batch:
        dataset = SpeechDataset(
            self.tokenizer, stored=self.stored, kind=kind, augmenter=None, bad_audio="stop"
        )
        return dataset[0, CutSet.from_cuts([cut])]

    def _draw(self, utterance: ScoredUtterance, cut: Any) -> Figure:
        # A picture without the model shows log-mel energies.
        batch = self._batch(cut, self.kind if self.model is not None else FBANK)
        if self.model is None:
            words = [(word.word, word.start) for word in utterance.words]
            return spectrogram_figure(batch.features_NTF[0], FEATURE_SECONDS, words)
        hypothesis = _hypothesis(utterance, self.tokenizer, frame_seconds(self.model.encoder))
        figure = draw_utterance(self.model, self.tokenizer, batch, hypothesis)
        figure.suptitle("")  # the page has the texts
        return figure


def _checkpoint_of(config: ExperimentConfig, result: ResultFile) -> str | None:
    """The value of decode.checkpoint that made a result; None if it no longer exists."""
    paths = CheckpointFolder(RunFolder(config.folder).checkpoints).paths()
    if paths and result.short_setting.endswith(
        f"-{paths[-1].stem}-average-last-{min(AVERAGED_CHECKPOINTS, len(paths))}"
    ):
        return "average"
    candidates = [*paths, *sorted(config.folder.glob("*.pt"))]
    return next((str(p) for p in candidates if result.short_setting.endswith(f"-{p.stem}")), None)


def _of_model(result: ResultFile) -> dict[str, Any]:
    """The settings of a result that change the model."""
    settings = {} if result.inputs is None else result.inputs.settings
    names = ("use_average", "chunk", "left")
    return {name: settings[name] for name in names if name in settings}


def _hypothesis(
    utterance: ScoredUtterance, tokenizer: Tokenizer, frame: float
) -> Hypothesis | None:
    """The symbols of the result file at their frames; None if they are unknown."""
    ids = {name: symbol for symbol, name in enumerate(tokenizer.symbols)}
    if not utterance.tokens or any(token.name not in ids for token in utterance.tokens):
        return None
    return Hypothesis(
        symbols=tuple(ids[token.name] for token in utterance.tokens),
        # Symbols that share a frame have start times within it; 1e-3 allows for rounded times.
        frames=tuple(int(token.start / frame + 1e-3) for token in utterance.tokens),
        score=sum(token.log_prob for token in utterance.tokens),
        symbol_scores=tuple(token.log_prob for token in utterance.tokens),
    )
