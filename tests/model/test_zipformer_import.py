"""Import of models of icefall's Zipformer recipe."""

from __future__ import annotations

import pathlib
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt import Joiner, PrunedTransducerLoss
from pruned_rnnt.interop.icefall_model import icefall_sizes, import_icefall, read_icefall
from pruned_rnnt.model.predictor import PredictorConfig, StatelessPredictor
from pruned_rnnt.model.zipformer import SIZES, Zipformer, ZipformerConfig, zipformer_config
from tests.model.zipformer_tiny import CAUSAL, TINY, ragged_batch, sine_encoder

SYMBOLS, WIDTH = 11, 8


class Transducer(nn.Module):
    """A model whose parts have the names of `TransducerModel`."""

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__()
        self.encoder = Zipformer(config)
        self.predictor = StatelessPredictor(PredictorConfig(dim=WIDTH, context_size=2), SYMBOLS)
        self.joiner = Joiner(config.output_dim, WIDTH, WIDTH, SYMBOLS)
        self.ctc_head = nn.Linear(config.output_dim, SYMBOLS)
        self.pruned_loss = PrunedTransducerLoss(self.joiner, config.output_dim, WIDTH, SYMBOLS)


def recipe_parameters(config: ZipformerConfig) -> dict[str, Tensor]:
    """The parameters of such a model with the recipe's names, as the recipe saves them."""
    encoder = sine_encoder(config)
    dim = config.output_dim
    parameters = {name: value.detach().clone() for name, value in encoder.named_parameters()}
    for index, (layers, width) in enumerate(zip(config.layers, config.dims, strict=True)):
        inner = "" if config.downsampling[index] == 1 else "encoder."
        for layer in range(layers):
            name = f"encoder.encoders.{index}.{inner}layers.{layer}.bypass_scale"
            parameters[name] = torch.full((width,), 0.5)
    shapes: dict[str, tuple[int, ...]] = {
        "decoder.embedding.weight": (SYMBOLS, WIDTH),
        "decoder.conv.weight": (WIDTH, 4, 2),
    }
    for name, outputs, width in (
        ("joiner.encoder_proj", WIDTH, dim),
        ("joiner.decoder_proj", WIDTH, WIDTH),
        ("joiner.output_linear", SYMBOLS, WIDTH),
        ("simple_am_proj", SYMBOLS, dim),
        ("simple_lm_proj", SYMBOLS, WIDTH),
        ("ctc_output.1", SYMBOLS, dim),
    ):
        shapes |= {f"{name}.weight": (outputs, width), f"{name}.bias": (outputs,)}
    torch.manual_seed(6)
    return parameters | {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("config", [TINY, CAUSAL])
def test_import_of_a_whole_model(config: ZipformerConfig, tmp_path: Path) -> None:
    theirs = recipe_parameters(config)
    torch.save({"model": theirs}, tmp_path / "pretrained.pt")
    model = Transducer(config)
    imported = import_icefall(tmp_path / "pretrained.pt", model)
    assert imported.complete, imported
    assert len(imported.idle) == sum(config.layers)
    model.load_state_dict(imported.state_dict)
    batch, lengths, _ = ragged_batch([70, 61])
    got, _ = model.eval().encoder(batch, lengths)
    expected, _ = sine_encoder(config)(batch, lengths)
    assert torch.equal(got, expected)
    assert torch.equal(model.predictor.embedding.weight, theirs["decoder.embedding.weight"])
    assert torch.equal(model.predictor.convolution.weight, theirs["decoder.conv.weight"])
    assert torch.equal(model.joiner.output_linear.bias, theirs["joiner.output_linear.bias"])
    assert torch.equal(model.pruned_loss.simple_am_proj.weight, theirs["simple_am_proj.weight"])
    assert torch.equal(model.pruned_loss.simple_lm_proj.bias, theirs["simple_lm_proj.bias"])
    assert torch.equal(model.ctc_head.weight, theirs["ctc_output.1.weight"])


def test_import_reports_mismatches() -> None:
    theirs = recipe_parameters(TINY)
    theirs["attention_decoder.embed.weight"] = torch.zeros(3)
    theirs["encoder_embed.out.bias"] = torch.zeros(17)
    del theirs["encoder.downsample_output.bias"]
    model = Transducer(TINY)
    kept = model.encoder.encoder_embed.out.bias.detach().clone()
    imported = import_icefall(theirs, model)
    assert not imported.complete
    assert imported.unused == ("attention_decoder.embed.weight",)
    assert imported.missing == ("encoder.encoder.downsample_output.bias",)
    assert imported.wrong_shape == ("encoder_embed.out.bias: (17,) there, (16,) here",)
    model.load_state_dict(imported.state_dict)
    assert torch.equal(model.encoder.encoder_embed.out.bias, kept)


def test_import_of_the_encoder_only() -> None:
    encoder = Zipformer(TINY)
    imported = import_icefall(recipe_parameters(TINY), encoder)
    assert not imported.missing
    assert not imported.wrong_shape
    assert {name.split(".")[0] for name in imported.unused} == {
        "decoder",
        "joiner",
        "simple_am_proj",
        "simple_lm_proj",
        "ctc_output",
    }
    encoder.load_state_dict(imported.state_dict)


def epoch_file(path: Path, model: float, average: float, step: int) -> Path:
    torch.save(
        {
            "model": {"module.w": torch.full((2,), model)},
            "model_avg": {"w": torch.full((2,), average, dtype=torch.float64)},
            "batch_idx_train": step,
            "exp_dir": pathlib.PosixPath("exp"),
            "optimizer": None,
        },
        path,
    )
    return path


def test_read_averaged_model(tmp_path: Path) -> None:
    early = epoch_file(tmp_path / "epoch-1.pt", model=9.0, average=2.0, step=100)
    late = epoch_file(tmp_path / "epoch-3.pt", model=9.0, average=3.0, step=400)
    whole = read_icefall(late)
    assert whole["w"].dtype == torch.float32
    assert whole["w"].tolist() == [3.0, 3.0]
    # 400 steps sum to 1200, the first 100 to 200: the last 300 have a mean of 10 / 3.
    assert read_icefall(late, since=early)["w"].tolist() == pytest.approx([10 / 3] * 2)
    with pytest.raises(ValueError, match="is of step 100, needs a step after 400"):
        read_icefall(early, since=late)
    plain = tmp_path / "pretrained.pt"
    torch.save({"model": {"module.w": torch.ones(2)}}, plain)
    assert read_icefall(plain)["w"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"pretrained\.pt has no averaged model"):
        read_icefall(plain, since=early)


def test_invalid_files_raise(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="has no `model`"):
        read_icefall(tmp_path / "list.pt")
    torch.save({"model": {"w": torch.ones(1)}, "setting": Fraction(1, 2)}, tmp_path / "object.pt")
    with pytest.raises(ValueError, match="trust=True"):
        read_icefall(tmp_path / "object.pt")
    assert read_icefall(tmp_path / "object.pt", trust=True)["w"].tolist() == [1.0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_are_read_from_parameters(size: str, causal: bool) -> None:
    config = zipformer_config(size, causal=causal)
    with torch.device("meta"):
        parameters = dict(Zipformer(config).named_parameters())
    assert icefall_sizes(parameters).encoder == config


def test_sizes_of_a_whole_model() -> None:
    sizes = icefall_sizes(recipe_parameters(CAUSAL), num_mel_bins=24, chunk_sizes=(8,))
    assert (sizes.vocab_size, sizes.predictor_dim, sizes.joiner_dim) == (SYMBOLS, WIDTH, WIDTH)
    assert (sizes.context_size, sizes.has_ctc) == (2, True)
    assert sizes.encoder.chunk_sizes == (8,)
    assert sizes.encoder.kernel_sizes == CAUSAL.kernel_sizes
    assert sizes.encoder.query_head_dim == CAUSAL.query_head_dim
    with pytest.raises(ValueError, match="not those of a Zipformer"):
        icefall_sizes({"decoder.embedding.weight": torch.zeros(3, 4)})
