"""`pruned_rnnt.load`: a recogniser from a run, a model file, an ONNX folder, or a model of others.

Imports within functions are deliberate: loading must not wait for what the model does not need.
Only runs need lhotse, whose import takes long.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import choose_passes, set_chunks
from pruned_rnnt.export import model_file
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.model.kernels import prebuilt
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.pretrained.found_model import FoundModel, NoModelError, find_model
from pruned_rnnt.pretrained.hub import local_path
from pruned_rnnt.system.device import missing_device, start_device
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import SegmentConfig


def load(
    path: Path | str,
    device: torch.device | str = "cpu",
    *,
    settings: Sequence[str] = (),
    segments: SegmentConfig | None = None,
) -> AudioRecogniser:
    """The implementation of `pruned_rnnt.load`, which describes arguments and errors."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"path is {path!r}, needs the path of a run or a model, or owner/name of a repository"
        )
    _check_settings(settings)
    if not isinstance(segments, SegmentConfig | None):
        raise UsageError(f"segments is {segments!r}, needs a SegmentConfig")
    folder = local_path(path)
    try:
        found = find_model(folder)
    except NoModelError as error:
        if folder == Path(path):
            raise
        raise NoModelError(
            f"{error}. If the repository has more files, the download of {path} is incomplete: "
            "load it once while online"
        ) from error
    if found.kind != "run":
        _check_is_no_checkpoint(found, settings)
    if found.kind == "onnx":
        return _load_onnx(found, device, settings, segments)
    device = _device(device)
    start_device(device, compiles=not prebuilt.is_installed())
    parts, decode = _load_torch(found, settings, device)
    model = parts.model.to(device)
    choose_passes(decode, model)
    return Recogniser(
        model,
        parts.tokenizer,
        parts.p99_duration,
        parts.calibration,
        segments=segments,
        decode=decode,
        language_model=fusion_language_model(decode, model, parts.tokenizer),
    )


def _check_settings(settings: Sequence[str]) -> None:
    if isinstance(settings, str) or not isinstance(settings, Sequence):
        raise UsageError(f"settings is {settings!r}, needs a list such as ['decode.beam_size=8']")
    for item in settings:
        if not isinstance(item, str) or not item.startswith("decode."):
            raise UsageError(
                f"settings has {item!r}, needs decode.key=value: all others are those of the "
                "model's training"
            )


def _check_is_no_checkpoint(found: FoundModel, settings: Sequence[str]) -> None:
    for each in settings:
        if each.startswith(("decode.checkpoint=", "decode.use_average=")):
            raise UsageError(
                f"{found.path} is one model, not a run with checkpoints: leave out {each}, or load "
                "the run"
            )


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device is {device!r}, needs cpu, cuda, cuda:N or auto") from error
    if found.type == "cuda" and (missing := missing_device(found.index or 0)):
        raise UsageError(f"device is {device}, but {missing}")
    return found


def _load_onnx(
    found: FoundModel,
    device: torch.device | str,
    settings: Sequence[str],
    segments: SegmentConfig | None,
) -> AudioRecogniser:
    from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser

    if str(device) not in ("cpu", "auto"):
        raise UsageError(
            f"device is {device}, but {found.path} has ONNX files, which run on the CPU: leave it "
            "out, or load the run or a model of `pruned-rnnt export --format torch`"
        )
    if _decode_config(settings) != DecodeConfig():
        raise UsageError(
            f"{found.path} has ONNX files, which are decoded by greedy search only: leave out "
            f"{settings[0]}, or load the run or a model of `pruned-rnnt export --format torch`"
        )
    return OnnxRecogniser(found.path, segments=segments)


def _decode_config(settings: Sequence[str]) -> DecodeConfig:
    """The defaults, changed by `decode.key=value`."""
    if not settings:
        return DecodeConfig()
    from pruned_rnnt.config.load import load_config
    from pruned_rnnt.train.experiment import ExperimentConfig

    return load_config(ExperimentConfig, None, settings).decode


def _load_torch(
    found: FoundModel, settings: Sequence[str], device: torch.device
) -> tuple[ModelFile, DecodeConfig]:
    """The model on the CPU with what is stored beside it, and how to decode on the device."""
    if found.kind == "run":
        from pruned_rnnt.decode.calibration import read_calibration
        from pruned_rnnt.train.engine.run_files import read_p99_duration
        from pruned_rnnt.train.run import load_model, run_config

        config = run_config(found.path, ["train.device=cpu", *found.settings, *settings])
        loaded = load_model(config)
        calibration = read_calibration(found.path, loaded.model.vocab_size)
        p99_duration = read_p99_duration(found.path)
        parts = ModelFile(loaded.model, loaded.tokenizer, p99_duration, calibration)
        return parts, config.decode
    decode = _decode_config(settings)
    if found.kind == "nemo":
        from pruned_rnnt.interop.nemo.imported_model import read_run as read_nemo

        imported = read_nemo(found.path, Path("exp/nemo"), settings)
        set_chunks(imported.model, imported.config.decode)
        parts = ModelFile(imported.model, imported.tokenizer, None, None)
        return parts, imported.config.decode
    if found.kind == "file":
        # As the recogniser wants it.
        parts = model_file.load_model(found.path, transposed=device.type == "cpu")
        if not decode.chunk:  # a left context belongs to its chunk
            chunk, left = parts.stream_sizes
            decode = replace(decode, chunk=chunk, left=decode.left or left)
    else:
        if found.tokens is None:
            raise NoModelError(f"there are no tokens for {found.path}")
        from pruned_rnnt.interop.icefall_run import read_run

        run = read_run(found.path, found.tokens, Path("exp/icefall"))
        parts = ModelFile(run.model, run.tokenizer, None, None)
    set_chunks(parts.model, decode)
    return parts, decode


def fusion_language_model(
    config: DecodeConfig, model: SpeechModel, tokenizer: Tokenizer
) -> LanguageModel | None:
    """The model of decode.fusion.lm on the recogniser's device; None if the setting is empty.

    Raises:
        UsageError: there is no such run, or it has other symbols.
    """
    if not config.fusion.lm:
        return None
    from pruned_rnnt.train.tasks.lm_task import load_language_model

    folder = Path(config.fusion.lm)
    if not folder.is_dir():
        raise UsageError(f"decode.fusion.lm: there is no run of a language model at {folder}")
    language_model, symbols = load_language_model(folder, next(model.parameters()).device)
    if symbols.symbols != tokenizer.symbols:
        raise UsageError(
            f"the language model {folder} and the recogniser have different symbols: prepare the "
            "texts of the language model with `pruned-rnnt prepare lm` from the same data"
        )
    return language_model
