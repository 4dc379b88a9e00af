"""Export models with a FastConformer to NeMo and transformers: the reverse of imported_model.py.

The symbol sos/eos, which models there lack, is left out; the blank comes last.

Axes: V symbols without the blank.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from pruned_rnnt.data.audio.features import nemo_constants
from pruned_rnnt.data.tokens.tokenizer import SOS_EOS_ID, Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS
from pruned_rnnt.interop.nemo.archive_config import archive_config
from pruned_rnnt.interop.nemo.files import CONFIG_JSON, TOKENIZER, WEIGHTS, write_safetensors
from pruned_rnnt.interop.nemo.folder_config import extractor_config, folder_config
from pruned_rnnt.interop.nemo.parts import (
    TRANSFORMERS_PREFIXES,
    encoder_to_nemo,
    parts_to_nemo,
    renamed,
)
from pruned_rnnt.interop.nemo.symbols import sentencepiece_of, tokenizer_json_of
from pruned_rnnt.interop.nemo.topology import MAX_SYMBOLS
from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.predictor import LstmPredictor
from pruned_rnnt.model.speech_model import BLANK, SpeechModel, TransducerModel

StateDict = dict[str, Tensor]

_TOKENIZER_NAME = "tokenizer.model"
_BY_SYMBOL = ("decoder.prediction.embed.", "joint.joint_net.", "ctc_decoder.", "decoder.decoder_")


def export_model(
    model: SpeechModel,
    tokenizer: Tokenizer,
    path: Path | str,
    *,
    max_symbols_per_frame: int = 0,
) -> None:
    """Write a `.nemo` archive, or a folder of transformers for any other name.

    Args:
        max_symbols_per_frame: that greedy search emits at most there. 0 chooses 10, the default of
            both packages. It is 1 for a model of a loss.rnnt_type other than regular.

    Raises:
        ValueError: the path exists, or the model has something that the other package cannot
            compute; the message names the setting.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists: choose another path")
    _check(model)
    most = max_symbols_per_frame or MAX_SYMBOLS
    if not _is_regular(model):
        most = 1
    if path.suffix == ".nemo":
        _write_archive(path, model, tokenizer, most)
    else:
        _write_folder(path, model, tokenizer, most)


def archive_differences(model: SpeechModel, decode: DecodeConfig) -> Iterator[str]:
    """One line for each setting that may make the texts of NeMo differ from the run's."""
    is_transducer = isinstance(model, TransducerModel)
    if is_transducer and _is_regular(model) and not decode.max_symbols_per_frame:
        most = SHERPA_MAX_SYMBOLS if model.loss_config.durations else 1
        yield (
            f"decode.max_symbols_per_frame is 0: greedy search here emits at most {most} per "
            f"frame, and the archive says {MAX_SYMBOLS}, NeMo's default (give a number for both)"
        )


def _is_regular(model: SpeechModel) -> bool:
    return model.loss_config.rnnt_type == "regular"


def _check(model: SpeechModel) -> None:
    """Raise ValueError for what both packages lack."""
    kind = model.config.encoder.kind
    if not isinstance(model.encoder, FastConformer):
        raise ValueError(f"model.encoder.kind is {kind}; NeMo and transformers need fastconformer")
    if model.encoder.config.features != "nemo":
        raise ValueError(
            "model.encoder.features is fbank; NeMo and transformers need a model that was trained "
            "with model.encoder.features=nemo"
        )
    norm = model.encoder.config.feature_norm
    if norm not in ("bins", "none"):
        raise ValueError(f"model.encoder.feature_norm is {norm}; supported: bins, none")
    if isinstance(model, TransducerModel):
        if not isinstance(model.predictor, LstmPredictor):
            raise ValueError("model.predictor.kind is stateless; supported: lstm")
        if model.loss_config.hat:
            raise ValueError("loss.hat is true; NeMo and transformers have no HAT")


@torch.no_grad()
def nemo_state(model: SpeechModel) -> StateDict:
    """The parameters under NeMo's names, with its constants of the features."""
    window_S, filters_FB = nemo_constants(torch.device("cpu"), model.encoder.config.num_mel_bins)
    own = model.encoder.state_dict()
    state = {f"encoder.{name}": x for name, x in encoder_to_nemo(own).items()}
    if isinstance(model, TransducerModel):
        state |= parts_to_nemo(model.joiner, model.predictor, model.ctc_head)
    else:
        assert model.ctc_head is not None
        order = [i for i in range(model.vocab_size) if i != BLANK] + [BLANK]
        state["decoder.decoder_layers.0.weight"] = model.ctc_head.weight[order][..., None]
        state["decoder.decoder_layers.0.bias"] = model.ctc_head.bias[order]
    for name, value in state.items():
        if name.startswith(_BY_SYMBOL):
            # Behind the blank's move to the end, sos/eos is the first.
            state[name] = value[SOS_EOS_ID:].clone()
    state["preprocessor.featurizer.window"] = window_S.clone()
    state["preprocessor.featurizer.fb"] = filters_FB[None].clone()
    return {name: x.detach().cpu().contiguous() for name, x in state.items()}


def _write_archive(path: Path, model: SpeechModel, tokenizer: Tokenizer, most: int) -> None:
    weights = io.BytesIO()
    torch.save(nemo_state(model), weights)
    config = archive_config(model, tokenizer, _TOKENIZER_NAME, most)
    files = {
        "model_config.yaml": OmegaConf.to_yaml(OmegaConf.create(config)).encode(),
        _TOKENIZER_NAME: sentencepiece_of(tokenizer),
        "vocab.txt": "\n".join(tokenizer.symbols[SOS_EOS_ID + 2 :]).encode(),
        "model_weights.ckpt": weights.getvalue(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _write_folder(path: Path, model: SpeechModel, tokenizer: Tokenizer, most: int) -> None:
    config = folder_config(model, most)
    state: StateDict = {}
    start = {nemo: theirs for theirs, nemo in TRANSFORMERS_PREFIXES.items()}
    for name, value in nemo_state(model).items():
        if name.startswith("encoder."):
            inner = renamed(name.removeprefix("encoder."), "transformers", "nemo")
            state[f"encoder.{inner}"] = value
            continue
        name = name.replace("decoder.decoder_layers.", "ctc_decoder.decoder_layers.")
        for nemo, theirs in start.items():
            if name.startswith(nemo):
                state[theirs + name.removeprefix(nemo)] = value
    path.mkdir(parents=True)
    write_safetensors(path / WEIGHTS, state)
    (path / TOKENIZER).write_bytes(tokenizer_json_of(tokenizer))
    (path / CONFIG_JSON).write_text(json.dumps(config, indent=2) + "\n")
    if isinstance(model, TransducerModel):
        # `generate` starts a text with the blank. The end is an id that no symbol has: without one,
        # it does not fill the texts of the shorter recordings in a batch, but goes on with them.
        blank = config["blank_token_id"]
        generation = {
            "decoder_start_token_id": blank,
            "pad_token_id": blank,
            "eos_token_id": blank + 1,
        }
        (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    extractor = extractor_config(model.encoder.config.num_mel_bins)
    (path / "preprocessor_config.json").write_text(json.dumps(extractor, indent=2) + "\n")
