"""Build the model that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pruned_rnnt.model.ctc_model import CtcModel
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.transducer_model import TransducerModel


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
