"""Parameters of FastConformer under our names, NeMo's and transformers', and back.

ours (encoder.)                    NeMo (encoder.)                 transformers (encoder.)
subsampling.levels.1.0             pre_encode.conv.2               subsampling.layers.2
layers.0.feedforward_in.1          ..feed_forward1.linear1         ..feed_forward1.linear1
layers.0.attention.in_proj         ..self_attn.linear_q, _k, _v    ..self_attn.q_proj, k_, v_
layers.0.convolution.depthwise     ..conv.depthwise_conv           ..conv.depthwise_conv
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

StateDict = dict[str, Tensor]


class _Names(NamedTuple):
    ours: str
    nemo: str
    transformers: str


def _same(ours: str, theirs: str) -> _Names:
    return _Names(ours, theirs, theirs)


_OUTSIDE = [
    *(
        _Names(f"subsampling.levels.{at}.", f"pre_encode.conv.{i}.", f"subsampling.layers.{i}.")
        for at, i in (("0.0", 0), ("1.0", 2), ("1.1", 3), ("2.0", 5), ("2.1", 6))
    ),
    _Names("subsampling.projection.", "pre_encode.out.", "subsampling.linear."),
]
_ATTENTION = "attention.in_proj."
_LAYER = [
    _same("feedforward_in.0.", "norm_feed_forward1."),
    _same("feedforward_in.1.", "feed_forward1.linear1."),
    _same("feedforward_in.3.", "feed_forward1.linear2."),
    _same("attention_norm.", "norm_self_att."),
    _Names("attention.in_proj.0.", "self_attn.linear_q.", "self_attn.q_proj."),
    _Names("attention.in_proj.1.", "self_attn.linear_k.", "self_attn.k_proj."),
    _Names("attention.in_proj.2.", "self_attn.linear_v.", "self_attn.v_proj."),
    _Names("attention.position_proj.", "self_attn.linear_pos.", "self_attn.relative_k_proj."),
    _Names("attention.out_proj.", "self_attn.linear_out.", "self_attn.o_proj."),
    _Names("attention.content_bias", "self_attn.pos_bias_u", "self_attn.bias_u"),
    _Names("attention.position_bias", "self_attn.pos_bias_v", "self_attn.bias_v"),
    _same("convolution.norm.", "norm_conv."),
    _same("convolution.pointwise_in.", "conv.pointwise_conv1."),
    _same("convolution.depthwise.", "conv.depthwise_conv."),
    _Names("convolution.depthwise_norm.", "conv.batch_norm.", "conv.norm."),
    _same("convolution.pointwise_out.", "conv.pointwise_conv2."),
    _same("feedforward_out.0.", "norm_feed_forward2."),
    _same("feedforward_out.1.", "feed_forward2.linear1."),
    _same("feedforward_out.3.", "feed_forward2.linear2."),
    _same("output_norm.", "norm_out."),
]
# Linear layers here, convolutions over one frame there.
_CONVOLUTIONS = re.compile(r"pointwise_(in|out)\.weight$")
_BATCHES = "num_batches_tracked"
_LAYER_START = re.compile(r"layers\.\d+\.")


def renamed(name: str, to: str, since: str = "ours") -> str | None:
    """A parameter's name elsewhere; None if the encoder has none of this name.

    Args:
        to, since: `ours`, `nemo` or `transformers`.
    """
    layer = _LAYER_START.match(name)
    start = layer[0] if layer else ""
    rest = name[len(start) :]
    for names in _LAYER if layer else _OUTSIDE:
        prefix, target = str(getattr(names, since)), str(getattr(names, to))
        if rest.startswith(prefix):
            return start + target + rest[len(prefix) :]
    return None


def encoder_from_nemo(theirs: Mapping[str, Tensor]) -> tuple[StateDict, list[str]]:
    """Our encoder's parameters, and the names of those that it does not have.

    Args:
        theirs: parameters of NeMo's encoder, without the prefix `encoder.`.
    """
    found: StateDict = {}
    unknown = []
    for name, value in theirs.items():
        own = renamed(name, "ours", "nemo")
        if own is None:
            unknown.append(name)
        elif not own.endswith(_BATCHES):
            found[own] = value.squeeze(-1) if _CONVOLUTIONS.search(own) else value
    for own in [name for name in found if f"{_ATTENTION}0." in name]:
        parts = [own.replace(f"{_ATTENTION}0.", f"{_ATTENTION}{i}.") for i in range(3)]
        if all(part in found for part in parts):
            joined = torch.cat([found.pop(part) for part in parts])
            found[own.replace(f"{_ATTENTION}0.", _ATTENTION)] = joined
    return found, unknown


def encoder_to_nemo(ours: Mapping[str, Tensor]) -> StateDict:
    """NeMo's parameters for a FastConformer's: the reverse of `encoder_from_nemo`."""
    found: StateDict = {}
    for name, value in ours.items():
        parts = {name: value}
        if _ATTENTION in name:
            thirds = value.chunk(3)
            parts = {name.replace(_ATTENTION, f"{_ATTENTION}{i}."): x for i, x in enumerate(thirds)}
        for own, part in parts.items():
            theirs = renamed(own, "nemo")
            assert theirs is not None, own
            part = part.unsqueeze(-1) if _CONVOLUTIONS.search(own) else part
            found[theirs] = part.detach().clone()
            if own.endswith("running_var"):
                found[theirs.replace("running_var", _BATCHES)] = torch.zeros((), dtype=torch.int64)
    return found
