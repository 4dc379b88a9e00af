"""`pruned-rnnt export --format icefall`: files that icefall's Zipformer recipe loads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.interop.icefall.zipformer_import import NAMES_IN_MODEL, OWN_STATE
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.model.zipformer.layer import ZipformerLayer
from pruned_rnnt.model.zipformer.stack import Stack
from pruned_rnnt.model.zipformer.zipformer import Zipformer
from pruned_rnnt.system.usage_errors import ExportError

# Our model has these parameters twice in its state.
_SHARED = "pruned_loss.joiner."


def to_icefall_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of a transducer with the recipe's names and shapes, complete for strict loading.

    Args:
        model: has a `Zipformer` as `encoder` and a `StatelessPredictor` as `predictor`.

    Raises:
        ValueError: the model has another encoder or predictor, or normalises its features, which
            the recipe does not.
    """
    encoder, predictor = model.encoder, model.predictor
    if not isinstance(encoder, Zipformer):
        raise ValueError(
            f"the encoder is a {type(encoder).__name__}, icefall's recipe needs a Zipformer"
        )
    if encoder.config.feature_norm != "none":
        raise ValueError(
            f"model.encoder.feature_norm is {encoder.config.feature_norm!r}, "
            "icefall's recipe does not normalise features"
        )
    if not isinstance(predictor, StatelessPredictor):
        raise ValueError(
            f"the predictor is a {type(predictor).__name__}, icefall's recipe needs a stateless one"
        )
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith(OWN_STATE) or name.startswith(_SHARED):
            continue
        beginning = next(prefix for prefix in NAMES_IN_MODEL if name.startswith(prefix))
        their_name = NAMES_IN_MODEL[beginning] + name[len(beginning) :]
        state[their_name] = value.detach().cpu().clone()
    for name, module in encoder.named_modules():
        if isinstance(module, Stack):
            for index, layer in enumerate(module.layers):
                assert isinstance(layer, ZipformerLayer)
                # The recipe has this parameter in every layer but never uses it.
                scale_E = torch.full_like(layer.bypass.bypass_scale.detach().cpu(), 0.5)
                state[f"{name}.layers.{index}.bypass_scale"] = scale_E
    return state


def export_icefall(model: TransducerModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write pretrained.pt (`{"model": parameters}`), bpe.model and tokens.txt.

    Raises:
        ExportError: the recipe cannot represent the model.
    """
    try:
        state = to_icefall_state(model)
    except ValueError as error:
        raise ExportError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": state}, folder / "pretrained.pt")
    tokenizer.save(folder)
    (folder / "tokens.model").rename(folder / "bpe.model")
