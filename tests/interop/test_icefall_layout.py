"""Names, shapes and sizes of icefall's Zipformer recipe, as in its source and results."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.interop.icefall_model import to_icefall_state
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.zipformer import zipformer_config
from tests.model.zipformer_tiny import CAUSAL, TINY


# From the recipe's RESULTS.md, for LibriSpeech models (500 symbols, context of two).
@pytest.mark.parametrize(
    ("size", "causal", "ctc", "published"),
    [
        ("small", False, False, 23_285_615),
        ("medium", False, False, 65_549_011),
        ("medium", False, True, 65_805_511),
        ("large", False, False, 148_439_574),
        ("medium", True, False, 66_110_931),
    ],
)
def test_published_models_have_as_many_parameters(
    size: str, causal: bool, ctc: bool, published: int
) -> None:
    encoder = zipformer_config(size, causal=causal)
    config = ModelConfig(encoder=encoder, predictor=PredictorConfig(dim=512), joiner_dim=512)
    with torch.device("meta"):
        model = TransducerModel(config, 500, LossConfig(ctc_scale=0.2 if ctc else 0.0))
    # Each of the recipe's layers also has a bypass_scale that is never used.
    idle = sum(n * dim for n, dim in zip(encoder.layers, encoder.dims, strict=True))
    assert sum(parameter.numel() for parameter in model.parameters()) + idle == published


def layer_shapes(index: int, causal: bool) -> dict[str, tuple[int, ...]]:
    """Parameters of a layer of a stack: `Zipformer2EncoderLayer` and its modules."""
    config = TINY
    dim, heads, kernel = config.dims[index], config.heads[index], config.kernel_sizes[index]
    hidden, values = config.feedforward_dims[index], heads * config.value_head_dim
    positions = heads * config.position_head_dim
    keys = 2 * heads * config.query_head_dim + positions
    nonlin = 3 * dim // 4
    shapes: dict[str, tuple[int, ...]] = {
        "bypass.bypass_scale": (dim,),
        "bypass_mid.bypass_scale": (dim,),
        "bypass_scale": (dim,),
        "norm.bias": (dim,),
        "norm.log_scale": (),
        "self_attn_weights.in_proj.weight": (keys, dim),
        "self_attn_weights.in_proj.bias": (keys,),
        "self_attn_weights.linear_pos.weight": (positions, config.position_dim),
        "nonlin_attention.in_proj.weight": (3 * nonlin, dim),
        "nonlin_attention.in_proj.bias": (3 * nonlin,),
        "nonlin_attention.out_proj.weight": (dim, nonlin),
        "nonlin_attention.out_proj.bias": (dim,),
    }
    for name in ("self_attn1", "self_attn2"):
        shapes |= {f"{name}.in_proj.weight": (values, dim), f"{name}.in_proj.bias": (values,)}
        shapes |= {f"{name}.out_proj.weight": (dim, values), f"{name}.out_proj.bias": (dim,)}
    for number, width in ((1, hidden * 3 // 4), (2, hidden), (3, hidden * 5 // 4)):
        name = f"feed_forward{number}"
        shapes |= {f"{name}.in_proj.weight": (width, dim), f"{name}.in_proj.bias": (width,)}
        shapes |= {f"{name}.out_proj.weight": (dim, width), f"{name}.out_proj.bias": (dim,)}
    for name in ("conv_module1", "conv_module2"):
        shapes |= {f"{name}.in_proj.weight": (2 * dim, dim), f"{name}.in_proj.bias": (2 * dim,)}
        shapes |= {f"{name}.out_proj.weight": (dim, dim), f"{name}.out_proj.bias": (dim,)}
        depthwise = f"{name}.depthwise_conv"
        if causal:
            shapes[f"{depthwise}.causal_conv.weight"] = (dim, 1, kernel // 2 + 1)
            shapes[f"{depthwise}.causal_conv.bias"] = (dim,)
            shapes[f"{depthwise}.chunkwise_conv.weight"] = (dim, 1, kernel)
            shapes[f"{depthwise}.chunkwise_conv.bias"] = (dim,)
            shapes[f"{depthwise}.chunkwise_conv_scale"] = (2, dim, kernel)
        else:
            shapes[f"{depthwise}.weight"] = (dim, 1, kernel)
            shapes[f"{depthwise}.bias"] = (dim,)
    return shapes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context_size", [1, 2])
def test_names_and_shapes_equal_those_of_the_recipe(causal: bool, context_size: int) -> None:
    config = CAUSAL if causal else TINY
    dims, symbols, width, joint = config.dims, 11, 8, 12
    bins = ((config.num_mel_bins - 1) // 2 - 1) // 2
    expected: dict[str, tuple[int, ...]] = {
        "encoder_embed.conv.0.weight": (8, 1, 3, 3),
        "encoder_embed.conv.4.weight": (32, 8, 3, 3),
        "encoder_embed.conv.7.weight": (128, 32, 3, 3),
        "encoder_embed.convnext.depthwise_conv.weight": (128, 1, 7, 7),
        "encoder_embed.convnext.pointwise_conv1.weight": (384, 128, 1, 1),
        "encoder_embed.convnext.pointwise_conv2.weight": (128, 384, 1, 1),
        "encoder_embed.out.weight": (dims[0], 128 * bins),
        "joiner.encoder_proj.weight": (joint, max(dims)),
        "joiner.decoder_proj.weight": (joint, width),
        "joiner.output_linear.weight": (symbols, joint),
        "simple_am_proj.weight": (symbols, max(dims)),
        "simple_lm_proj.weight": (symbols, width),
        "ctc_output.1.weight": (symbols, max(dims)),
    }
    biases = {name.removesuffix("weight") + "bias": shape[:1] for name, shape in expected.items()}
    expected |= biases
    expected["encoder_embed.out_norm.bias"] = (dims[0],)
    expected["encoder_embed.out_norm.log_scale"] = ()
    expected["decoder.embedding.weight"] = (symbols, width)
    if context_size == 2:
        expected["decoder.conv.weight"] = (width, 4, 2)
    expected["encoder.downsample_output.bias"] = (2,)
    for index, rate in enumerate(config.downsampling):
        stack = f"encoder.encoders.{index}."
        if rate > 1:
            expected[f"{stack}downsample.bias"] = (rate,)
            expected[f"{stack}out_combiner.bypass_scale"] = (dims[index],)
            stack += "encoder."
        for layer in range(config.layers[index]):
            for name, shape in layer_shapes(index, causal).items():
                expected[f"{stack}layers.{layer}.{name}"] = shape
    predictor = PredictorConfig(dim=width, context_size=context_size)
    model = TransducerModel(
        ModelConfig(encoder=config, predictor=predictor, joiner_dim=joint), symbols
    )
    found = {name: tuple(value.shape) for name, value in to_icefall_state(model).items()}
    assert found == expected
