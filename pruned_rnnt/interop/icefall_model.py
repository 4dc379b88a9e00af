"""Models of icefall's Zipformer recipe: their sizes, and parameters under our names and back.

The recipe saves `pretrained.pt` ({"model": ...}) and `epoch-N.pt`, which also has `model_avg`, the
mean of the parameters over all steps since the start of training. The mean over the steps between
two such files is computed from their means. `pruned-rnnt export --format icefall` writes files that
the recipe loads.

    recipe                               ours
    encoder_embed.*, encoder.*           encoder.encoder_embed.*, encoder.encoder.*
    decoder.embedding.*, decoder.conv.*  predictor.embedding.*, predictor.convolution.*
    joiner.*                             joiner.*, pruned_loss.joiner.*
    simple_am_proj.*, simple_lm_proj.*   pruned_loss.simple_am_proj.*, pruned_loss.simple_lm_proj.*
    ctc_output.1.*                       ctc_head.*
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.saved_file import CodeInFileError, describe_no_parameters, read_saved
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel
from pruned_rnnt.model.zipformer.config import SIZES, ZipformerConfig
from pruned_rnnt.model.zipformer.layer import ZipformerLayer
from pruned_rnnt.model.zipformer.stack import Stack
from pruned_rnnt.model.zipformer.zipformer import Zipformer
from pruned_rnnt.system.usage_errors import ExportError

StateDict = dict[str, Tensor]

# Prefixes of our names, and the recipe's prefixes for them.
_NAMES_IN_MODEL = {
    "encoder.": "",
    "predictor.embedding.": "decoder.embedding.",
    "predictor.convolution.": "decoder.conv.",
    "joiner.": "joiner.",
    "pruned_loss.": "",
    "ctc_head.": "ctc_output.1.",
}
# A parameter that the recipe has in every layer but never uses.
_IDLE = re.compile(r"\.layers\.\d+\.bypass_scale$")
# State that our modules have and the recipe does not.
_OWN_STATE = ".over_limit"
# Our model has these parameters twice in its state.
_SHARED = "pruned_loss.joiner."


@dataclass(frozen=True, kw_only=True)
class IcefallImport:
    """A state dict for our model, and the names of parameters that did not fit.

    state_dict: complete for strict loading; parameters that were not found keep their values.
    missing: parameters of our model that the file does not have.
    unused: parameters of the file that our model does not have.
    wrong_shape: `name: shape there, shape here`, where `here` is our model.
    idle: parameters of the file that the recipe itself never uses.
    """

    state_dict: StateDict
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True if every parameter fitted."""
        return not (self.missing or self.unused or self.wrong_shape)


def import_icefall(
    source: str | pathlib.Path | Mapping[str, Tensor], model: nn.Module
) -> IcefallImport:
    """Map the parameters of a recipe's model to those of ours.

    Args:
        source: a file, or its parameters as `read_icefall` returns them.
        model: a `Zipformer`, or a model with one as `encoder`.

    Raises:
        ValueError: as `read_icefall`.
    """
    theirs = read_icefall(source) if isinstance(source, str | pathlib.Path) else dict(source)
    renames = {"": ""} if isinstance(model, Zipformer) else _NAMES_IN_MODEL
    state_dict = model.state_dict()
    missing, wrong_shape, used = [], [], set()
    for name, value in state_dict.items():
        if name.endswith(_OWN_STATE):
            continue
        prefix = next((p for p in renames if name.startswith(p)), None)
        their_name = None if prefix is None else renames[prefix] + name[len(prefix) :]
        if their_name is None or their_name not in theirs:
            missing.append(name)
        elif theirs[their_name].shape != value.shape:
            used.add(their_name)
            there, here = tuple(theirs[their_name].shape), tuple(value.shape)
            wrong_shape.append(f"{their_name}: {there} there, {here} here")
        else:
            used.add(their_name)
            state_dict[name] = theirs[their_name].to(value.dtype).clone()
    left = [name for name in theirs if name not in used]
    return IcefallImport(
        state_dict=state_dict,
        missing=tuple(missing),
        unused=tuple(name for name in left if not _IDLE.search(name)),
        wrong_shape=tuple(wrong_shape),
        idle=tuple(name for name in left if _IDLE.search(name)),
    )


