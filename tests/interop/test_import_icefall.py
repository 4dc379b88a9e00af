"""A model of icefall's recipe becomes a run that decodes, and is exported bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.interop.icefall_model import import_icefall, read_icefall, to_icefall_state
from pruned_rnnt.interop.icefall_run import read_token_file
from pruned_rnnt.model.model_config import ModelConfig
from pruned_rnnt.model.predictor import LstmPredictorConfig, PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.train.run import load_model, run_config
from tests.tiny_corpus import make_corpus
from tests.tiny_models import tiny_model, zipformer_of_icefall

ENCODER = zipformer_of_icefall(causal=True)
SYMBOLS = ["<blk>", "<sos/eos>", "<unk>", "▁SO", "▁IT", "S", "ED"]


def make_model(context_size: int = 2, ctc_scale: float = 0.2, seed: int = 0) -> TransducerModel:
    predictor = PredictorConfig(dim=8, context_size=context_size)
    return tiny_model(ENCODER, len(SYMBOLS), predictor=predictor, ctc_scale=ctc_scale, seed=seed)


def write_tokens(path: Path, symbols: list[str]) -> Path:
    lines = [f"{symbol} {index}\n" for index, symbol in enumerate([*symbols, "#0", "#1"])]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.txt", SYMBOLS)


def checkpoint(path: Path, state: dict[str, Tensor]) -> Path:
    """Like epoch-N.pt, of which the average is imported."""
    other = {f"module.{name}": torch.zeros_like(value) for name, value in state.items()}
    average = {name: value.double() for name, value in state.items()}
    torch.save({"model": other, "model_avg": average, "batch_idx_train": 7}, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("context_size", "ctc_scale"), [(2, 0.2), (2, 0.0), (1, 0.2)])
def test_round_trip(context_size: int, ctc_scale: float, tmp_path: Path, tokens: Path) -> None:
    model = make_model(context_size, ctc_scale)
    theirs = to_icefall_state(model)
    path = checkpoint(tmp_path / "epoch-1.pt", theirs)
    run = tmp_path / "run"
    assert main(["import-icefall", str(path), "--tokens", str(tokens), "--output", str(run)]) == 0
    loaded = load_model(run_config(run))
    features, lengths = torch.randn(2, 90, 80) * 3 - 5, torch.tensor([90, 61])
    targets = torch.tensor([[3, 5, 4], [4, 3, 0]], dtype=torch.int32)
    with torch.inference_mode():
        expected, _ = model.encode(features, lengths)
        got, _ = loaded.model.encode(features, lengths)
        assert torch.equal(got, expected)
        torch.testing.assert_close(
            loaded.model.predictor.forward_targets(targets),
            model.predictor.forward_targets(targets),
        )
    back = to_icefall_state(loaded.model)
    assert back.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(back[name], value), name
    assert loaded.tokenizer.symbols == SYMBOLS
    assert loaded.tokenizer.decode([3, 5, 0, 4]) == "SOS IT"


def test_normalised_features_cannot_be_exported() -> None:
    config = ModelConfig(encoder=dataclasses.replace(ENCODER, feature_norm="fixed"))
    with pytest.raises(ValueError, match="feature_norm is 'fixed'"):
        to_icefall_state(TransducerModel(config, len(SYMBOLS)))


def test_names_of_the_recipe() -> None:
    theirs = to_icefall_state(make_model())
    beginnings = {name.partition(".")[0] for name in theirs}
    assert beginnings == {
        *("encoder_embed", "encoder", "decoder", "joiner"),
        *("simple_am_proj", "simple_lm_proj", "ctc_output"),
    }
    assert theirs["encoder.encoders.0.layers.0.bypass_scale"].tolist() == [0.5] * 16
    assert theirs["encoder.encoders.1.encoder.layers.0.bypass_scale"].tolist() == [0.5] * 24
    assert "decoder.conv.weight" not in to_icefall_state(make_model(context_size=1))


def test_export_writes_the_files_of_the_recipe(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = to_icefall_state(make_model())
    path = tmp_path / "pretrained.pt"
    torch.save({"model": theirs}, path)
    run = tmp_path / "a run"
    assert main(["import-icefall", str(path), "--tokens", str(tokens), "--output", str(run)]) == 0
    assert main(["export", str(run), "--format", "icefall"]) == 0
    folder = run / "export/icefall"
    shown = capsys.readouterr().out
    assert f"wrote {folder}; for icefall's scripts: --checkpoint '{folder}'/pretrained.pt" in shown
    written = torch.load(folder / "pretrained.pt", weights_only=True)
    assert written.keys() == {"model"}
    assert written["model"].keys() == theirs.keys()
    for name, value in read_icefall(folder / "pretrained.pt").items():
        assert torch.equal(value, theirs[name]), name
    assert (folder / "tokens.txt").is_file()
    assert main(["export", str(run), "--format", "icefall", "--int8"]) == EXIT_USAGE
    assert "--int8" in capsys.readouterr().err


def test_export_names_the_settings_that_the_files_do_not_hold(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = dataclasses.replace(ENCODER, position_head_dim=2, chunk_size=16)
    model = tiny_model(encoder, len(SYMBOLS), rnnt_type="modified")
    path = tmp_path / "pretrained.pt"
    torch.save({"model": to_icefall_state(model)}, path)
    settings = [
        "model.encoder.position_head_dim=2",
        "model.encoder.chunk_size=16",
        "loss.rnnt_type=modified",
    ]
    run = tmp_path / "run"
    options = ["--tokens", str(tokens), *settings]
    assert main(["import", str(path), str(run), *options]) == 0
    config = run_config(run)
    assert config.model.encoder == encoder
    assert config.loss.rnnt_type == "modified"
    assert main(["export", str(run), "--format", "icefall"]) == 0
    listed = " ".join(settings)
    assert (
        f"an import needs these settings, which the files do not hold: {listed}\n"
        in capsys.readouterr().out
    )
    assert listed in (run / "export/icefall/README.md").read_text()


@pytest.mark.parametrize("command", ["import", "import-icefall"])
@pytest.mark.slow
def test_steps_since_an_earlier_checkpoint_are_averaged(
    command: str, tmp_path: Path, tokens: Path
) -> None:
    """The later file holds an object of a class, for which it has to be trusted."""
    early, late = tmp_path / "checkpoint-3.pt", tmp_path / "checkpoint-7.pt"
    for path, step, seed in ((early, 3, 1), (late, 7, 2)):
        state = to_icefall_state(make_model(seed=seed))
        saved = {"model": state, "model_avg": state, "batch_idx_train": step}
        torch.save({**saved, "params": argparse.Namespace() if path == late else None}, path)
    run = tmp_path / "run"
    output = [str(run)] if command == "import" else ["--output", str(run)]
    options = ["--tokens", str(tokens), "--since", str(early)]
    assert main([command, str(late), *output, *options]) == EXIT_FAILED
    assert main([command, str(late), *output, *options, "--trust"]) == 0
    expected = read_icefall(late, early, trust=True)
    imported = to_icefall_state(load_model(run_config(run)).model)
    for name, value in expected.items():
        torch.testing.assert_close(imported[name], value, msg=name)


def test_parameters_that_do_not_fit_are_reported(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = to_icefall_state(make_model())
    theirs["attention_decoder.embed.weight"] = torch.zeros(3)
    del theirs["simple_am_proj.bias"]
    path = tmp_path / "pretrained.pt"
    torch.save({"model": theirs}, path)
    arguments = [str(path), "--tokens", str(tokens), "--output"]
    assert main(["import-icefall", *arguments, str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "none of these names: attention_decoder.embed.weight" in shown.err
    assert "(used only in training): pruned_loss.simple_am_proj.bias" in shown.out
    assert main(["import-icefall", *arguments, str(tmp_path / "run")]) == EXIT_FAILED
    assert "already holds a run" in capsys.readouterr().err
    wide = ["model.encoder.position_dim=50"]
    assert main(["import-icefall", *arguments, str(tmp_path / "wide"), *wide]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert "linear_pos.weight: (8, 48) there, (8, 50) here" in error
    assert (
        "give those that differ to `pruned-rnnt import`, such as model.encoder.num_mel_bins=40"
        in error
    )
    del theirs["joiner.encoder_proj.bias"]
    torch.save({"model": theirs}, path)
    assert main(["import-icefall", *arguments, str(tmp_path / "other")]) == EXIT_FAILED
    assert "lacks joiner.encoder_proj.bias" in capsys.readouterr().err


def test_unusable_files_are_errors(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.pt"
    text.write_text("no checkpoint")
    other = tmp_path / "other.pt"
    torch.save({"model": {"lstm.weight": torch.zeros(2)}}, other)
    ours = tmp_path / "ours.pt"
    torch.save({"model": {}, "format": "pruned_rnnt checkpoint"}, ours)
    encoder = tmp_path / "encoder.pt"
    state = to_icefall_state(make_model())
    ctc = {name: value for name, value in state.items() if name.startswith("encoder")}
    torch.save({"model": ctc}, encoder)
    rounded = tmp_path / "rounded.pt"
    integers = {name: value.to(torch.int8) for name, value in state.items()}
    torch.save({"model": integers}, rounded)
    for path, message in (
        (tmp_path / "absent.pt", "no checkpoint at"),
        (text, "is damaged or not a checkpoint of icefall"),
        (other, "not those of a Zipformer"),
        (ours, "is a pruned_rnnt checkpoint, expected a file of icefall"),
        (encoder, "is not a transducer"),
        (rounded, "is of torch.int8, needs floating-point parameters: use the checkpoint before"),
    ):
        run = str(tmp_path / "run")
        assert main(["import-icefall", str(path), "--tokens", str(tokens), "--output", run]) != 0
        shown = capsys.readouterr().err
        assert message in shown
        assert len(shown.strip().splitlines()) == 1


def test_token_files(tmp_path: Path) -> None:
    trained = train_tokenizer(["SO IT IS", "IT WAS SO"], TokenizerConfig(kind="char"))
    (tmp_path / "bpe.model").write_bytes(trained.model)
    read = read_token_file(tmp_path / "bpe.model", len(trained))
    assert read.encode("IT SO") == trained.encode("IT SO")
    with pytest.raises(ValueError, match=r"bpe\.model has \d+ symbols, the model 5"):
        read_token_file(tmp_path / "bpe.model", 5)
    characters = write_tokens(tmp_path / "tokens.txt", ["<blk>", "<sos/eos>", "<unk>", "一", "二"])
    read = read_token_file(characters, 5)
    assert read.decode([4, 3, 1, 4]) == "二一二"
    assert read.encode("二一") == [4, 3]
    odd = write_tokens(tmp_path / "odd.txt", ["<blk>", "<sos/eos>", "<unk>", "a\x85", "\u3000"])
    assert read_token_file(odd, 5).symbols[3:] == ["a\x85", "\u3000"]
    with pytest.raises(ValueError, match="has no symbol 7, but the model has 9 symbols"):
        read_token_file(characters, 9)
    wrong = write_tokens(tmp_path / "wrong.txt", ["<unk>", "<blk>", "<sos/eos>"])
    with pytest.raises(ValueError, match=r"wrong\.txt has the symbols .* at 0, 1 and 2"):
        read_token_file(wrong, 3)
    (tmp_path / "bad.txt").write_text("<blk> 0\n<sos/eos>\n")
    with pytest.raises(ValueError, match=r"bad\.txt:2: needs `SYMBOL ID`"):
        read_token_file(tmp_path / "bad.txt", 3)


def test_models_that_the_recipe_cannot_represent_are_errors() -> None:
    with pytest.raises(ValueError, match="the encoder is a Conformer"):
        to_icefall_state(tiny_model())
    with pytest.raises(ValueError, match="the predictor is a LstmPredictor"):
        to_icefall_state(tiny_model(ENCODER, predictor=LstmPredictorConfig(dim=8)))
    with pytest.raises(ValueError, match=r"loss\.durations is \[0, 1, 2\]"):
        to_icefall_state(tiny_model(ENCODER, durations=(0, 1, 2)))
    with pytest.raises(ValueError, match=r"loss\.hat is true"):
        to_icefall_state(tiny_model(ENCODER, hat=True))
    with pytest.raises(ValueError, match=r"loss\.kind is 'full'"):
        to_icefall_state(tiny_model(ENCODER, kind="full"))
    config = ModelConfig(encoder=ENCODER, joiner_activation="relu")
    with pytest.raises(ValueError, match=r"model\.joiner_activation is 'relu'"):
        to_icefall_state(TransducerModel(config, len(SYMBOLS)))


def test_context_of_one_symbol_needs_no_convolution() -> None:
    model = make_model(context_size=1)
    imported = import_icefall(to_icefall_state(model), make_model(context_size=1))
    assert imported.complete, imported


def test_training_cannot_be_resumed(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pretrained.pt"
    torch.save({"model": to_icefall_state(make_model())}, path)
    run = tmp_path / "run"
    assert main(["import-icefall", str(path), "--tokens", str(tokens), "--output", str(run)]) == 0
    corpus = make_corpus(tmp_path / "corpus", train=1, dev=1)
    (corpus / "tokens/tokens.model").write_bytes((run / "tokens/tokens.model").read_bytes())
    settings = [f"data.path={corpus}", "train.device=cpu", "data.num_workers=0"]
    assert main(["train", "--config", str(run / "config.yaml"), *settings]) == EXIT_FAILED
    assert "holds an imported model" in capsys.readouterr().err


def test_another_folder_is_refused(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "epoch-1.pt", to_icefall_state(make_model()))
    run = tmp_path / "run"
    arguments = [str(path), "--tokens", str(tokens), "--output", str(run), "train.folder=other"]
    assert main(["import-icefall", *arguments]) == EXIT_USAGE
    assert "train.folder is other, but the run is written to" in capsys.readouterr().err
    assert not run.exists()
