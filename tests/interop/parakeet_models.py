"""Parakeet models whose parameters follow a formula, for values of other packages that are stored.

`python tests/interop/parakeet_models.py`, in an environment with nemo_toolkit 3.0.0 and
transformers 5.24.0, computes tests/interop/parakeet_values.json. The tests need neither.
"""

from __future__ import annotations

import base64
import io
import json
import math
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

VALUES = Path(__file__).parent / "parakeet_values.json"
SYMBOLS = 30
TARGETS = [[3, 5, 7, 2], [4, 9, 0, 0], [8, 8, 1, 0]]
DURATIONS = [0, 1, 2, 3, 4]
_TEXT = "zero one two three four five six seven eight nine seventeen"
_LENGTHS = (16000, 7003, 4801)

NEMO = {
    "nemo_rnnt": ("rnnt", {}),
    "nemo_tdt": ("tdt", {"conv_norm_type": "layer_norm"}),
    "nemo_ctc": ("ctc", {"xscaling": False, "use_bias": False}),
    "nemo_window": ("hybrid", {"att_context_size": [3, 2]}),
    "nemo_causal": (
        "hybrid",
        {
            "causal_downsampling": True,
            "conv_context_size": "causal",
            "att_context_style": "chunked_limited",
            "att_context_size": [[8, 3], [8, 1]],
            "conv_norm_type": "layer_norm",
            "xscaling": False,
        },
    ),
}
TRANSFORMERS = ("transformers_ctc", "transformers_rnnt", "transformers_tdt")


def audio() -> list[np.ndarray[Any, Any]]:
    """Chirps with pauses."""
    found = []
    for n, length in enumerate(_LENGTHS):
        t = np.arange(length) / 16000
        wave = np.sin(2 * np.pi * (150 + 40 * n + 900 * t) * t) * (np.sin(2 * np.pi * 3 * t) > -0.5)
        found.append((0.3 * wave).astype(np.float32))
    return found


def formula(index: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The parameter of this index among the sorted names."""
    t = torch.arange(math.prod(shape), dtype=torch.float64)
    if name.endswith("running_var"):
        return (1 + 0.5 * t.sin()).float()
    if name.endswith("running_mean"):
        return (0.1 * t.cos()).float()
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.int64)
    width = shape[-1] if len(shape) > 1 else 4
    values = (t * (0.7 + 0.01 * index) + index).sin() * (1.5 / math.sqrt(max(width, 1)))
    if "norm" in name and name.endswith("weight") and len(shape) == 1:
        values += 1
    values = values.reshape(shape).float()
    if name == "decoder.prediction.embed.weight":
        values[-1] = 0
    if name == "joint.head.bias" and shape[0] > SYMBOLS + 1:
        # The search of transformers has no limit of symbols in a frame, of duration 0.
        values[SYMBOLS + 1] = -10
    return values


def formulas(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {n: formula(i, n, tuple(shapes[n])) for i, n in enumerate(sorted(shapes))}


def tokenizer_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.split() * 3),
        model_writer=model,
        vocab_size=SYMBOLS,
        model_type="bpe",
        normalization_rule_name="identity",
        character_coverage=1.0,
        bos_id=-1,
        eos_id=-1,
        unk_id=0,
        minloglevel=2,
    )
    return model.getvalue()


def nemo_config(kind: str, **encoder: Any) -> dict[str, Any]:
    asr = "nemo.collections.asr.modules."
    targets = {
        "rnnt": "rnnt_bpe_models.EncDecRNNTBPEModel",
        "tdt": "rnnt_bpe_models.EncDecRNNTBPEModel",
        "ctc": "ctc_bpe_models.EncDecCTCModelBPE",
        "hybrid": "hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
    }
    head = {"_target_": asr + "ConvASRDecoder", "feat_in": 32, "num_classes": -1, "vocabulary": []}
    causal = encoder.get("causal_downsampling", False)
    config: dict[str, Any] = {
        "target": "nemo.collections.asr.models." + targets[kind],
        "sample_rate": 16000,
        "preprocessor": {
            "_target_": asr + "AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "NA" if causal else "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 80,
            "n_fft": 512,
            "dither": 1e-5,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": asr + "ConformerEncoder",
            "feat_in": 80,
            "feat_out": -1,
            "n_layers": 2,
            "d_model": 32,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": 8,
            "ff_expansion_factor": 2,
            "self_attention_model": "rel_pos",
            "n_heads": 4,
            "att_context_size": [-1, -1],
            "xscaling": True,
            "untie_biases": True,
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
            **encoder,
        },
        "tokenizer": {"type": "bpe", "dir": "tokens"},
        "model_defaults": {"enc_hidden": 32, "pred_hidden": 24, "joint_hidden": 20},
        "optim": {"name": "adamw", "lr": 0.1},
    }
    if kind == "ctc":
        return {**config, "decoder": head}
    config["decoder"] = {
        "_target_": asr + "RNNTDecoder",
        "normalization_mode": None,
        "random_state_sampling": False,
        "blank_as_pad": True,
        "prednet": {"pred_hidden": 24, "pred_rnn_layers": 2, "t_max": None, "dropout": 0.2},
    }
    config["joint"] = {
        "_target_": asr + "RNNTJoint",
        "log_softmax": None,
        "preserve_memory": False,
        "fuse_loss_wer": False,
        "jointnet": {"joint_hidden": 20, "activation": "relu", "dropout": 0.2},
    }
    config["decoding"] = {
        "strategy": "greedy",
        "greedy": {"max_symbols": 10, "loop_labels": False, "use_cuda_graph_decoder": False},
    }
    config["loss"] = {"loss_name": "default"}
    if kind == "tdt":
        kwargs = {"durations": DURATIONS, "sigma": 0.0, "omega": 0.0}
        config["loss"] = {"loss_name": "tdt", "tdt_kwargs": kwargs}
        config["joint"]["num_extra_outputs"] = len(DURATIONS)
        config["decoding"] |= {"model_type": "tdt", "durations": DURATIONS}
        config["model_defaults"]["tdt_durations"] = DURATIONS
    if kind == "hybrid":
        decoding = {"strategy": "greedy"}
        config["aux_ctc"] = {"ctc_loss_weight": 0.3, "decoder": head, "decoding": decoding}
    return config


def write_nemo(
    path: Path, config: dict[str, Any], state: dict[str, torch.Tensor], tokenizer: bytes
) -> None:
    """An archive like NeMo's; JSON is YAML too."""
    weights = io.BytesIO()
    torch.save(state, weights)
    config = {**config, "tokenizer": {"type": "bpe", "model_path": "nemo:abc_tokenizer.model"}}
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("./model_config.yaml", json.dumps(config).encode()),
            ("./abc_tokenizer.model", tokenizer),
            ("./model_weights.ckpt", weights.getvalue()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def encoded_values(values: torch.Tensor) -> str:
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()


def decoded_values(text: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy()).view(*shape)


def stored(values: torch.Tensor, step: int = 4) -> torch.Tensor:
    """The part of an output that is stored: every fourth frame of the longest utterance."""
    return values[0, ::step].contiguous()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from parakeet_references import computed_values

    VALUES.write_text(json.dumps(computed_values()))
