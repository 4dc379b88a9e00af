"""The outputs of nemo_toolkit and transformers for the models of parakeet_models.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from parakeet_models import (
    DURATIONS,
    NEMO,
    SYMBOLS,
    TARGETS,
    TRANSFORMERS,
    audio,
    encoded_values,
    formulas,
    nemo_config,
    stored,
    tokenizer_model,
)

_NAMES = {"features", "encoded", "joint", "ctc"}


def _fill(model: Any) -> dict[str, list[int]]:
    state = {n: x for n, x in model.state_dict().items() if not n.startswith("preprocessor.")}
    shapes = {name: list(value.shape) for name, value in state.items()}
    model.load_state_dict({**model.state_dict(), **formulas(shapes)})
    return shapes


def _record(shapes: dict[str, list[int]], lengths: torch.Tensor, **outputs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"shapes": shapes, "lengths": lengths.tolist()}
    for name, value in outputs.items():
        if name in _NAMES:
            step = 20 if name == "features" else 4
            value = encoded_values(stored(torch.tensor(value.numpy()), step))
        found[name] = value
    return found


@torch.no_grad()
def nemo_values(kind: str, encoder: dict[str, Any], folder: str) -> dict[str, Any]:
    import nemo.collections.asr.models as models
    from omegaconf import OmegaConf

    config = nemo_config(kind, **encoder)
    config["tokenizer"]["dir"] = folder
    cls = getattr(models, config.pop("target").rpartition(".")[2])
    model = cls(OmegaConf.create(config)).eval()
    shapes = _fill(model)
    waves = audio()
    lengths = torch.tensor([len(wave) for wave in waves])
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in waves], batch_first=True)
    features, frames = model.preprocessor(input_signal=padded, length=lengths)
    encoded, count = model.encoder(audio_signal=features, length=frames)
    outputs: dict[str, Any] = {
        "features": features.transpose(1, 2),
        "encoded": encoded.transpose(1, 2),
    }
    if kind in ("ctc", "hybrid"):
        head = model.decoder if kind == "ctc" else model.ctc_decoder
        outputs["ctc"] = head(encoder_output=encoded)
    if kind != "ctc":
        targets = torch.tensor(TARGETS)
        predicted = model.decoder(targets=targets, target_length=torch.tensor([4, 2, 3]))[0]
        joint = model.joint(encoder_outputs=encoded, decoder_outputs=predicted)
        outputs["joint"] = joint
        found = model.decoding.rnnt_decoder_predictions_tensor(
            encoded, count, return_hypotheses=True
        )
        outputs["tokens"] = [[int(token) for token in one.y_sequence] for one in found]
    return _record(shapes, count, **outputs)


@torch.no_grad()
def transformers_values(name: str) -> dict[str, Any]:
    import transformers

    encoder = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "subsampling_conv_channels": 8,
    }
    sizes: dict[str, Any] = {"vocab_size": SYMBOLS + 1, "encoder_config": encoder}
    kind = name.removeprefix("transformers_").upper()
    if kind == "CTC":
        sizes["pad_token_id"] = SYMBOLS
    else:
        sizes |= {"blank_token_id": SYMBOLS, "pad_token_id": 2, "decoder_hidden_size": 24}
    if kind == "TDT":
        sizes["durations"] = DURATIONS
    config = getattr(transformers, f"Parakeet{kind}Config")(**sizes)
    model = getattr(transformers, f"ParakeetFor{kind}")(config).eval()
    shapes = _fill(model)
    extractor = transformers.ParakeetFeatureExtractor(feature_size=80)
    inputs = extractor(audio(), sampling_rate=16000, return_tensors="pt")
    features, mask = inputs.input_features, inputs.attention_mask
    encoded = model.encoder(features, mask)
    lengths = encoded.attention_mask.sum(1)
    outputs: dict[str, Any] = {"features": features, "encoded": encoded.last_hidden_state}
    if kind == "CTC":
        outputs["ctc"] = model(features, mask).logits.log_softmax(-1)
    else:
        inputs = torch.cat((torch.full((3, 1), SYMBOLS), torch.tensor(TARGETS)), 1)
        outputs["joint"] = model(features, mask, decoder_input_ids=inputs).logits
        outputs["tokens"] = []
        for wave in audio():
            alone = extractor([wave], sampling_rate=16000, return_tensors="pt")
            found = model.generate(
                alone.input_features,
                attention_mask=alone.attention_mask,
                decoder_start_token_id=SYMBOLS,
                max_length=1000,
            )
            tokens = found.sequences[0].tolist()
            outputs["tokens"].append([token for token in tokens if token != SYMBOLS])
    record = _record(shapes, lengths, **outputs)
    return {**record, "config": {"model_type": config.model_type, **sizes}}


def computed_values() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = tokenizer_model()
        (Path(folder) / "tokenizer.model").write_bytes(model)
        import sentencepiece

        pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        names = [pieces.id_to_piece(i) for i in range(1, SYMBOLS)]
        (Path(folder) / "vocab.txt").write_text("\n".join(names))
        found = {name: nemo_values(*model, folder) for name, model in NEMO.items()}
    return found | {name: transformers_values(name) for name in TRANSFORMERS}