def read_icefall(
    path: str | pathlib.Path, since: str | pathlib.Path | None = None, *, trust: bool = False
) -> StateDict:
    """Float32 parameters in a file of the recipe: the average if the file has one.

    Args:
        path: pretrained.pt, epoch-N.pt or checkpoint-N.pt.
        since: an earlier epoch or checkpoint, to average only the steps after it, up to `path`.
        trust: allow the file to run code, as pickle files can; needed if its saved settings hold
            objects of other packages.

    Raises:
        ValueError: the file is of another kind, needs `trust`, has integers as parameters, or has
            no average, which `since` needs.
    """
    end = _load(path, trust)
    if since is None:
        return _float_parameters(end.get("model_avg") or end["model"])
    start = _load(since, trust)
    for file, checkpoint in ((path, end), (since, start)):
        if not checkpoint.get("model_avg") or "batch_idx_train" not in checkpoint:
            raise ValueError(
                f"{file} has no averaged model; an average since an earlier file needs one in both"
            )
    steps, steps_before = end["batch_idx_train"], start["batch_idx_train"]
    if steps <= steps_before:
        raise ValueError(
            f"{path} is of step {steps}, needs a step after {steps_before}, that of {since}"
        )
    shapes, shapes_before = (
        {name: value.shape for name, value in checkpoint["model_avg"].items()}
        for checkpoint in (end, start)
    )
    if shapes != shapes_before:
        raise ValueError(f"{path} and {since} have different parameters")
    weight = steps / (steps - steps_before)
    return _float_parameters(
        {
            name: weight * value.double() + (1.0 - weight) * start["model_avg"][name].double()
            for name, value in end["model_avg"].items()
            if value.is_floating_point()
        }
    )


def _load(path: str | pathlib.Path, trust: bool) -> dict[str, Any]:
    try:
        checkpoint = read_saved(
            pathlib.Path(path), "checkpoint of icefall", trust=trust, allowed=[pathlib.PosixPath]
        )
    except CodeInFileError as error:
        raise ValueError(
            f"{error}. If you trust the source of the file, use trust=True (--trust)"
        ) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ValueError(f"{path} has no `model`: expected a pretrained.pt or epoch-N.pt")
    if str(checkpoint.get("format", "")).startswith("pruned_rnnt"):
        raise ValueError(f"{path} is a {checkpoint['format']}, expected a file of icefall")
    for key in ("model", "model_avg"):
        fault = describe_no_parameters(checkpoint.get(key) or {})
        if fault:
            raise ValueError(f"{path} is not a checkpoint of icefall: in {key!r}, {fault}")
        for name, value in (checkpoint.get(key) or {}).items():
            if value.dim() and not value.is_floating_point():  # one number may be a counter
                raise ValueError(
                    f"{path}: {name} is of {value.dtype}, needs floating-point parameters: use the "
                    "checkpoint before quantisation"
                )
    if not isinstance(checkpoint.get("batch_idx_train", 0), int):
        raise ValueError(f"{path} is not a checkpoint of icefall: batch_idx_train is no number")
    return checkpoint


def _float_parameters(parameters: Mapping[str, Tensor]) -> StateDict:
    return {name.removeprefix("module."): value.float() for name, value in parameters.items()}


@dataclass(frozen=True, kw_only=True)
class IcefallSizes:
    """The sizes of a model that can load the parameters; 0 for parts that it does not have."""

    encoder: ZipformerConfig
    vocab_size: int
    predictor_dim: int
    context_size: int
    joiner_dim: int
    has_ctc: bool


def icefall_sizes(parameters: Mapping[str, Tensor], **changes: Any) -> IcefallSizes:
    """Infer the sizes of a recipe's model from its parameters.

    Args:
        parameters: as `read_icefall` returns them.
        changes: fields of `ZipformerConfig` that cannot be inferred: `position_head_dim` and
            `num_mel_bins` if they are not the recipe's defaults, chunk sizes, and `unmasked_dims`
            (used only in training; default: those of a known size, or all channels).

    Raises:
        ValueError: the parameters are not those of a Zipformer.
    """

    def size(name: str, axis: int = 0) -> int:
        return parameters[name].size(axis) if name in parameters else 0

    try:
        encoder = _encoder_config(parameters, changes)
        sizes = IcefallSizes(
            encoder=encoder,
            vocab_size=size("joiner.output_linear.weight") or size("ctc_output.1.weight"),
            predictor_dim=size("decoder.embedding.weight", 1),
            context_size=size("decoder.conv.weight", 2) or min(size("decoder.embedding.weight"), 1),
            joiner_dim=size("joiner.output_linear.weight", 1),
            has_ctc="ctc_output.1.weight" in parameters,
        )
    except KeyError as error:
        raise ValueError(f"the parameters are not those of a Zipformer: no {error}") from error
    except (IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"the parameters are not those of a Zipformer: impossible shapes ({error}). If "
            f"icefall's --pos-head-dim was not {ZipformerConfig.position_head_dim}, set "
            "model.encoder.position_head_dim"
        ) from error
    return sizes


