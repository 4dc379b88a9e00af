"""The torch file has the whole model; other files are errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pruned_rnnt import load
from pruned_rnnt.cli import main
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.export.model_file import ModelFile, load_model, save_model
from pruned_rnnt.export.onnx_folder import OnnxOptions, encoder_graph
from pruned_rnnt.export.torch_folder import export_torch
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import SegmentConfig
from tests.pretrained.saved_models import save_run
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))


def make_model(vocab_size: int, **changes: object) -> TransducerModel:
    return tiny_model(
        tiny_conformer(**{"left_chunks": None, "chunk_size": 16, **changes}),
        vocab_size,
        hat=True,
        kind="full",
        ctc_scale=0.0,
    )


@pytest.mark.parametrize("kind", ["conformer", "zipformer"])
def test_round_trip(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    size = len(tokenizer)
    if kind == "conformer":
        model = make_model(size, causal=True)
    else:
        predictor = LstmPredictorConfig(dim=8)
        model = tiny_model(tiny_zipformer(causal=True), size, predictor=predictor)
    save_model(ModelFile(model, tokenizer), tmp_path / "model.pt", "test")
    loaded, symbols, *_ = load_model(tmp_path)
    assert loaded.config == model.config
    assert loaded.loss_config == model.loss_config
    assert symbols.symbols == tokenizer.symbols
    assert not loaded.training
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.slow
def test_recurrent_predictor_has_no_decoder_program(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=len(tokenizer), predictor=LstmPredictorConfig(dim=8))
    export_torch(ModelFile(model, tokenizer), tmp_path, OnnxOptions(), "test")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["encoder.pt2", "joiner.pt2", "model.pt"]


def test_fastconformer_has_no_programs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As the refusal of ONNX files advises."""
    model = tiny_model(tiny_fastconformer(), len(tokenizer))
    with pytest.raises(ExportError, match="use --format torch"):
        encoder_graph(model, OnnxOptions())
    export_torch(ModelFile(model, tokenizer), tmp_path, OnnxOptions(), "test")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert load(tmp_path).model.config == model.config
    with pytest.raises(ExportError, match="leave out --streaming"):
        export_torch(ModelFile(model, tokenizer), tmp_path, OnnxOptions(streaming=True), "test")


@pytest.mark.usefixtures("without_programs")
@pytest.mark.slow
def test_chunks_of_a_streaming_export_are_those_of_its_model(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", make_model(len(tokenizer), causal=True), tokenizer)
    command = ["export", str(run), "--format", "torch", "--streaming", "--chunk", "4", "--left"]
    assert main([*command, "6"]) != 0
    assert "--left is 6, but --format torch needs a multiple of the chunk of 4" in (
        capsys.readouterr().err
    )
    assert main([*command, "8"]) == 0
    folder = run / "export/torch-streaming"
    assert "4 encoder frames with 8 frames of left context" in (folder / "README.md").read_text()
    for settings, chunk, left in (
        ([], 4, 8),
        (["decode.left=4"], 4, 4),
        (["decode.chunk=2", "decode.left=2"], 2, 2),
        (["decode.chunk=16"], 16, 64),  # those of training
    ):
        recogniser = load(folder, settings=settings)
        assert recogniser.model.encoder.chunking == (chunk, left // chunk)
        recogniser.stream()
        assert list(recogniser._stream_groups) == [(chunk, left)]
    assert load(folder, settings=["decode.chunk=-1"]).model.encoder.chunking == (-1, 0)


def test_unusable_files_are_errors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(len(tokenizer))
    good = tmp_path / "good.pt"
    save_model(ModelFile(model, tokenizer), good, "test")
    values = torch.load(good, weights_only=True)

    def written(name: str, **changes: object) -> Path:
        torch.save({**values, **changes}, tmp_path / name)
        return tmp_path / name

    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes(good.read_bytes()[:-500])
    other = {"model": {"encoder": {"dimension": 3}}, "loss": {}}
    state = dict(values["state"])
    state.pop("predictor.embedding.weight")
    broken = {name: value * float("nan") for name, value in values["state"].items()}
    for path, message in (
        (tmp_path / "absent.pt", "no model at"),
        (tmp_path / "folder", "no model at"),
        (truncated, "truncated or damaged"),
        (
            written("checkpoint.pt", format="pruned_rnnt checkpoint"),
            "not an exported model but pruned_rnnt checkpoint",
        ),
        (written("newer.pt", version=99), "version 99"),
        (written("sizes.pt", stream_sizes=[4]), "damaged: its tokenizer, calibration or stream_"),
        (written("nan.pt", state=broken), "cannot be used: parameter .* has NaN values"),
        (written("code.pt", source=Path("x")), "refused: it holds an object of pathlib"),
        (written("config.pt", config=other), "architecture that this version of pruned_rnnt"),
        (written("state.pt", state=state), "architecture that this version of pruned_rnnt"),
    ):
        with pytest.raises(ExportError, match=message) as error:
            load_model(path)
        assert len(str(error.value).splitlines()) == 1


def test_tokens_of_another_model_are_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="do not come from the same run"):
        save_model(
            ModelFile(make_model(len(tokenizer) + 1), tokenizer), tmp_path / "model.pt", "test"
        )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, OnnxOptions(streaming=True), "not causal"),
        ({}, OnnxOptions(left=4), "need --streaming"),
        ({"causal": True}, OnnxOptions(streaming=True, left=-1), "--left is -1, needs"),
        ({"causal": True, "left_chunks": 0}, OnnxOptions(streaming=True), "at least 1"),
    ],
)
def test_impossible_streaming_sizes_are_errors(
    changes: dict[str, object], options: OnnxOptions, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        encoder_graph(make_model(9, **changes), options)


def test_default_sizes_are_those_of_training() -> None:
    model = make_model(9, causal=True, chunk_size=6, left_chunks=3)
    graph = encoder_graph(model, OnnxOptions(streaming=True))
    assert graph.inputs[0].shape == (2, 27, 80)
    assert graph.inputs[1].shape == (1, 18, 2, 16)
    assert graph.inputs[2].shape == (1, 2, 2, 16)


def test_very_short_audio_is_transcribed(tokenizer: Tokenizer) -> None:
    recogniser = Recogniser(make_model(len(tokenizer)), tokenizer)
    assert isinstance(recogniser.transcribe_features(torch.zeros(1, 80)).text, str)


@pytest.mark.slow
def test_segments_are_as_long_as_training_utterances(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(len(tokenizer))
    level_T = 2 * torch.sin(2 * torch.pi * 4 * torch.arange(6000) / 100)
    long = level_T[:, None] + torch.randn(6000, 80)
    for p99_duration, frames in ((4.0, 500), (90.0, 3000), (None, 3000)):
        save_model(ModelFile(model, tokenizer, p99_duration), tmp_path / "model.pt", "test")
        assert _longest_segment(load(tmp_path), long) == frames
    recogniser = load(tmp_path, segments=SegmentConfig(window=2.0))
    assert _longest_segment(recogniser, long) == 200


def _longest_segment(recogniser: Recogniser, features_TF: torch.Tensor) -> int:
    """Frames of the longest input of the encoder."""
    seen = []
    recogniser.model.encoder.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].size(1))
    )
    recogniser.transcribe_features(features_TF)
    return max(seen)
