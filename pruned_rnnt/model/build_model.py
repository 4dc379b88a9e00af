"""Build the model that a configuration describes, also for the parameters in a file, which may not
fit the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.saved_file import UnusableFileError
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel

ModelT = TypeVar("ModelT", bound=nn.Module)
# A model may have buffers and parts for training that its file leaves out.
_MOST_RATIO = 4
_SPARE_ELEMENTS = 1 << 24
_SPARE_TENSORS = 1000
_NEW_TENSORS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.randn, torch.rand}


def build_model(config: ModelConfig, vocab_size: int, loss: LossConfig) -> SpeechModel:
    """A new model: `CtcModel` for loss.kind=ctc, else `TransducerModel`."""
    if loss.kind == "ctc":
        return CtcModel(config, vocab_size, loss)
    return TransducerModel(config, vocab_size, loss)


class UninitialisedParameters(TorchFunctionMode):
    """Models built within this context have undefined parameters, which a checkpoint replaces.

    The random numbers of a new model take a second. So do products of memory that nothing has
    written, which may hold denormal numbers; buffers, which a checkpoint may lack, are multiplied.
    """

    _FILL = (Tensor.uniform_, Tensor.normal_)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_fill = func in self._FILL or getattr(func, "__module__", "") == "torch.nn.init"
        if is_fill or (func is Tensor.mul_ and isinstance(args[0], nn.Parameter)):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def as_transducer(model: SpeechModel, purpose: str) -> TransducerModel:
    """Return the model if it is a transducer.

    Args:
        purpose: the subject of the error message.

    Raises:
        ValueError: the model has no predictor and joiner.
    """
    if not isinstance(model, TransducerModel):
        raise ValueError(
            f"{purpose} needs a transducer, but this model has only a CTC head (it was trained "
            f"with loss.kind={model.loss_config.kind})"
        )
    return model


class _TooLargeError(Exception):
    pass


class _Limit(TorchFunctionMode):
    """Raises _TooLargeError once there are more new tensors, or elements of all of them together.

    torch.empty has not touched its memory at that time.
    """

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.tensors = tensors
        self.elements = self.most = elements

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            if func in _NEW_TENSORS:
                self.tensors -= 1
                self.elements -= result.numel()
            if min(self.tensors, self.elements) < 0 or result.numel() > self.most:
                raise _TooLargeError
        return result


def sized_model(make: Callable[[], ModelT], state: Mapping[str, Tensor], source: str) -> ModelT:
    """The model that `make` builds, without the parameters of `state`.

    Raises:
        UnusableFileError: it is far larger than `state`.
        ValueError: `make` refuses its settings.
    """
    elements = sum(value.numel() for value in state.values())
    limit = _Limit(
        tensors=_MOST_RATIO * len(state) + _SPARE_TENSORS,
        elements=_MOST_RATIO * elements + _SPARE_ELEMENTS,
    )
    try:
        with limit:
            return make()
    except (_TooLargeError, RuntimeError) as error:  # torch raises the latter for huge tensors
        raise UnusableFileError(
            f"{source} does not fit its own configuration: it holds {elements:,} parameters, the "
            "model has far more"
        ) from error


def fitted_model(
    make: Callable[[], ModelT],
    state: Mapping[str, Tensor],
    source: str,
    *,
    prepare: Callable[[ModelT], None] | None = None,
) -> ModelT:
    """The model that `make` builds, with the parameters of `state`.

    Args:
        source: the file, for the error message.
        prepare: is called with the model before its parameters have values.

    Raises:
        UnusableFileError: the model has other parameters, or they have other shapes.
        ValueError: `make` refuses its settings.
    """
    with UninitialisedParameters():
        model = sized_model(make, state, source)
    if prepare is not None:
        prepare(model)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UnusableFileError(f"{source} does not fit its own configuration: {reason}") from error
    return model
