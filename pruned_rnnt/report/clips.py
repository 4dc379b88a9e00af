"""Audio and pictures of utterances as data URLs, with a limit on their bytes for the whole page.

A picture has the spectrogram, words, and the lattice with its band. Without a transducer (no
checkpoint, or a CTC model) it is the spectrogram alone.

Axes: T feature frames, F mel bins.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from warnings import catch_warnings, filterwarnings

from lhotse import CutSet

from pruned_rnnt.align.picture import draw_utterance
from pruned_rnnt.data.audio.audio_file import without_decoder_messages
from pruned_rnnt.data.audio.features import FBANK, SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.audio.recordings import last_line, may_be_mp3
from pruned_rnnt.data.audio.waveform import resample
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.shar_members import with_shar_audio
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import FEATURE_SECONDS, frame_seconds
from pruned_rnnt.diagnostics.labels import drawn_by_browser
from pruned_rnnt.diagnostics.utterance_figure import spectrogram_figure
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.parameter_values import fingerprint
from pruned_rnnt.model.quantisation import activation_ranges
from pruned_rnnt.model.speech_model import TransducerModel
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

# Of libsndfile's scale from 0 (best) to 1: about 45 kbit/s for speech at 16 kHz.
_COMPRESSION = 0.5
# Sampling rates up to 16 kHz at which libsndfile can write MP3.
_MP3_RATES = (8000, 11025, 12000, SAMPLING_RATE)
# Of the spectrogram and the lattice in a picture.
_DOTS_PER_INCH = 80
# Characters that may stand in a data URL as they are.
_UNQUOTED = "/+=:;,.-_ ()'"


class Clip(NamedTuple):
    """A file in the page: its data URL, or why there is none."""

    url: str
    problem: str = ""


class ByteBudget:
    """Counts the bytes of data URLs that may still be put into the page."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.left_out = 0

    def take(self, clip: Clip) -> Clip:
        """The clip; if it does not fit, an empty clip with the reason."""
        if len(clip.url) > self.left:
            self.left_out += 1
            return Clip("", "left out: the page would exceed --megabytes")
        self.left -= len(clip.url)
        return clip


def audio_clip(cut: Any | None) -> Clip:
    """The first channel of a cut as MP3, or as WAV if libsndfile cannot write MP3."""
    if cut is None:
        return Clip("", "no audio: the utterance is not in the data")
    if not cut.has_recording:
        return Clip("", "no audio: the data hold features only")
    try:
        with without_decoder_messages(may_be_mp3(cut)):
            samples_S = with_shar_audio(cut).load_audio()[0]
        rate = int(cut.sampling_rate)
        if rate not in _MP3_RATES:
            samples_S, rate = resample(samples_S, rate, SAMPLING_RATE), SAMPLING_RATE
        return _encoded(samples_S, rate)
    except Exception as error:  # readers and writers of audio raise errors of every kind
        return Clip("", f"audio cannot be shown: {last_line(error)}")


def picture_clip(figure: Any) -> Clip:
    """A matplotlib figure as SVG, whose texts the browser draws: it has fonts for all scripts,
    joins letters, places marks and orders texts that run from right to left."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}), catch_warnings():
        # The browser has other fonts than matplotlib, which only estimates the sizes of texts.
        filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="svg", dpi=_DOTS_PER_INCH, metadata={"Date": None})
    # The images inside are in base64 already; the rest is short.
    return Clip(f"data:image/svg+xml,{quote(file.getvalue(), safe=_UNQUOTED)}")


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(samples_S: Any, rate: int) -> Clip:
    import soundfile

    file = io.BytesIO()
    if "MP3" in soundfile.available_formats():
        soundfile.write(file, samples_S, rate, format="MP3", compression_level=_COMPRESSION)
        return Clip(_data_url("audio/mpeg", file.getvalue()))
    soundfile.write(file, samples_S, rate, format="WAV", subtype="PCM_16")
    return Clip(_data_url("audio/wav", file.getvalue()))


class UtterancePictures:
    """Draws utterances of one result with the model that decoded it.

    problem: the reason if lattices are missing or come from another model; otherwise empty.
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
            decoded = result.inputs.model if result.inputs is not None else ""
            if decoded and not self.problem and fingerprint(loaded.model) != decoded:
                self.problem = (
                    "The lattices are not those of the model that gave the result "
                    f"{result.setting}: the checkpoint {Path(checkpoint).name!r} has other "
                    "parameters now. Decode again for a result of this model."
                )
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

    def ranges(self, cuts: Sequence[Any]) -> tuple[RangeSection | None, str]:
        """The ranges of the encoder's inputs of matrix products on some utterances; without them, a
        sentence that says why, or none if there is no checkpoint."""
        if self.encoder is None:
            return None, ""
        try:
            features = [self._batch(cut, self.kind).features_NTF[0] for cut in cuts]
            least = self.encoder.receptive_field + int(self.kind.needs_samples)
            features = [each_TF for each_TF in features if len(each_TF) >= least]
            found = activation_ranges(self.encoder, features)
        except Exception as error:  # of readers, or of an encoder that cannot be copied to the CPU
            return None, f"No activation ranges: {last_line(error)}."
        return range_section(found, len(features), self.encoder.config.kind), ""

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

    def is_of(name: str) -> bool:
        if result.inputs is not None:
            return name == result.inputs.checkpoint
        return result.short_setting.endswith(f"-{name}")

    paths = CheckpointFolder(RunFolder(config.folder).checkpoints).paths()
    count = min(AVERAGED_CHECKPOINTS, len(paths))
    if paths and is_of(f"{paths[-1].stem}-average-last-{count}"):
        return "average"
    candidates = [*paths, *sorted(config.folder.glob("*.pt"))]
    return next((str(path) for path in candidates if is_of(path.stem)), None)


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
