"""`loss_name: pruned_rnnt` for NVIDIA NeMo's RNN-T models, and `pruned_rnnt_tdt` for TDT models.

    from pruned_rnnt.compat import nemo_loss

    nemo_loss.register()                 # before the model is built or restored

and in the model's YAML `loss: {loss_name: pruned_rnnt, pruned_rnnt_kwargs: {...}}`. NeMo's
`RNNTLoss` and its joint with `fuse_loss_wer: true` then compute with `pruned_rnnt.rnnt_loss`;
padding and reductions stay NeMo's own. `nemo_loss.use(model)` changes a model that is built
already; with fused=True its joint does not store the logits in training, and with
pruned=PrunedOptions() it trains with the pruned loss; else both losses are the exact ones, of the
whole lattice. NeMo is imported by these two functions alone. Multi-blank models keep NeMo's losses.

Axes: N batch, T frames, U symbols, V vocabulary with blank.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pruned_rnnt.compat.nemo_loss_modules import NemoRNNTLoss, NemoTDTLoss, mark_outputs
from pruned_rnnt.compat.pruned_joint import PrunedOptions, check_supported
from pruned_rnnt.loss.checks import check_flag

LOSS_NAME = "pruned_rnnt"
TDT_LOSS_NAME = "pruned_rnnt_tdt"
_LOSS_MODULE = "nemo.collections.asr.losses.rnnt"


def register(*, default: bool = False, tdt: bool = False) -> None:
    """Add `pruned_rnnt` and `pruned_rnnt_tdt` to the losses that NeMo resolves by name.

    Calling it again is harmless.

    Args:
        default: also let `loss_name: default`, and models without a loss section, use
            `pruned_rnnt`. NeMo then reads `pruned_rnnt_kwargs`, not `warprnnt_numba_kwargs`.
        tdt: also let `loss_name: tdt` use `pruned_rnnt_tdt`, with the `tdt_kwargs` of the
            configuration.

    Raises:
        ImportError: NeMo's ASR collection is not installed, or has no loss resolver.
    """
    nemo_rnnt = _nemo_rnnt()
    resolver = nemo_rnnt.RNNT_LOSS_RESOLVER
    if LOSS_NAME not in resolver:
        for name in (LOSS_NAME, TDT_LOSS_NAME):
            resolver[name] = nemo_rnnt.RNNTLossConfig(
                loss_name=name,
                lib_name="pruned_rnnt",
                is_available=True,
                installation_msg="pip install pruned_rnnt",
                min_version=None,
                # float16 and bfloat16 logits need no float32 copy: the recursion is in float32.
                force_float32=False,
            )
        nemo_rnnt.resolve_rnnt_loss = _resolving(nemo_rnnt.resolve_rnnt_loss, resolver)
    mark_outputs()
    if default:
        resolver["default"] = resolver[LOSS_NAME]
    if tdt:
        resolver["tdt"] = resolver[TDT_LOSS_NAME]


def use(
    model: Any, *, fused: bool = False, pruned: PrunedOptions | None = None, **kwargs: Any
) -> None:
    """Make an existing model compute its loss with pruned_rnnt.

    Its config, and so a .nemo file saved from it, keeps the name of the old loss. Call it after
    `model.change_vocabulary`, which rebuilds loss and joint from the config.

    Args:
        model: an RNN-T or TDT model of NeMo, with `loss` and `joint`; the reduction stays.
        fused: do not store the joint's logits (N, T, U+1, V) in training; in eval mode, as in
            validation and decoding, the joint is as before. Where hooks, adapters or changed layers
            take part in the joint, logits are stored, and a warning says so.
        pruned: train with the pruned loss, which stores no logits either; in eval mode the loss is
            the exact one. Each call makes new layers for the simple loss, in
            `model.joint.pruned_loss`: make the optimiser after it. A call without it removes them,
            for example before `model.save_to`.
        kwargs: fastemit_lambda and the others of `NemoRNNTLoss`; of a TDT model, those of
            `NemoTDTLoss`, by default with durations, sigma and omega of its configuration.

    Raises:
        ImportError: as `register`.
        TypeError, ValueError: a multi-blank model, durations that are not those of the joint, or an
            unknown keyword; or with fused or pruned, in_place, or a joint that is not NeMo's
            `RNNTJoint` with ReLU or tanh, without dropout and masking; or with pruned, clamp,
            validate, or its options out of range.
    """
    check_flag("fused", fused)
    extra = model.joint.num_extra_outputs
    name = LOSS_NAME
    if extra:
        name, kwargs = TDT_LOSS_NAME, _tdt_kwargs(model) | kwargs
        if len(kwargs.get("durations") or ()) != extra:
            raise ValueError(
                f"model's joint has {extra} outputs in addition to symbols and blank, and "
                f"durations is {kwargs.get('durations')}: pass the durations of a TDT model; a "
                "multi-blank model keeps NeMo's own loss"
            )
    if pruned is not None:
        check_supported(kwargs)
    if fused and kwargs.get("in_place"):
        raise ValueError(
            "in_place writes over the logits, and fused=True does not store them: leave one out"
        )
    register()
    loss = _nemo_rnnt().RNNTLoss(
        num_classes=model.joint.num_classes_with_blank - 1 - extra,
        reduction=model.loss.reduction,
        loss_name=name,
        loss_kwargs=kwargs,
    )
    # Without that module, no joint leaves logits out.
    if fused or pruned is not None or "pruned_rnnt.compat.nemo_joint" in sys.modules:
        importlib.import_module("pruned_rnnt.compat.nemo_joint").prepare(
            model.joint, fused=fused, pruned=pruned, durations=kwargs.get("durations")
        )
    model.loss = loss
    if model.joint.fuse_loss_wer:
        model.joint.set_loss(model.loss)


def _tdt_kwargs(model: Any) -> dict[str, Any]:
    """durations, sigma and omega of the model's configuration, as far as it has them."""
    loss = (getattr(model, "cfg", None) or {}).get("loss") or {}
    if loss.get("loss_name") not in ("tdt", TDT_LOSS_NAME):
        return {}
    kwargs = loss.get(f"{loss['loss_name']}_kwargs") or {}
    return {key: kwargs[key] for key in ("durations", "sigma", "omega") if key in kwargs}