def _encoder_config(
    parameters: Mapping[str, Tensor], changes: Mapping[str, Any]
) -> ZipformerConfig:
    layers: list[list[str]] = []
    pattern = re.compile(r"(encoder\.encoders\.(\d{1,2})\..*?layers\.(\d{1,3})\.)norm\.bias")
    for name in parameters:
        if match := pattern.fullmatch(name):
            stack = int(match[2])
            layers += [[] for _ in range(stack + 1 - len(layers))]
            layers[stack].append(match[1])
    if not layers or not all(layers):
        raise ValueError(
            "the parameters are not those of a Zipformer: no encoder.encoders.*.layers"
        )
    first = [names[0] for names in layers]

    def rows(suffix: str) -> tuple[int, ...]:
        return tuple(parameters[name + suffix].size(0) for name in first)

    causal = first[0] + "conv_module1.depthwise_conv.causal_conv.weight" in parameters
    kernel = "chunkwise_conv.weight" if causal else "weight"
    position_head_dim = changes.get("position_head_dim", ZipformerConfig.position_head_dim)
    heads = tuple(n // position_head_dim for n in rows("self_attn_weights.linear_pos.weight"))
    dims = rows("norm.bias")
    size = next((name for name, config in SIZES.items() if config.dims == dims), None)
    sizes: dict[str, Any] = {
        "size": size or ZipformerConfig.size,
        "downsampling": tuple(
            parameters[name].size(0) if name in parameters else 1
            for name in (f"encoder.encoders.{i}.downsample.bias" for i in range(len(layers)))
        ),
        "layers": tuple(len(names) for names in layers),
        "dims": dims,
        "unmasked_dims": SIZES[size].unmasked_dims if size else dims,
        "feedforward_dims": rows("feed_forward2.in_proj.weight"),
        "heads": heads,
        "kernel_sizes": tuple(
            parameters[f"{name}conv_module1.depthwise_conv.{kernel}"].size(2) for name in first
        ),
        "query_head_dim": (
            rows("self_attn_weights.in_proj.bias")[0] // heads[0] - position_head_dim
        )
        // 2,
        "value_head_dim": rows("self_attn1.in_proj.bias")[0] // heads[0],
        "position_dim": parameters[first[0] + "self_attn_weights.linear_pos.weight"].size(1),
        "causal": causal,
    }
    return ZipformerConfig(**(sizes | dict(changes)))


def to_icefall_state(model: TransducerModel) -> dict[str, Tensor]:
    """Parameters of a transducer with the recipe's names and shapes, complete for strict loading.

    Args:
        model: has a `Zipformer` as `encoder` and a `StatelessPredictor` as `predictor`.

    Raises:
        ValueError: the model has another encoder, predictor, joiner or loss than the recipe, or
            normalises its features, which the recipe does not.
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
    if model.loss_config.durations:
        raise ValueError(
            f"loss.durations is {list(model.loss_config.durations)}, icefall's recipe has no "
            "durations: export with --format onnx, nemo or torch"
        )
    if model.loss_config.hat:
        raise ValueError(
            "loss.hat is true, icefall's recipe has no HAT: export with --format onnx or torch"
        )
    if model.loss_config.kind != "pruned":
        raise ValueError(
            f"loss.kind is {model.loss_config.kind!r}, so the model lacks simple_am_proj and "
            "simple_lm_proj, which icefall's recipe has: train with loss.kind=pruned"
        )
    if model.config.joiner_activation != "tanh":
        raise ValueError(
            f"model.joiner_activation is {model.config.joiner_activation!r}, the joiner of "
            "icefall's recipe has tanh"
        )
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith(_OWN_STATE) or name.startswith(_SHARED):
            continue
        beginning = next(prefix for prefix in _NAMES_IN_MODEL if name.startswith(prefix))
        their_name = _NAMES_IN_MODEL[beginning] + name[len(beginning) :]
        state[their_name] = value.detach().cpu().clone()
    for name, module in encoder.named_modules():
        if isinstance(module, Stack):
            for index, layer in enumerate(module.layers):
                assert isinstance(layer, ZipformerLayer)
                # The recipe has this parameter in every layer but never uses it.
                scale_E = torch.full_like(layer.bypass.bypass_scale.detach().cpu(), 0.5)
                state[f"{name}.layers.{index}.bypass_scale"] = scale_E
    return state


def import_settings(model: SpeechModel) -> list[str]:
    """Settings that an import of the exported file needs, because the file does not hold them."""
    config, names = model.encoder.config, ["num_mel_bins", "position_head_dim"]
    if config.causal:
        names += ["chunk_size", "left_context"]
    values = {name: getattr(config, name) for name in names}
    found = [
        f"model.encoder.{name}={value}"
        for name, value in values.items()
        if value != getattr(ZipformerConfig, name)
    ]
    if model.loss_config.rnnt_type != LossConfig.rnnt_type:
        found.append(f"loss.rnnt_type={model.loss_config.rnnt_type}")
    return found


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
