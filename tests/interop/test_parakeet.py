"""Models of NeMo and transformers: the same outputs and texts, finite losses, and refusals.

The expected values are those of nemo_toolkit 3.0.0 and transformers 5.24.0: parakeet_models.py.

Axes: N batch, T encoder frames, U symbols, V outputs.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import yaml
from torch import Tensor

from pruned_rnnt.data.audio.features import nemo_features, nemo_frame_count
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.interop.nemo.exported_model import archive_differences, export_model
from pruned_rnnt.interop.nemo.files import read_safetensors, write_safetensors
from pruned_rnnt.interop.nemo.imported_model import ImportedModel, import_model, read_run
from pruned_rnnt.interop.nemo.symbols import symbols_of_json, tokenizer_json_of
from pruned_rnnt.interop.nemo.topology import nemo_topology
from pruned_rnnt.model.feature_norm import centre_features
from pruned_rnnt.model.speech_model import TransducerModel, ctc_log_probs
from tests.interop.parakeet_models import (
    NEMO,
    SYMBOLS,
    TARGETS,
    TRANSFORMERS,
    VALUES,
    audio,
    decoded_values,
    formulas,
    nemo_config,
    stored,
    tokenizer_model,
    write_nemo,
)
from tests.tiny_models import tiny_conformer, tiny_model

EXPECTED: dict[str, Any] = json.loads(VALUES.read_text())
CPU = torch.device("cpu")
# Our id of each of their symbols, and of the blank.
OURS = torch.tensor([2, *range(3, SYMBOLS + 2), 0])


def tokenizer_json() -> bytes:
    vocab = {"<unk>": 0, **{f"▁{chr(96 + i)}": i for i in range(1, SYMBOLS)}}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    blank = {"id": SYMBOLS, "content": "<pad>", "special": True}
    return json.dumps({"model": model, "added_tokens": [blank]}).encode()


def written(name: str, folder: Path, **changes: Any) -> Path:
    """The model's archive or folder, with other settings of the configuration."""
    state = formulas(EXPECTED[name]["shapes"])
    if name in NEMO:
        kind, encoder = NEMO[name]
        config = nemo_config(kind, **encoder)
        for key, value in changes.items():
            section, _, inner = key.partition("__")
            config = {**config, section: {**config[section], inner: value} if inner else value}
        write_nemo(folder / "model.nemo", config, state, tokenizer_model())
        return folder / "model.nemo"
    (folder / "config.json").write_text(json.dumps({**EXPECTED[name]["config"], **changes}))
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    write_safetensors(folder / "model.safetensors", state)
    return folder


def encoded(imported: ImportedModel) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        features, lengths = nemo_features(audio(), CPU, 80)
        return features, *imported.model.encode(features, lengths)


def close(actual: Tensor, text: str, step: int = 4, tolerance: float = 1e-3) -> None:
    """Within rounding, which differs between processors: that of the features is amplified, in
    float64 models too, to up to 4.5e-4."""
    actual = stored(actual.detach(), step)
    expected = decoded_values(text, *actual.shape)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=tolerance)


