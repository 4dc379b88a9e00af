"""Where training and decoding of a run do not agree with what sherpa-onnx does.

sherpa-onnx emits one symbol a frame at most, never shows `<unk>`, begins with the context
[-1, ..., -1, 0] whose negative ids embed to zero, takes 0 for the blank, and keeps four hypotheses
in modified beam search, the best of which is that of highest score per symbol.
"""

from __future__ import annotations

from collections.abc import Iterator

from pruned_rnnt.decode.decode_set import DecodeConfig
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.usage_errors import ExportError

_BEAM_SIZE = 4


def check_predictor(model: TransducerModel) -> None:
    """Raise ExportError for a predictor which the recogniser cannot run."""
    if not isinstance(model.predictor, StatelessPredictor):
        raise ExportError(
            f"model.predictor.kind is {model.config.predictor.kind}: sherpa-onnx runs stateless "
            "predictors alone; --format torch writes such a model"
        )
    assert model.predictor.blank == 0


def differences(model: TransducerModel, decode: DecodeConfig) -> Iterator[str]:
    """One sentence for each setting by which the recogniser's texts may differ from the run's."""
    if model.loss_config.rnnt_type == "regular":
        yield (
            "loss.rnnt_type is regular: training let a frame emit many symbols, sherpa-onnx emits "
            "one at most (loss.rnnt_type=modified trains for that)"
        )
    if decode.max_symbols_per_frame > 1:
        yield (
            f"decode.max_symbols_per_frame is {decode.max_symbols_per_frame}, "
            "sherpa-onnx emits one symbol a frame at most"
        )
    if not decode.skip_unknown:
        yield "decode.skip_unknown is false, sherpa-onnx never shows <unk>"
    if decode.fusion.enabled:
        yield "decode.fusion is used, sherpa-onnx has none of it unless its own options ask for it"
    if decode.method == "modified_beam":
        if decode.beam_size != _BEAM_SIZE:
            yield (
                f"decode.beam_size is {decode.beam_size}, sherpa-onnx keeps {_BEAM_SIZE} "
                "hypotheses unless --max-active-paths says otherwise"
            )
        if not decode.length_norm:
            yield "decode.length_norm is false, sherpa-onnx always divides scores by length"
