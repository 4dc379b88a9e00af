"""Import models of NeMo and transformers: FastConformer with RNN-T, TDT and CTC outputs.

Their symbols are 0 .. V-1, and V for the blank. Ours have the blank first, and a symbol sos/eos
that those models lack: its outputs have a bias of -10000, so that its probability is 0. `read_run`
adds the settings that the commands of a run need.

Axes: V symbols without the blank, E encoder width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.config.load import ConfigError, differences, load_config, to_dict
from pruned_rnnt.config.written import as_override
from pruned_rnnt.data.audio.features import SAMPLING_RATE, nemo_features
from pruned_rnnt.data.audio.samples import samples_at_16_khz
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.interop.nemo.files import SourceFiles, read_archive, read_folder
from pruned_rnnt.interop.nemo.parts import TRANSFORMERS_PREFIXES, encoder_from_nemo, renamed
from pruned_rnnt.interop.nemo.symbols import Symbols, symbols_of_json, symbols_of_sentencepiece
from pruned_rnnt.interop.nemo.topology import (
    MAX_SYMBOLS,
    Topology,
    nemo_topology,
    transformers_topology,
)
from pruned_rnnt.model.build_model import build_model, fitted_model
from pruned_rnnt.model.parameter_values import describe_broken
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.train.experiment import ExperimentConfig, check_no_folder

StateDict = dict[str, Tensor]

# The bias of a symbol that the model never had.
ABSENT = -1e4
_ENCODER = "encoder."
# Parts of NeMo's models that hold constants or are used only in training.
_IDLE = ("preprocessor.", "spec_augmentation.", "loss.", "encoder.pos_enc.")
_JOINT = ("joint.joint_net.2.", "joint.joint_net.1.")
_CTC = ("ctc_decoder.decoder_layers.0.", "decoder.decoder_layers.0.")
_EMBEDDING = "decoder.prediction.embed.weight"
_LSTM = "decoder.prediction.dec_rnn.lstm."
# Settings that change training or streams, but not what the parameters mean.
_FREE_MODEL_KEYS = (
    "encoder.dropout",
    "encoder.chunk_size",
    "encoder.left_chunks",
    "predictor.dropout",
)
_FREE_LOSS_KEYS = ("ctc_scale", "fastemit_lambda", "sigma", "omega")


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """A model on the CPU in evaluation mode, with its tokenizer.

    max_symbols_per_frame: that greedy search emits at most in a frame of 80 ms, by the file's
        configuration, or 10 as in NeMo and transformers.
    """

    model: SpeechModel
    tokenizer: Tokenizer
    max_symbols_per_frame: int = MAX_SYMBOLS

    @torch.no_grad()
    def texts(
        self, samples: Sequence[FloatArray | Pcm16Array | Tensor], max_symbols_per_frame: int = 0
    ) -> list[str]:
        """The texts of recordings by greedy search, each encoded as a whole.

        Args:
            samples: (S,) each at 16 kHz: floats within -1 .. 1, or 16-bit integers.
            max_symbols_per_frame: of a transducer; 0 takes the model's own.

        Raises:
            ValueError: `samples` is no sequence of recordings, or one of them is a path, or has
                another shape or type, no samples, or NaN or infinite ones.
        """
        checked = _checked(samples)
        if not checked:
            return []
        device = next(self.model.parameters()).device
        bins = self.model.encoder.config.num_mel_bins
        encoded_NTE, lengths_N = self.model.encode(*nemo_features(checked, device, bins))
        most = max_symbols_per_frame or self.max_symbols_per_frame
        search = new_greedy_search(self.model, max_symbols_per_frame=most)
        found = search(encoded_NTE, lengths_N)
        return self.tokenizer.decode_all([hypothesis.symbols for hypothesis in found])


def _checked(samples: Any) -> list[FloatArray]:
    """Each recording as floats; raises ValueError, which names a recording that is unusable."""
    if isinstance(samples, str | bytes | Path | np.ndarray | Tensor):
        raise ValueError(
            f"samples is of type {type(samples).__name__}, needs a list of recordings, each an "
            "array or tensor (S,) at 16 kHz: for one recording, pass [array]"
        )
    checked = []
    for index, recording in enumerate(samples):
        if isinstance(recording, str | bytes | Path):
            raise ValueError(
                f"samples[{index}] is {recording!r}, needs an array or tensor (S,) at 16 kHz: for "
                "files, use `pruned_rnnt.load(MODEL).transcribe(FILES)`"
            )
        try:
            checked.append(samples_at_16_khz(recording, SAMPLING_RATE))
        except ValueError as error:
            raise ValueError(f"samples[{index}]: {error}") from error
    return checked


def import_model(path: Path | str) -> ImportedModel:
    """The model in a `.nemo` archive or a folder of transformers.

    Raises:
        UnusableFileError: a file is missing, damaged or holds code.
        ValueError: the model computes something that is not supported; the message names the key.
    """
    path = Path(path)
    if path.is_dir():
        files = read_folder(path)
        parameters = _from_transformers(files)
        read_topology, read_symbols = transformers_topology, symbols_of_json
    else:
        files = read_archive(path)
        parameters = files.parameters
        read_topology, read_symbols = nemo_topology, symbols_of_sentencepiece
    if broken := describe_broken(parameters):
        raise ValueError(f"{path} cannot be used: {broken}")
    try:
        topology = read_topology(files.config)
        symbols = read_symbols(files.tokenizer)
        keep_start = path.is_dir()
        state = _our_parameters(parameters, topology, symbols, keep_start=keep_start)
    except KeyError as error:
        raise ValueError(f"{path}: the configuration has no {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    model = fitted_model(
        lambda: build_model(topology.model, len(symbols.order), topology.loss), state, str(path)
    )
    return ImportedModel(
        model=model.float().eval(),
        tokenizer=symbols.tokenizer,
        max_symbols_per_frame=topology.max_symbols,
    )


def _from_transformers(files: SourceFiles) -> StateDict:
    """The parameters under NeMo's names."""
    found: StateDict = {}
    for name, value in files.parameters.items():
        theirs: str | None = None
        if name.startswith(_ENCODER):
            inner = renamed(name.removeprefix(_ENCODER), "nemo", "transformers")
            theirs = None if inner is None else _ENCODER + inner
        for prefix, nemo in TRANSFORMERS_PREFIXES.items():
            if name.startswith(prefix):
                theirs = nemo + name.removeprefix(prefix)
        if theirs is None:
            raise ValueError(f"{files.path}: {name} cannot be imported: no module here has it")
        found[theirs] = value
    return found