def _nemo_rnnt() -> Any:
    try:
        module = importlib.import_module(_LOSS_MODULE)
    except ImportError as error:
        raise ImportError(
            f"nemo_loss.register() needs NeMo's ASR collection, and {_LOSS_MODULE} could not be "
            f"imported ({error}); install it with: pip install 'nemo_toolkit[asr]'"
        ) from error
    needed = ("RNNT_LOSS_RESOLVER", "RNNTLossConfig", "resolve_rnnt_loss")
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise ImportError(
            f"{_LOSS_MODULE} has no {', '.join(missing)}; nemo_loss needs a NeMo that resolves "
            "its RNN-T losses by name (tested with nemo_toolkit 3.0)"
        )
    return module


def _resolving(original: Callable[..., Any], resolver: Mapping[str, Any]) -> Callable[..., Any]:
    """NeMo's resolve_rnnt_loss, with the name of this package's loss added."""

    @functools.wraps(original)
    def resolve_rnnt_loss(
        loss_name: str, blank_idx: int, loss_kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        config = resolver.get(loss_name)
        kwargs = dict(loss_kwargs or {})
        if config is not None and config.loss_name == LOSS_NAME:
            return _loss_of(blank_idx, kwargs)
        if config is not None and config.loss_name == TDT_LOSS_NAME:
            _check_keys(NemoTDTLoss, f"{loss_name}_kwargs", kwargs)
            if "durations" not in kwargs:
                raise ValueError(
                    f"{loss_name}_kwargs has no durations; it needs those of the joint's last "
                    "outputs, for example [0, 1, 2, 3, 4]"
                )
            return NemoTDTLoss(blank_idx, **kwargs)
        return original(loss_name, blank_idx, loss_kwargs)

    return resolve_rnnt_loss


def _loss_of(blank: int, kwargs: dict[str, Any]) -> NemoRNNTLoss:
    _check_keys(NemoRNNTLoss, "pruned_rnnt_kwargs", kwargs)
    loss = NemoRNNTLoss(blank, **kwargs)
    loss.last_column = blank
    return loss


def _check_keys(kind: type[torch.nn.Module], section: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that is no keyword of the loss."""
    known = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"{section} has the unknown key {name!r}; {hint}The keys are {', '.join(known)}"
            )
