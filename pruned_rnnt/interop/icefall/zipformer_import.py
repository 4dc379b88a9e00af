"""Models trained with icefall's Zipformer recipe: read, sized and renamed for ours.

The recipe saves `pretrained.pt` ({"model": ...}) and `epoch-N.pt`, which also has `model_avg`, the
mean of the parameters from the start of training on. The mean over the steps between two such files
follows from the means of both.

    recipe                               ours
    encoder_embed.*, encoder.*           encoder.encoder_embed.*, encoder.encoder.*
    decoder.embedding.*, decoder.conv.*  predictor.embedding.*, predictor.convolution.*
    joiner.*                             joiner.*, pruned_loss.joiner.*
    simple_am_proj.*, simple_lm_proj.*   pruned_loss.simple_am_proj.*, pruned_loss.simple_lm_proj.*
    ctc_output.1.*                       ctc_head.*
"""

from __future__ import annotations

import pathlib
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.saved_file import objects_in
from pruned_rnnt.model.zipformer.config import SIZES, ZipformerConfig
from pruned_rnnt.model.zipformer.zipformer import Zipformer

StateDict = dict[str, Tensor]

# Beginnings of our names, and of the recipe's.
NAMES_IN_MODEL = {
    "encoder.": "",
    "predictor.embedding.": "decoder.embedding.",
    "predictor.convolution.": "decoder.conv.",
    "joiner.": "joiner.",
    "pruned_loss.": "",
    "ctc_head.": "ctc_output.1.",
}
# What the recipe keeps in every layer and never uses.
_IDLE = re.compile(r"\.layers\.\d+\.bypass_scale$")
# What our modules keep and the recipe does not.
OWN_STATE = ".over_limit"


@dataclass(frozen=True, kw_only=True)
class IcefallImport:
    """A state dict for our model, and by name what did not fit.

    state_dict: complete, so that it loads strictly; where the recipe had nothing that fits, it has
        the values which the model had.
    missing: parameters of the model which the recipe's model does not have.
    unused: parameters of the recipe's model for which there is no place.
    wrong_shape: `name: shape there, shape here`.
    idle: parameters which the recipe itself never uses.
    """

    state_dict: StateDict
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unused or self.wrong_shape)


def import_icefall(
    source: str | pathlib.Path | Mapping[str, Tensor], model: nn.Module
) -> IcefallImport:
    """Fit a model of the recipe to ours.

    Args:
        source: file, or its parameters as `read_icefall` gives them.
        model: a `Zipformer`, or a model which holds one as `encoder`.

    Raises:
        ValueError: as `read_icefall`.
    """
    theirs = read_icefall(source) if isinstance(source, str | pathlib.Path) else dict(source)
    renames = {"": ""} if isinstance(model, Zipformer) else NAMES_IN_MODEL
    state_dict = model.state_dict()
    missing, wrong_shape, used = [], [], set()
    for name, value in state_dict.items():
        if name.endswith(OWN_STATE):
            continue
        beginning = next((prefix for prefix in renames if name.startswith(prefix)), None)
        their_name = None if beginning is None else renames[beginning] + name[len(beginning) :]
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
    """Parameters in a file of the recipe: the average where there is one, float32.

    Args:
        path: pretrained.pt, epoch-N.pt or checkpoint-N.pt.
        since: an earlier epoch or checkpoint: the mean of the steps after it, up to `path`.
        trust: let the file run code of its own, as pickles can; needed for files whose saved
            settings hold objects of other packages.

    Raises:
        ValueError: a file which is none of these, which asks for trust, or without an average
            where `since` needs one.
    """
    end = _load(path, trust)
    if since is None:
        return _float_parameters(end.get("model_avg") or end["model"])
    start = _load(since, trust)
    for file, checkpoint in ((path, end), (since, start)):
        if not checkpoint.get("model_avg") or "batch_idx_train" not in checkpoint:
            raise ValueError(f"{file} has no averaged model; a mean over steps needs one in both")
    steps, steps_before = end["batch_idx_train"], start["batch_idx_train"]
    if steps <= steps_before:
        raise ValueError(f"{path} is of step {steps}, needs a later one than {steps_before}")
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
        with torch.serialization.safe_globals([pathlib.PosixPath]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=not trust)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if "GLOBAL" not in str(error):
            raise ValueError(f"{path} is no file of torch, or truncated") from error
        raise ValueError(
            f"{path} holds {objects_in(error)}, which can run code when it is read; if you know "
            "where the file is from, read it with trust=True (--trust)"
        ) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ValueError(f"{path} has no `model`: needs a pretrained.pt or epoch-N.pt")
    if str(checkpoint.get("format", "")).startswith("pruned_rnnt"):
        raise ValueError(f"{path} is a {checkpoint['format']}, needs one of icefall")
    return checkpoint


def _float_parameters(parameters: Mapping[str, Tensor]) -> StateDict:
    return {name.removeprefix("module."): value.float() for name, value in parameters.items()}


@dataclass(frozen=True, kw_only=True)
class IcefallSizes:
    """What a model must be made with to take the parameters; 0 for a part that is not there."""

    encoder: ZipformerConfig
    vocab_size: int
    predictor_dim: int
    context_size: int
    joiner_dim: int
    has_ctc: bool


def icefall_sizes(parameters: Mapping[str, Tensor], **changes: Any) -> IcefallSizes:
    """Sizes of a model of the recipe, from its parameters.

    Args:
        parameters: as `read_icefall` gives them.
        changes: fields of `ZipformerConfig` which parameters do not tell: `position_head_dim` and
            `num_mel_bins` where they are not the recipe's defaults, chunk sizes, `unmasked_dims`
            (without effect but in training; by default those of a known size, or all channels).

    Raises:
        ValueError: parameters which are not those of a Zipformer.
    """

    def size(name: str, axis: int = 0) -> int:
        return parameters[name].size(axis) if name in parameters else 0

    context_size = size("decoder.conv.weight", 2) or min(size("decoder.embedding.weight"), 1)
    try:
        encoder = _encoder_config(parameters, changes)
    except KeyError as error:
        raise ValueError(f"the parameters are not those of a Zipformer: no {error}") from error
    return IcefallSizes(
        encoder=encoder,
        vocab_size=size("joiner.output_linear.weight") or size("ctc_output.1.weight"),
        predictor_dim=size("decoder.embedding.weight", 1),
        context_size=context_size,
        joiner_dim=size("joiner.output_linear.weight", 1),
        has_ctc="ctc_output.1.weight" in parameters,
    )


def _encoder_config(
    parameters: Mapping[str, Tensor], changes: Mapping[str, Any]
) -> ZipformerConfig:
    layers: list[list[str]] = []
    pattern = re.compile(r"(encoder\.encoders\.(\d+)\..*?layers\.(\d+)\.)norm\.bias$")
    for name in parameters:
        if match := pattern.match(name):
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