def _our_parameters(
    theirs: Mapping[str, Tensor], topology: Topology, symbols: Symbols, *, keep_start: bool
) -> StateDict:
    """The state dict of our model.

    Args:
        keep_start: the predictor starts from the blank's embedding; else from zeros.
    """
    rest = {name: x for name, x in theirs.items() if not name.startswith(_IDLE)}
    encoder = {name: rest.pop(name) for name in list(rest) if name.startswith(_ENCODER)}
    own, unknown = encoder_from_nemo({k.removeprefix(_ENCODER): x for k, x in encoder.items()})
    if unknown:
        raise ValueError(f"encoder.{unknown[0]} cannot be imported: the encoder here has none")
    state = {_ENCODER + name: x for name, x in own.items()}
    order, size = symbols.order, len(symbols.order) - 1
    if topology.is_ctc or topology.loss.ctc_scale > 0:
        weight, bias = _layer(rest, _CTC)
        _check_rows("CTC outputs", weight, size)
        state["ctc_head.weight"] = _rows(weight.flatten(1), order)
        state["ctc_head.bias"] = _rows(bias, order, ABSENT)
    if not topology.is_ctc:
        weight, bias = _layer(rest, _JOINT)
        _check_rows("joint outputs", weight, size + len(topology.loss.durations))
        state["joiner.output_linear.weight"] = _rows(weight, order)
        state["joiner.output_linear.bias"] = _rows(bias, order, ABSENT)
        if topology.loss.durations:
            state["joiner.duration_linear.weight"] = weight[size:].clone()
            state["joiner.duration_linear.bias"] = bias[size:].clone()
        for ours, name in (("encoder_proj", "joint.enc."), ("decoder_proj", "joint.pred.")):
            state[f"joiner.{ours}.weight"], state[f"joiner.{ours}.bias"] = _layer(rest, (name,))
        embedding = _taken(rest, _EMBEDDING)
        _check_rows("embeddings", embedding, size)
        state["predictor.embedding.weight"] = _rows(embedding, order)
        if not keep_start:
            state["predictor.embedding.weight"][0] = 0
        for name in [name for name in rest if name.startswith(_LSTM)]:
            state["predictor.lstm." + name.removeprefix(_LSTM)] = rest.pop(name)
    if rest:
        raise ValueError(f"{next(iter(rest))} cannot be imported: no module here has it")
    return {name: x.float() for name, x in state.items()}


def _check_rows(what: str, weight: Tensor, rows: int) -> None:
    if len(weight) != rows:
        raise ValueError(
            f"the model has {len(weight)} {what}, and its tokenizer and durations need {rows}"
        )


def _taken(rest: StateDict, name: str) -> Tensor:
    if name not in rest:
        raise ValueError(f"the parameters lack {name}")
    return rest.pop(name)


def _layer(rest: StateDict, prefixes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    prefix = next((x for x in prefixes if x + "weight" in rest), prefixes[0])
    return _taken(rest, prefix + "weight"), _taken(rest, prefix + "bias")


def _rows(values: Tensor, order: list[int | None], absent: float = 0.0) -> Tensor:
    """Values by our symbols; `absent` for those that the model does not have."""
    index = torch.tensor([0 if i is None else i for i in order])
    rows = values[index]
    rows[[n for n, i in enumerate(order) if i is None]] = absent
    return rows


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
        ConfigError: an override is wrong, names another folder, changes what the model computes,
            or needs a CTC head that the model does not have.
    """
    check_no_folder(overrides, output)
    imported = import_model(path)
    model = imported.model
    base = {
        "data": {"features": "waveform"},
        "model": to_dict(model.config),
        "loss": to_dict(model.loss_config),
    }
    most = f"decode.max_symbols_per_frame={imported.max_symbols_per_frame}"
    settings = [most, as_override("train.folder", output), *overrides]
    layer = f"the settings of {path}", base
    config = load_config(ExperimentConfig, None, settings, base=layer)
    _check_unchanged(model, config)
    if config.loss.has_ctc_head and model.ctc_head is None:
        scale = f"{config.loss.ctc_scale:g}"
        raise ConfigError(
            f"loss.ctc_scale is {scale}, but {path} has no CTC head: leave it out "
            f"(`pruned-rnnt finetune ... loss.ctc_scale={scale}` trains a new head)"
        )
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
