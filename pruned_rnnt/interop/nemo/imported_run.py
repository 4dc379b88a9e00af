"""A run from a model of NeMo or transformers, with the settings that its commands need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import ConfigError, differences, load_config, to_dict
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.interop.nemo.imported_model import import_model
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.train.experiment import ExperimentConfig

# Their searches emit at most so many symbols in a frame, which lasts 80 ms.
DECODE_SETTINGS = ("decode.max_symbols_per_frame=10",)

# Settings that change training or streams, but not what the parameters mean.
_FREE_MODEL_KEYS = (
    "encoder.dropout",
    "encoder.chunk_size",
    "encoder.left_chunks",
    "predictor.dropout",
)
_FREE_LOSS_KEYS = ("ctc_scale", "fastemit_lambda", "sigma", "omega")


@dataclass(frozen=True, kw_only=True)
class NemoRun:
    """The imported model on the CPU in evaluation mode, its configuration and tokens.

    notes: lines for the user, for example about a head that was left out.
    """

    model: SpeechModel
    config: ExperimentConfig
    tokenizer: Tokenizer
    notes: tuple[str, ...]


def read_run(path: Path, output: Path, overrides: Sequence[str] = ()) -> NemoRun:
    """Read a `.nemo` archive or a folder of transformers as a run; writes nothing.

    Args:
        output: folder of the run, for its configuration.
        overrides: `section.key=value`, such as loss.ctc_scale=0, which leaves out the CTC head of
            a hybrid model.

    Raises:
        UnusableFileError: a file is missing, damaged or holds code.
        ValueError: the model computes something that is not supported; the message names the key.
        ConfigError: an override is wrong, or changes what the model computes.
    """
    imported = import_model(path)
    model = imported.model
    data: dict[str, Any] = {"features": "waveform"}
    base = {"data": data, "model": to_dict(model.config), "loss": to_dict(model.loss_config)}
    settings = [*DECODE_SETTINGS, f"train.folder={output}", *overrides]
    layer = f"the settings of {path}", base
    config = load_config(ExperimentConfig, None, settings, base=layer)
    if config.loss.has_ctc_head:
        # CTC needs a frame for each symbol; the transducers emit several in one.
        data["filters"] = {"subsampling_factor": model.encoder.subsampling_factor}
        config = load_config(ExperimentConfig, None, settings, base=layer)
    _check_unchanged(model, config)
    notes = []
    if model.ctc_head is not None and model.loss_config.kind != "ctc":
        if config.loss.has_ctc_head:
            notes.append("the CTC head is kept (loss.ctc_scale=0 leaves it out)")
        else:
            notes.append("the CTC head is left out, because loss.ctc_scale is 0")
            model.ctc_head = None
            model.loss_config = config.loss
    return NemoRun(model=model, config=config, tokenizer=imported.tokenizer, notes=tuple(notes))


def _check_unchanged(model: SpeechModel, config: ExperimentConfig) -> None:
    """Raise ConfigError if overrides changed what the parameters mean."""
    changed = [
        f"{section}.{line}"
        for section, source, wanted, free in (
            ("model", model.config, config.model, _FREE_MODEL_KEYS),
            ("loss", model.loss_config, config.loss, _FREE_LOSS_KEYS),
        )
        for line in differences(to_dict(source), to_dict(wanted))
        if line.partition(":")[0] not in free
    ]
    if changed:
        raise ConfigError(
            f"settings that the model fixes cannot be changed ({'; '.join(changed)}): leave them "
            "out"
        )


def describe(run: NemoRun) -> list[str]:
    """Lines about the model for the user."""
    kind = "CTC model" if run.config.loss.kind == "ctc" else "transducer"
    if run.config.loss.durations:
        kind = f"TDT transducer with durations {list(run.config.loss.durations)}"
    count = sum(parameter.numel() for parameter in run.model.parameters())
    symbols = len(run.tokenizer)
    first = f"FastConformer {kind}, {count / 1e6:.1f} M parameters, {symbols} symbols"
    return [f"wrote {run.config.folder}: {first}", *run.notes]