@pytest.mark.parametrize("name", [*NEMO, *TRANSFORMERS])
def test_outputs_and_texts_are_the_same(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    imported = import_model(written(name, tmp_path))
    model = imported.model
    features, encoded_NTE, lengths = encoded(imported)
    assert lengths.tolist() == expected["lengths"]
    frames = nemo_frame_count(len(audio()[0]))
    kind = model.encoder.config.feature_norm  # type: ignore[attr-defined]
    normed = centre_features(features, torch.tensor([frames] * 3), kind)
    wanted = _until(expected["features"], frames, 20, 80)
    close(normed[:, :frames], wanted, 20, tolerance=1e-4)
    close(encoded_NTE, expected["encoded"])
    if "ctc" in expected:
        log_probs = ctc_log_probs(model, encoded_NTE)
        close(log_probs[..., OURS], expected["ctc"])
        assert float(log_probs.detach()[..., 1].exp().max()) == 0
    if "joint" not in expected:
        return
    assert isinstance(model, TransducerModel)
    predicted = model.predictor.forward_targets(OURS[torch.tensor(TARGETS)])
    nodes = model.joiner.encoder_proj(encoded_NTE), model.joiner.decoder_proj(predicted)
    nodes = nodes[0][:, :, None], nodes[1][:, None]
    if model.loss_config.durations:
        tokens, durations = model.joiner.with_durations(*nodes)
        joint = torch.cat((tokens[..., OURS], durations), -1)
    else:
        joint = model.joiner(*nodes)[..., OURS]
    if name in NEMO:  # on a CPU, its joint normalises, also with durations
        joint = joint.log_softmax(-1)
    close(joint, expected["joint"])
    with torch.no_grad():
        found = new_greedy_search(model, max_symbols_per_frame=10)(encoded_NTE, lengths)
    theirs = {int(ours): index for index, ours in enumerate(OURS)}
    assert [[theirs[s] for s in one.symbols] for one in found] == expected["tokens"]
    assert sum(map(len, expected["tokens"])) > 5


def _until(text: str, frames: int, step: int, width: int) -> str:
    """The stored values of the first frames; there is padding behind them."""
    from tests.interop.parakeet_models import encoded_values

    values = decoded_values(text, -1, width)
    return encoded_values(values[: -(-frames // step)])


@pytest.mark.parametrize("name", ["nemo_rnnt", "nemo_tdt", "nemo_ctc"])
def test_texts_of_recordings(name: str, tmp_path: Path) -> None:
    imported = import_model(written(name, tmp_path))
    texts = imported.texts(audio())
    assert [imported.texts([wave])[0] for wave in audio()] == texts
    if name != "nemo_ctc":
        pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model())
        expected = pieces.decode([[t for t in x if t] for x in EXPECTED[name]["tokens"]])
        assert [text.replace("<unk>", "").split() for text in texts] == [
            x.split() for x in expected
        ]
    assert imported.texts([]) == []


@pytest.mark.parametrize("name", ["nemo_rnnt", "nemo_tdt", "transformers_tdt"])
def test_loss_is_that_of_the_outputs(name: str, tmp_path: Path) -> None:
    imported = import_model(written(name, tmp_path))
    model = imported.model
    features, lengths = nemo_features(audio(), CPU, 80)
    targets, target_lengths = OURS[torch.tensor(TARGETS)].int(), torch.tensor([4, 2, 3])
    losses = model(features, lengths, targets, target_lengths, step=0)
    losses.objective.backward()
    assert losses.total.isfinite().all()
    bias = model.joiner.output_linear.bias.grad  # type: ignore[union-attr]
    assert float(bias[1]) == 0  # type: ignore[index, arg-type]
    assert float(bias[0]) != 0  # type: ignore[index, arg-type]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nemo_rnnt", {"target": "a.EncDecMultiTaskModel"}, "target is 'EncDecMultiTaskModel'"),
        ("nemo_rnnt", {"encoder__subsampling": "striding"}, "encoder.subsampling is 'striding'"),
        ("nemo_rnnt", {"encoder__subsampling_factor": 4}, "encoder.subsampling_factor is 4"),
        ("nemo_rnnt", {"encoder__self_attention_model": "abs_pos"}, "self_attention_model"),
        ("nemo_rnnt", {"encoder__global_tokens": 1}, "encoder.global_tokens is 1"),
        ("nemo_rnnt", {"encoder__att_context_size": [4, -1]}, "att_context_size"),
        ("nemo_rnnt", {"encoder__att_context_style": "chunked_limited"}, "conv_context_size None"),
        ("nemo_rnnt", {"encoder__d_model": 48}, "does not fit"),
        ("nemo_rnnt", {"preprocessor__normalize": "all_features"}, "preprocessor.normalize"),
        ("nemo_rnnt", {"preprocessor__n_fft": 1024}, "preprocessor.n_fft is 1024"),
        ("nemo_rnnt", {"preprocessor__window_size": 0.02}, "preprocessor.window_size is 0.02"),
        ("nemo_rnnt", {"preprocessor": {}}, "preprocessor.window_size is 0.02"),
        ("nemo_rnnt", {"preprocessor___target_": "a.AudioToMFCCPreprocessor"}, "_target_ is a.Au"),
        ("nemo_rnnt", {"sample_rate": 8000}, "model_config.sample_rate is 8000"),
        ("nemo_rnnt", {"preprocessor__n_window_size": 320}, "preprocessor.n_window_size is 320"),
        ("nemo_rnnt", {"preprocessor__mel_norm": None}, "preprocessor.mel_norm is None"),
        ("nemo_rnnt", {"encoder__d_model": None}, "encoder.d_model is None; it must be an integer"),
        ("nemo_rnnt", {"encoder__dropout": "x"}, "encoder.dropout is 'x'; it must be a number"),
        ("nemo_rnnt", {"encoder__att_context_size": "x"}, "encoder.att_context_size is 'x'"),
        ("nemo_rnnt", {"encoder__att_context_size": [[1, 2, 3]]}, "it must be two integers"),
        (
            "nemo_rnnt",
            {"decoder__prednet": {"pred_hidden": "${model_defaults.pred_hidden}"}},
            r"decoder.prednet.pred_hidden is '\$\{model_defaults.pred_hidden\}'; it must be an",
        ),
        ("nemo_rnnt", {"loss": ["a"]}, r"loss is \['a'\]; it must be a mapping"),
        ("nemo_tdt", {"loss__tdt_kwargs": 3}, "loss.tdt_kwargs is 3; it must be a mapping"),
        ("nemo_tdt", {"loss__tdt_kwargs": {"durations": 3}}, "durations is 3; it must be a list"),
        ("nemo_tdt", {"loss__loss_name": "pruned_rnnt"}, "'pruned_rnnt' with joint.num_extra"),
        ("nemo_rnnt", {"joint__num_extra_outputs": 2}, "num_extra_outputs 2"),
        ("nemo_rnnt", {"decoder__normalization_mode": "layer"}, "decoder.normalization_mode"),
        ("nemo_rnnt", {"loss": {"loss_name": "multiblank_rnnt"}}, "'multiblank_rnnt'"),
        ("nemo_tdt", {"loss": {"loss_name": "tdt"}}, "loss.tdt_kwargs.durations"),
        ("transformers_rnnt", {"model_type": "lasr_ctc"}, "model_type is 'lasr_ctc'"),
        ("transformers_rnnt", {"hidden_act": "gelu"}, "config.hidden_act is 'gelu'"),
        ("transformers_rnnt", {"blank_token_id": 3}, "the id of the blank is 3"),
        ("transformers_rnnt", {"decoder_hidden_size": "a"}, "decoder_hidden_size is 'a'"),
        ("transformers_tdt", {"durations": None}, "durations is None; it must be a list"),
    ],
)
def test_other_models_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        import_model(written(name, tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_rate": 8000}, "preprocessor_config.sampling_rate is 8000; supported: 16000"),
        ({"hop_length": 256, "n_fft": 1024}, "preprocessor_config.hop_length is 256"),
        ({"feature_size": 128}, "preprocessor_config.feature_size is 128; supported: 80"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "_type is 'WhisperFeature"),
    ],
)
def test_other_features_of_folders_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = written("transformers_ctc", tmp_path)
    for name, values in (
        ("processor_config.json", {"feature_extractor": changes}),
        ("preprocessor_config.json", changes),
    ):
        (folder / name).write_text(json.dumps(values))
        with pytest.raises(ValueError, match=message):
            import_model(folder)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    folder = written("transformers_ctc", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n")
    with pytest.raises(ValueError, match="not a safetensors file: it is a pointer of Git LFS, run"):
        import_model(folder)
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors"):
        weights = weights.rename(folder / name)
        with pytest.raises(ValueError, match=rf"weights in {name}, needs .*: .*save_pretrained"):
            import_model(folder)
    # Before files are missed: no file would make this model one that is supported.
    (folder / "config.json").write_text('{"model_type": "whisper"}')
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"'whisper'; supported: .*model.encoder.name_or_folder"):
        import_model(folder)


def test_models_trained_with_our_losses_in_nemo_are_read() -> None:
    config = nemo_config("rnnt")
    assert nemo_topology(config | {"loss": {"loss_name": "pruned_rnnt"}}).loss.durations == ()
    config = nemo_config("tdt")
    kwargs = {**config["loss"]["tdt_kwargs"], "sigma": 0.02}
    loss = {"loss_name": "pruned_rnnt_tdt", "pruned_rnnt_tdt_kwargs": kwargs}
    found = nemo_topology(config | {"loss": loss}).loss
    assert (list(found.durations), found.sigma) == (kwargs["durations"], 0.02)


def test_windows_may_be_in_samples() -> None:
    config = nemo_config("rnnt")
    config["encoder"]["stochastic_depth_drop_prob"] = 0.3  # acts in training alone
    samples = {"window_size": None, "n_window_size": 400}
    changed = config | {"preprocessor": config["preprocessor"] | samples}
    assert nemo_topology(changed) == nemo_topology(config)


def archive_of(path: Path, **files: bytes) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def test_bad_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.dumps(nemo_config("rnnt")).encode()
    weights = io.BytesIO()
    torch.save({"a": _Evil()}, weights)
    files = {"model_config.yaml": config, "tokenizer.model": tokenizer_model()}
    for changed, message in (
        ({"model_config.yaml": None}, "has no model_config.yaml"),
        ({"model_config.yaml": b"a: [1"}, "model_config.yaml is no YAML file"),
        ({"model_config.yaml": b"- 1"}, "is not a mapping"),
        ({"tokenizer.model": None}, r"has 0 files \*tokenizer.model"),
        ({}, "has no model_weights.ckpt"),
        ({"model_weights.ckpt": weights.getvalue()}, "can run code"),
        ({"model_weights.ckpt": b"PK\x03\x04"}, "truncated or damaged"),
        ({"..__model_weights.ckpt": b"x"}, "has no model_weights.ckpt"),
    ):
        present = {k: v for k, v in {**files, **changed}.items() if v is not None}
        with pytest.raises(ValueError, match=message):
            import_model(archive_of(tmp_path / "bad.nemo", **present))
    (tmp_path / "text.nemo").write_text("no archive")
    with pytest.raises(ValueError, match=r"not a \.nemo archive"):
        import_model(tmp_path / "text.nemo")
    with tarfile.open(tmp_path / "link.nemo", "w") as archive:
        member = tarfile.TarInfo("model_config.yaml")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(ValueError, match=r"has no model_config\.yaml"):
        import_model(tmp_path / "link.nemo")
    assert not (tmp_path / "evil").exists()


def test_safetensors_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    write_safetensors(path, {**tensors, "c": torch.tensor(3)})
    found = read_safetensors(path)
    assert {name: x.dtype for name, x in found.items()} == {
        "a": torch.float32,
        "b": torch.bfloat16,
        "c": torch.int64,
    }
    assert all(torch.equal(found[name], x) for name, x in tensors.items())
    assert found["c"].shape == ()
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype": "BF16"', b'"dtype": "F8_E"'))
    with pytest.raises(ValueError, match="b has the dtype F8_E; supported: F64"):
        read_safetensors(path)
    for damaged in (b"", content[:20], content[:-9], content.replace(b"[2, 3]", b"[2, 9]")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            read_safetensors(path)


@pytest.mark.parametrize("name", [*NEMO, *TRANSFORMERS])
def test_exported_models_have_the_names_and_outputs_of_the_source(
    name: str, tmp_path: Path
) -> None:
    imported = import_model(written(name, tmp_path))
    path = tmp_path / ("exported.nemo" if name in NEMO else "exported")
    export_model(imported.model, imported.tokenizer, path)
    state = formulas(EXPECTED[name]["shapes"])
    if name in NEMO:
        with tarfile.open(path) as archive:
            content = archive.extractfile("model_weights.ckpt")
            assert content is not None
            found = torch.load(io.BytesIO(content.read()), weights_only=True)
        assert found.pop("preprocessor.featurizer.window").shape == (400,)
        assert found.pop("preprocessor.featurizer.fb").shape == (1, 80, 257)
        for key, value in state.items():
            torch.testing.assert_close(found[key], value)
    else:
        found = read_safetensors(path / "model.safetensors")
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in state.items()}
    again = import_model(path)
    assert again.tokenizer.symbols == imported.tokenizer.symbols
    torch.testing.assert_close(encoded(again)[1], encoded(imported)[1])
    assert again.texts(audio()) == imported.texts(audio())
    with pytest.raises(ValueError, match="exists"):
        export_model(imported.model, imported.tokenizer, path)


@pytest.mark.parametrize(
    ("name", "changes", "most"),
    [
        ("nemo_rnnt", {"decoding__greedy": {"max_symbols": 3}}, 3),
        ("nemo_tdt", {"decoding__greedy": {"max_symbols": None, "max_symbols_per_step": 4}}, 4),
        ("nemo_rnnt", {"decoding__greedy": {"max_symbols": None}}, 10),
        ("nemo_rnnt", {"decoding": None}, 10),
        ("transformers_rnnt", {"max_symbols_per_step": 2}, 2),
    ],
)
def test_symbols_per_frame_are_those_of_the_file(
    name: str, changes: dict[str, Any], most: int, tmp_path: Path
) -> None:
    imported = import_model(written(name, tmp_path, **changes))
    assert imported.max_symbols_per_frame == most
    assert imported.texts(audio()) == imported.texts(audio(), most)
    path = tmp_path / ("exported.nemo" if name in NEMO else "exported")
    export_model(imported.model, imported.tokenizer, path, max_symbols_per_frame=most)
    run = read_run(path, tmp_path / "run")
    assert run.config.decode.max_symbols_per_frame == most
    assert not list(archive_differences(run.model, run.config.decode))
    (line,) = archive_differences(run.model, DecodeConfig())
    assert "decode.max_symbols_per_frame is 0" in line


def test_models_of_one_symbol_per_frame_stay_so(tmp_path: Path) -> None:
    """NeMo's default of 10 would emit a symbol again and again."""
    imported = import_model(written("nemo_rnnt", tmp_path))
    model = imported.model
    model.loss_config = dataclasses.replace(model.loss_config, rnnt_type="modified")
    path = tmp_path / "exported.nemo"
    export_model(model, imported.tokenizer, path, max_symbols_per_frame=10)
    with tarfile.open(path) as archive:
        content = archive.extractfile("model_config.yaml")
        assert content is not None
        assert yaml.safe_load(content)["decoding"]["greedy"] == {"max_symbols": 1}
    again = import_model(path)
    assert again.model.loss_config.rnnt_type == "modified"
    assert again.texts(audio()) == imported.texts(audio(), 1)
    assert not list(archive_differences(model, DecodeConfig()))


def test_exported_symbols_encode_texts_alike(tmp_path: Path) -> None:
    imported = import_model(written("nemo_rnnt", tmp_path))
    data = tokenizer_json_of(imported.tokenizer)
    again = symbols_of_json(data).tokenizer
    for text in ("seven nine", "zero one two seventeen", "xyz one"):
        assert again.encode(text) == imported.tokenizer.encode(text)
        assert again.decode(again.encode(text)) == imported.tokenizer.decode(again.encode(text))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_exported_byte_symbols_encode_texts_alike(kind: str) -> None:
    hub = pytest.importorskip("tokenizers")
    lines = [f"word{chr(97 + i)} music größe" for i in range(20)] * 3
    config = TokenizerConfig(kind=kind, vocab_size=310, byte_fallback=True)
    tokenizer = train_tokenizer(lines, config)
    data = tokenizer_json_of(tokenizer)
    theirs = hub.Tokenizer.from_str(data.decode())
    again = symbols_of_json(data).tokenizer
    assert again.has_bytes
    for text in ("music worda", "ö 日本 x", "日", "größer über é"):
        ids = tokenizer.encode(text)
        assert 2 not in ids
        assert again.encode(text) == ids
        assert again.decode(ids) == text
        # Theirs have neither the blank nor sos/eos in front.
        assert theirs.encode(text, add_special_tokens=False).ids == [i - 2 for i in ids]
        assert theirs.decode([i - 2 for i in ids]) == text


def test_byte_symbols_must_be_complete() -> None:
    content = json.loads(tokenizer_json())
    content["model"]["byte_fallback"] = True
    assert not symbols_of_json(json.dumps(content).encode()).tokenizer.has_bytes
    vocab = content["model"]["vocab"]
    (last,) = (piece for piece, i in vocab.items() if i == SYMBOLS - 1)
    content["model"]["vocab"] = vocab | {"<0x01>": vocab.pop(last)}
    with pytest.raises(ValueError, match="no piece <0x00>; needs one for each of the 256 bytes"):
        symbols_of_json(json.dumps(content).encode())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers_rnnt", "transformers_tdt"])
def test_transformers_generates_with_exported_transducers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "source").mkdir()
    imported = import_model(written(name, tmp_path / "source"))
    export_model(imported.model, imported.tokenizer, tmp_path / "exported")
    kind = "TDT" if name.endswith("tdt") else "RNNT"
    model = getattr(transformers, f"ParakeetFor{kind}").from_pretrained(tmp_path / "exported")
    extractor = transformers.ParakeetFeatureExtractor.from_pretrained(tmp_path / "exported")
    inputs = extractor(audio(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        found = model.eval().generate(**inputs, max_length=1000).sequences.tolist()
    assert all(ids[0] == SYMBOLS for ids in found)
    assert [[i for i in ids if i != SYMBOLS] for ids in found] == EXPECTED[name]["tokens"]


@pytest.mark.parametrize("name", ["transformers_rnnt", "transformers_tdt", "transformers_ctc"])
def test_exported_folders_say_what_starts_a_text(name: str, tmp_path: Path) -> None:
    imported = import_model(written(name, tmp_path))
    export_model(imported.model, imported.tokenizer, tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["pad_token_id"] == SYMBOLS
    generation = tmp_path / "exported/generation_config.json"
    if name == "transformers_ctc":
        assert not generation.exists()
    else:
        wanted = {"decoder_start_token_id": SYMBOLS, "pad_token_id": SYMBOLS}
        wanted["eos_token_id"] = SYMBOLS + 1
        assert json.loads(generation.read_text()) == wanted


def test_paths_may_be_texts_and_archives_in_new_folders(tmp_path: Path) -> None:
    imported = import_model(str(written("nemo_rnnt", tmp_path)))
    path = tmp_path / "new/folder/mine.nemo"
    export_model(imported.model, imported.tokenizer, str(path))
    assert import_model(path).tokenizer.symbols == imported.tokenizer.symbols


def test_unusable_recordings_are_named(tmp_path: Path) -> None:
    imported = import_model(written("nemo_rnnt", tmp_path))
    wave = np.asarray(audio()[0], dtype=np.float32)
    expected = imported.texts([wave])
    assert imported.texts([torch.from_numpy(wave)]) == expected
    assert imported.texts([wave.tolist()]) == expected
    bad = np.full(5000, np.nan, dtype=np.float32)
    for samples, message in (
        ([wave, "a.wav"], r"samples\[1\] is 'a.wav', needs an array"),
        ([wave, np.zeros((100, 2), np.float32)], r"samples\[1\]: audio has the shape \(100, 2\)"),
        ([bad], r"samples\[0\]: audio has NaN"),
        ([np.zeros(0, np.float32)], r"samples\[0\]: audio has no samples"),
        (wave, r"samples is of type ndarray, needs a list"),
        ("a.wav", r"samples is of type str, needs a list"),
    ):
        with pytest.raises(ValueError, match=message):
            imported.texts(samples)  # type: ignore[arg-type]


def test_models_that_others_lack_are_not_exported(tmp_path: Path) -> None:
    for name, target, message in (
        ("nemo_causal", "folder", "model.encoder.causal is True"),
        ("nemo_window", "folder", r"model.encoder.window is \(3, 2\)"),
        ("nemo_rnnt", "folder", "model.predictor.dim is 24 and model.joiner_dim 20"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        imported = import_model(written(name, folder))
        with pytest.raises(ValueError, match=message):
            export_model(imported.model, imported.tokenizer, folder / target)
        assert not (folder / target).exists()
    same = import_model(written("transformers_rnnt", tmp_path))
    loss = dataclasses.replace(same.model.loss_config, rnnt_type="modified")
    same.model.loss_config = loss
    with pytest.raises(ValueError, match=r"loss\.rnnt_type is modified"):
        export_model(same.model, same.tokenizer, tmp_path / "folder")
    other = tiny_model(tiny_conformer())
    with pytest.raises(ValueError, match=r"model\.encoder\.kind is conformer"):
        export_model(other, imported.tokenizer, tmp_path / "a.nemo")
