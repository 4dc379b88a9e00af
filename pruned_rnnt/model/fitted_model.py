"""Build a model for the parameters in a file, which may not fit the configuration beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pruned_rnnt.model.build_model import UninitialisedParameters
from pruned_rnnt.model.saved_file import UnusableFileError

ModelT = TypeVar("ModelT", bound=nn.Module)

# A model may have buffers and parts for training that its file leaves out.
_MOST_RATIO = 4
_SPARE_ELEMENTS = 1 << 24
_SPARE_TENSORS = 1000
_NEW_TENSORS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.randn, torch.rand}


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
