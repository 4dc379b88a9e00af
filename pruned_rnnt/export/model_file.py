"""One file with a model's parameters, configuration and tokenizer, and without code.

A dictionary of tensors and plain values, read with `weights_only`:

    format, version   identify the kind of file
    config            `model` and `loss` sections
    vocab_size, state size of the output, parameters
    tokenizer         uint8 tensor, the SentencePiece model
    usual_longest     99th percentile of the training utterances' durations in seconds, or None
    calibration       of word times and confidences, see `Calibration`, or None
    stream_sizes      chunk and left context of `--streaming`, in encoder frames; 0: as trained
    source            name of the run and checkpoint
    licences          the chain of data and weights, see `Chain`, or None
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pruned_rnnt.config.load import from_dict, to_dict
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.licences.chain import Chain, chain_from
from pruned_rnnt.model.build_model import build_model, fitted_model
from pruned_rnnt.model.linear import transpose_in_memory
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.parameter_values import describe_broken
from pruned_rnnt.model.saved_file import UnusableFileError, check_contents, read_saved
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.system.usage_errors import ExportError

FORMAT = "pruned_rnnt model"
VERSION = 1
FILE_NAME = "model.pt"
_P99_KEY = "usual_longest"
_CALIBRATION_KEY = "calibration"
_SIZES_KEY = "stream_sizes"
_CHAIN_KEY = "licences"


class ModelFile(NamedTuple):
    """What the file holds.

    p99_duration: 99th percentile of the training utterances' durations in seconds; None if unknown.
    calibration: of the model's word times and confidences.
    chain: the model's licence, and the data and weights that it was made from; None if unknown.
    stream_sizes: encoder frames of a chunk and of its left context that decode.chunk and
        decode.left replace; 0: as trained.
    """

    model: SpeechModel
    tokenizer: Tokenizer
    p99_duration: float | None = None
    calibration: Calibration | None = None
    chain: Chain | None = None
    stream_sizes: tuple[int, int] = (0, 0)


def check_tokens(parts: ModelFile) -> None:
    """Raise ExportError if the tokenizer and the model have different vocabularies."""
    model, tokenizer, *_ = parts
    if len(tokenizer) != model.vocab_size:
        raise ExportError(
            f"the tokenizer has {len(tokenizer)} symbols, the model {model.vocab_size}: "
            "they do not come from the same run"
        )


def save_model(parts: ModelFile, path: Path, source: str) -> None:
    """Write the file; `source` is the name of the run and checkpoint.

    Raises:
        ExportError: the tokenizer does not fit the model, or the file cannot be written.
    """
    check_tokens(parts)
    model, tokenizer, p99_duration, calibration, chain, sizes = parts
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "format": FORMAT,
        "version": VERSION,
        "config": {"model": to_dict(model.config), "loss": to_dict(model.loss_config)},
        "vocab_size": model.vocab_size,
        "state": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "tokenizer": torch.frombuffer(bytearray(tokenizer.model), dtype=torch.uint8),
        _P99_KEY: p99_duration,
        _CALIBRATION_KEY: calibration.to_dict() if calibration is not None else None,
        _SIZES_KEY: list(sizes),
        "source": source,
        _CHAIN_KEY: chain.to_dict() if chain is not None else None,
    }
    try:
        with path.open("wb") as file:
            torch.save(values, file)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise ExportError(f"{path} could not be written: {str(reason).splitlines()[0]}") from error


def load_model(path: Path | str, *, transposed: bool = False) -> ModelFile:
    """Load a model on the CPU in evaluation mode.

    Args:
        path: the file, or the folder that `pruned-rnnt export --format torch` wrote.
        transposed: as `transpose_in_memory` does it afterwards, which copies the model once more.

    Raises:
        ExportError: the file is missing, damaged, of another kind or of a newer version, has an
            unknown architecture, or has NaN, infinite or huge parameters.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    values = _read(path)
    if broken := describe_broken(values["state"]):
        raise ExportError(f"{path} cannot be used: {broken}. Export an earlier checkpoint")
    if not isinstance(values["config"].get("model"), dict):
        raise ExportError(f"{path} is damaged: 'config' has no model")
    try:
        config = from_dict(ModelConfig, values["config"]["model"], str(path))
        loss = from_dict(LossConfig, values["config"].get("loss") or {}, str(path))
        model = fitted_model(
            lambda: build_model(config, values["vocab_size"], loss),
            values["state"],
            str(path),
            prepare=_prepare_transposed if transposed else None,
        )
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ExportError(
            f"{path} has an architecture that this version of pruned_rnnt does not have: {reason}"
        ) from error
    try:
        tokenizer = Tokenizer(values["tokenizer"].numpy().tobytes())
        p99_duration = values.get(_P99_KEY)
        if p99_duration is not None:
            p99_duration = float(p99_duration)
            if not 0 < p99_duration < math.inf:
                raise ValueError(f"{_P99_KEY} is {p99_duration}")
        calibration = values.get(_CALIBRATION_KEY)
        if calibration is not None:
            calibration = Calibration.from_dict(calibration)
        chunk, left = map(int, values.get(_SIZES_KEY, (0, 0)))
    # SentencePiece raises RuntimeError.
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ExportError(
            f"{path} is damaged: its tokenizer, calibration or {_SIZES_KEY} ({reason})"
        ) from error
    try:
        chain = chain_from(values[_CHAIN_KEY], path) if values.get(_CHAIN_KEY) else None
    except ValueError as error:
        raise ExportError(str(error)) from error
    return ModelFile(model.eval(), tokenizer, p99_duration, calibration, chain, (chunk, left))


def _prepare_transposed(model: SpeechModel) -> None:
    transpose_in_memory(model.encoder, keep_values=False)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ExportError(
            f"no model at {path}: create one with `pruned-rnnt export RUN --format torch`"
        )
    try:
        values = read_saved(path, "model file", mapped=True)
    except UnusableFileError as error:
        raise ExportError(str(error)) from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        kind = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ExportError(
            f"{path} is not an exported model but {kind or 'another kind of file'}: "
            "create one with `pruned-rnnt export RUN --format torch`"
        )
    try:
        check_contents(values, path, VERSION, parameters=("state",), needed=("tokenizer",))
    except UnusableFileError as error:
        raise ExportError(str(error)) from error
    return values
