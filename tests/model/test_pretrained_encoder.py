"""Encoders of the transformers library: equal to its modules, whatever the batch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import sample_rows
from pruned_rnnt.model.encoder_kinds import build_encoder, stream_encoder
from pruned_rnnt.model.transformers_encoder import (
    TransformersEncoder,
    WhisperEncoder,
    whisper_features,
)
from pruned_rnnt.model.transformers_model import TransformersConfig, with_settings
from tests.model.tiny_pretrained import MODELS, library_settings, saved_model, tiny_pretrained
from tests.tiny_models import tiny_model

# Importing transformers takes seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]
WAVEFORM = [name for name in MODELS if name != "whisper"]


def made(name: str, **changes: Any) -> TransformersEncoder:
    torch.manual_seed(0)
    encoder = build_encoder(tiny_pretrained(name, **changes))
    assert isinstance(encoder, TransformersEncoder)
    return encoder.eval()


def speech(frames: int, seed: int = 0) -> np.ndarray:
    """Samples that are neither centred nor of variance 1, and louder towards their end."""
    rng = np.random.default_rng(seed)
    samples = rng.normal(0.02, 0.1, frames * 160) * np.linspace(0.5, 1.5, frames * 160)
    return samples.astype(np.float32)


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    """Utterances of these frames; what lies beyond them is loud, and must not matter."""
    rows = [sample_rows(speech(frames, seed=n)) for n, frames in enumerate(lengths)]
    features_NTF = torch.full((len(rows), max(lengths), 160), 3.0)
    for row_TF, found_TF in zip(features_NTF, rows, strict=True):
        row_TF[: len(found_TF)] = found_TF
    return features_NTF, torch.tensor(lengths)


@pytest.mark.parametrize("name", WAVEFORM)
def test_frames_are_those_of_the_librarys_module_for_the_utterance_alone(name: str) -> None:
    import transformers

    encoder = made(name)
    samples = speech(61)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    values = extractor(samples, sampling_rate=16000, return_tensors="pt").input_values
    reference = transformers.AutoModel.from_config(library_settings(name)).eval()
    reference.load_state_dict(encoder.network.state_dict())
    with torch.no_grad():
        hidden_NLH = reference(values).last_hidden_state
        encoded_NTE, lengths = encoder(sample_rows(samples)[None], torch.tensor([61]))
    pairs = hidden_NLH.size(1) // 2
    expected = encoder.projection(hidden_NLH[:, : 2 * pairs].reshape(1, pairs, -1))
    assert lengths.tolist() == [pairs]
    torch.testing.assert_close(encoded_NTE, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("frames", [200, 60])
def test_whispers_frames_are_those_of_its_module_with_as_many_positions(frames: int) -> None:
    import transformers

    encoder = made("whisper")
    count = frames // 2
    reference = transformers.AutoModel.from_config(
        library_settings("whisper", max_source_positions=count)
    ).get_encoder()
    state = encoder.network.state_dict()
    state["embed_positions.weight"] = state["embed_positions.weight"][:count]
    reference.load_state_dict(state)
    extractor = transformers.WhisperFeatureExtractor(20)
    samples = speech(frames)
    found = extractor(samples, sampling_rate=16000, return_tensors="pt").input_features
    features = found[:, :, :frames]
    pairs = count // 2
    with torch.no_grad():
        ours, lengths = encoder(sample_rows(samples)[None], torch.tensor([frames]))
        hidden_NLH = reference.eval()(features).last_hidden_state
        expected = encoder.projection(hidden_NLH[:, : 2 * pairs].reshape(1, pairs, -1))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    assert ours.size(1) == int(lengths) == pairs


def test_whispers_features_are_those_of_its_extractor() -> None:
    import transformers

    extractor = transformers.WhisperFeatureExtractor(80)
    lengths = [300, 123]
    utterances = [speech(frames, seed=n) for n, frames in enumerate(lengths)]
    found = extractor(utterances, sampling_rate=16000, return_tensors="pt").input_features
    samples_NS = torch.zeros(2, 300 * 160)
    for row_S, samples in zip(samples_NS, utterances, strict=True):
        row_S[: len(samples)] = torch.from_numpy(samples)
    ours_NFT = whisper_features(samples_NS, torch.tensor(lengths), 80)
    for n, frames in enumerate(lengths):
        torch.testing.assert_close(
            ours_NFT[n, :, :frames], found[n, :, :frames], atol=1e-5, rtol=1e-4
        )
        assert not ours_NFT[n, :, frames:].any()


@pytest.mark.parametrize("name", MODELS)
def test_an_utterance_does_not_depend_on_its_batch(name: str) -> None:
    encoder = made(name)
    lengths = [120, 93, 44, 7, 2]
    features_NTF, lengths_N = batch(*lengths)
    with torch.no_grad():
        together_NTE, found_N = encoder(features_NTF, lengths_N)
        assert bool(together_NTE.isfinite().all())
        for n, frames in enumerate(lengths):
            if frames < encoder.receptive_field:
                assert int(found_N[n]) == 0
                continue
            alone_NTE, alone_N = encoder(features_NTF[n : n + 1, :frames], torch.tensor([frames]))
            assert alone_N.tolist() == [int(found_N[n])] == [alone_NTE.size(1)]
            torch.testing.assert_close(
                together_NTE[n, : int(found_N[n])], alone_NTE[0], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frames", range(7, 24))
def test_the_number_of_frames_is_that_which_the_base_class_promises(name: str, frames: int) -> None:
    encoder = made(name)
    features_NTF, lengths_N = batch(frames)
    encoded_NTE, found_N = encoder(features_NTF, lengths_N)
    expected = (frames - encoder.receptive_field) // 4 + 1
    assert encoded_NTE.shape == (1, expected, 12)
    assert found_N.tolist() == [expected]
    assert encoder.output_lengths(lengths_N).tolist() == [expected]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frozen", ["none", "convolutions", "all"])
def test_frozen_parts_get_no_gradient(name: str, frozen: Any) -> None:
    encoder = made(name, frozen=frozen).train()
    encoded_NTE, _ = encoder(*batch(150, 130))
    encoded_NTE.square().sum().backward()
    below = [f"network.{x}" for x in ("feature_extractor.", "conv1.", "conv2.")]
    seen = set()
    for key, parameter in encoder.named_parameters():
        is_below = key.startswith(tuple(below))
        is_frozen = key.startswith("network.") and (
            frozen == "all" or (is_below and frozen == "convolutions")
        )
        seen.add(is_frozen)
        # Whisper's positions are constants. The embedding of masks has none without a mask.
        if is_frozen or "embed_positions" in key:
            assert parameter.grad is None, key
            assert not parameter.requires_grad, key
        elif "masked_spec_embed" not in key and "layers." not in key:  # layerdrop
            assert parameter.grad is not None, key
            assert bool(parameter.grad.isfinite().all()), key
    assert seen == ({False} if frozen == "none" else {False, True})


@pytest.mark.parametrize("name", ["wav2vec2-layer", "whisper"])
def test_a_frozen_encoder_has_no_dropout_in_training(name: str) -> None:
    features = batch(90, 70)
    frozen = made(name, frozen="all").train()
    trained = made(name, frozen="none").train()
    with torch.no_grad():
        torch.testing.assert_close(frozen(*features)[0], frozen(*features)[0], atol=0, rtol=0)
        if name != "whisper":  # whose settings have none
            assert not torch.equal(trained(*features)[0], trained(*features)[0])


def test_a_batch_shorter_than_a_mask_trains() -> None:
    encoder = made("wav2vec2-group").train()
    encoded_NTE, _ = encoder(*batch(15, 9))  # masks have 10 frames of 20 ms
    assert bool(encoded_NTE.isfinite().all())


def test_a_model_with_this_encoder_has_finite_losses_and_gradients() -> None:
    model = tiny_model(tiny_pretrained("wav2vec2-layer", frozen="none"), kind="full").train()
    features_NTF, lengths_N = batch(120, 80)
    targets_NU = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    losses = model(features_NTF, lengths_N, targets_NU, torch.tensor([3, 2]), step=0)
    losses.objective.backward()
    first = model.encoder.network.feature_extractor.conv_layers[0].conv.weight
    assert bool(losses.total.isfinite().all())
    assert float(first.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", ["wav2vec2-group", "wavlm-layer", "whisper"])
def test_a_folder_gives_settings_and_parameters(name: str, tmp_path: Any) -> None:
    reference = saved_model(name, tmp_path)
    config = with_settings(TransformersConfig(name_or_folder=str(tmp_path)))
    assert config.normalise is (name != "whisper")
    assert json.loads(config.settings)["model_type"] == name.partition("-")[0]
    encoder = build_encoder(config)
    assert isinstance(encoder, TransformersEncoder)
    encoder.load_pretrained()
    part = reference.get_encoder() if isinstance(encoder, WhisperEncoder) else reference
    found = encoder.network.state_dict()
    assert found.keys() == part.state_dict().keys()
    for key, value in part.state_dict().items():
        torch.testing.assert_close(found[key], value, atol=0, rtol=0)
    # All is read: the folder may go.
    assert with_settings(config) is config


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_in_half_precision_gives_float32(
    name: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    half = saved_model(name, tmp_path).to(dtype)
    half.save_pretrained(tmp_path)
    encoder = build_encoder(with_settings(TransformersConfig(name_or_folder=str(tmp_path))))
    assert isinstance(encoder, TransformersEncoder)
    encoder.load_pretrained()
    part = half.get_encoder() if isinstance(encoder, WhisperEncoder) else half
    found = encoder.state_dict()
    assert {value.dtype for value in found.values()} == {torch.float32}
    for key, value in part.state_dict().items():
        torch.testing.assert_close(found[f"network.{key}"], value.float(), atol=0, rtol=0)
    assert encoder(*batch(90, 70))[0].dtype == torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_passes_give_no_warnings(name: str, recwarn: pytest.WarningsRecorder) -> None:
    made(name)(*batch(90, 70))
    assert not [str(each.message) for each in recwarn]


def test_a_model_that_was_fine_tuned_for_ctc_can_be_read(tmp_path: Any) -> None:
    import transformers

    reference = transformers.Wav2Vec2ForCTC(library_settings("wav2vec2-layer", vocab_size=9))
    reference.save_pretrained(tmp_path)
    config = with_settings(TransformersConfig(name_or_folder=str(tmp_path), normalise=False))
    encoder = build_encoder(config)
    assert isinstance(encoder, TransformersEncoder)
    encoder.load_pretrained()
    for key, value in reference.wav2vec2.state_dict().items():
        torch.testing.assert_close(encoder.network.state_dict()[key], value, atol=0, rtol=0)


class TestRefusals:
    def test_parameters_of_another_model(self, tmp_path: Any) -> None:
        saved_model("wav2vec2-group", tmp_path)
        config = with_settings(TransformersConfig(name_or_folder=str(tmp_path)))
        values = {**json.loads(config.settings), "num_hidden_layers": 3}
        larger = TransformersConfig(name_or_folder=str(tmp_path), settings=json.dumps(values))
        encoder = build_encoder(larger)
        assert isinstance(encoder, TransformersEncoder)
        with pytest.raises(ValueError, match=r"lacks parameters .*layers\.2"):
            encoder.load_pretrained()

    def test_no_preprocessor(self, tmp_path: Any) -> None:
        saved_model("wav2vec2-group", tmp_path)
        (tmp_path / "preprocessor_config.json").unlink()
        with pytest.raises(ValueError, match=r"set model\.encoder\.normalise"):
            with_settings(TransformersConfig(name_or_folder=str(tmp_path)))

    def test_a_folder_without_a_model(self, tmp_path: Any) -> None:
        with pytest.raises(ValueError, match=r"model\.encoder\.name_or_folder is"):
            with_settings(TransformersConfig(name_or_folder=str(tmp_path)))

    def test_other_types(self) -> None:
        import transformers

        text = transformers.AutoConfig.for_model("bert").to_json_string()
        with pytest.raises(ValueError, match=r"model_type 'bert', needs one of wav2vec2"):
            build_encoder(TransformersConfig(settings=text))

    @pytest.mark.parametrize("text", ["{", "[]", "3"])
    def test_settings_that_are_no_json_object(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"model\.encoder\.settings"):
            build_encoder(TransformersConfig(settings=text))

    def test_nothing_named(self) -> None:
        with pytest.raises(ValueError, match=r"name_or_folder is empty"):
            with_settings(TransformersConfig())
        with pytest.raises(ValueError, match=r"model\.encoder\.settings is empty"):
            build_encoder(TransformersConfig())

    def test_an_adapter_of_the_library(self) -> None:
        text = library_settings("wav2vec2-layer", add_adapter=True).to_json_string()
        with pytest.raises(ValueError, match="add_adapter"):
            build_encoder(TransformersConfig(settings=text))

    def test_other_frame_rates(self) -> None:
        strides = {"conv_stride": (5, 2, 2, 2, 2, 2, 3)}
        text = library_settings("wav2vec2-layer", **strides).to_json_string()
        with pytest.raises(ValueError, match="a frame every 480 samples"):
            build_encoder(TransformersConfig(settings=text))

    def test_more_than_whispers_window(self) -> None:
        with pytest.raises(ValueError, match=r"data\.filters\.max_duration=2"):
            made("whisper")(*batch(201))

    def test_less_than_a_frame(self) -> None:
        with pytest.raises(ValueError, match="needs at least 5"):
            made("wav2vec2-group")(*batch(4))

    def test_streams(self) -> None:
        with pytest.raises(ValueError, match="not causal"):
            stream_encoder(made("wav2vec2-group"), 4, 8)

    @pytest.mark.parametrize(
        "change",
        [{"num_mel_bins": 80}, {"causal": True}, {"rate": 0.0}, {"layer_decay": 1.5}, {"dim": 0}],
    )
    def test_settings(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=rf"model\.encoder\.{next(iter(change))}"):
            TransformersConfig(**change)

    def test_the_package_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'pruned_rnnt\[transformers\]'"):
            build_encoder(tiny_config_without_the_library())


def tiny_config_without_the_library() -> TransformersConfig:
    return TransformersConfig(settings='{"model_type": "wav2vec2"}')


@pytest.mark.parametrize("bins", [80, 320])
def test_features_of_another_width_are_errors(bins: int) -> None:
    message = rf"features has shape \(2, 100, {bins}\), needs \(N, T, 160\)"
    with pytest.raises(ValueError, match=message):
        made("wav2vec2-group")(torch.zeros(2, 100, bins), torch.tensor([100, 90]))


def test_the_group_norm_is_saved_once_and_earlier_states_load() -> None:
    encoder = made("wav2vec2-group")
    state = encoder.state_dict()
    assert not [name for name in state if name.startswith("_norm.")]
    norm = "network.feature_extractor.conv_layers.0.layer_norm"
    for name in ("weight", "bias"):
        state[f"_norm.{name}"] = state[f"{norm}.{name}"]
    encoder.load_state_dict(state)
    torch.nn.Sequential(encoder).load_state_dict({f"0.{name}": v for name, v in state.items()})
