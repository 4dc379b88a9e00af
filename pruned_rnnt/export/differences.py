"""Settings of a run that sherpa-onnx decodes differently.

sherpa-onnx emits at most one symbol per frame, never emits `<unk>`, starts with the context
[-1, ..., -1, 0], whose negative ids embed to zero, and uses 0 as the blank. Its modified beam
search keeps four hypotheses and returns the one with the highest score per symbol.
"""

from __future__ import annotations

from collections.abc import Iterator

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS
from pruned_rnnt.export.nemo_graphs import has_nemo_layout
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel
from pruned_rnnt.system.usage_errors import ExportError

_BEAM_SIZE = 4
# Of an RNN-T model in NeMo's layout, in a frame.
SHERPA_MAX_NEMO_SYMBOLS = 10
_STREAM_FEATURES = (
    "sherpa-onnx computes the features of streams of NeMo's models with frames 5 ms later, and "
    "energies of at least 2^-23"
)


def check_predictor(model: TransducerModel) -> None:
    """Raise ExportError if sherpa-onnx cannot run the model's predictor."""
    if not isinstance(model.predictor, StatelessPredictor):
        raise ExportError(
            f"model.predictor.kind is {model.config.predictor.kind}: sherpa-onnx runs only "
            "stateless predictors; use --format torch for this model"
        )
    assert model.predictor.blank == 0


def differences(
    model: SpeechModel, decode: DecodeConfig, *, streaming: bool = False
) -> Iterator[str]:
    """One line for each setting that may make the texts of sherpa-onnx differ from the run's."""
    if decode.fusion.enabled:
        yield (
            "decode.fusion is used, but sherpa-onnx uses only the language model and hotwords that "
            "its own options name"
        )
    if isinstance(model, CtcModel):
        if has_nemo_layout(model):
            if streaming:
                yield _STREAM_FEATURES
            else:
                yield "sherpa-onnx computes the features of NeMo's models with frames 5 ms later"
                yield (
                    "sherpa-onnx leaves out a last encoder frame with less audio than the others, "
                    "up to 70 ms"
                )
        if decode.skip_unknown:
            yield "decode.skip_unknown is true, but sherpa-onnx emits <unk> of a CTC model"
        if decode.method == "ctc_prefix_beam":
            yield "decode.method is ctc_prefix_beam, but sherpa-onnx takes the best path"
        return
    if decode.method in ("ctc_greedy", "ctc_prefix_beam"):
        yield (
            f"decode.method is {decode.method}, but sherpa-onnx searches with predictor and joiner"
        )
    if has_nemo_layout(model):
        yield from _nemo_differences(model, decode, streaming)
        return
    if model.loss_config.rnnt_type == "regular":
        yield (
            "loss.rnnt_type is regular: the model was trained to emit any number of symbols per "
            "frame, but sherpa-onnx emits at most one (train with loss.rnnt_type=modified)"
        )
    if decode.max_symbols_per_frame > 1:
        yield (
            f"decode.max_symbols_per_frame is {decode.max_symbols_per_frame}, "
            "but sherpa-onnx emits at most one symbol per frame"
        )
    if not decode.skip_unknown:
        yield "decode.skip_unknown is false, but sherpa-onnx never emits <unk>"
    if decode.method == "modified_beam":
        if decode.beam_size != _BEAM_SIZE:
            yield (
                f"decode.beam_size is {decode.beam_size}, but sherpa-onnx keeps {_BEAM_SIZE} "
                "hypotheses unless its --max-active-paths is set"
            )
        if not decode.length_norm:
            yield "decode.length_norm is false, but sherpa-onnx always divides scores by length"


def _nemo_differences(model: SpeechModel, decode: DecodeConfig, streaming: bool) -> Iterator[str]:
    is_tdt = bool(model.loss_config.durations)
    if model.config.encoder.features != "nemo":
        yield (
            "sherpa-onnx computes other features for TDT models, which the encoder converts into "
            "those of training, but not exactly"
        )
    elif streaming:
        yield _STREAM_FEATURES
    else:
        yield (
            "sherpa-onnx computes the features of NeMo's transducers with another window, mel "
            "filters up to 7.6 kHz, and frames 5 ms later"
        )
    most = SHERPA_MAX_SYMBOLS if is_tdt else SHERPA_MAX_NEMO_SYMBOLS
    ours = decode.max_symbols_per_frame or (SHERPA_MAX_SYMBOLS if is_tdt else 1)
    if ours != most:
        yield (
            f"decode.max_symbols_per_frame is {decode.max_symbols_per_frame}, but sherpa-onnx "
            f"emits at most {most} symbols of {'a TDT model' if is_tdt else 'such a model'} per "
            "frame"
        )
    if not decode.skip_unknown:
        yield "decode.skip_unknown is false, but the exported model never emits <unk>"
    if decode.method == "modified_beam":
        yield (
            "decode.method is modified_beam, which has a beam for each frame; sherpa-onnx compares "
            "hypotheses of different frames"
        )
