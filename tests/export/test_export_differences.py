"""What a recogniser does otherwise than a run is said, and what it cannot run is refused."""

from __future__ import annotations

import pytest

from pruned_rnnt.decode.decode_set import DecodeConfig
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.export.differences import check_predictor, differences
from pruned_rnnt.export.readme import readme_text
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.lstm_predictor import LstmPredictorConfig
from pruned_rnnt.model.predictor import AnyPredictorConfig, PredictorConfig
from pruned_rnnt.model.transducer_model import LossConfig, ModelConfig, TransducerModel
from pruned_rnnt.usage_errors import ExportError


def make_model(
    predictor: AnyPredictorConfig | None = None, rnnt_type: str = "modified"
) -> TransducerModel:
    encoder = ConformerConfig(layers=1, dim=16, heads=2, feedforward_dim=16)
    config = ModelConfig(encoder=encoder, predictor=predictor or PredictorConfig())
    return TransducerModel(config, 5, LossConfig(rnnt_type=rnnt_type))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rnnt_type", "decode", "expected"),
    [
        ("modified", DecodeConfig(), []),
        ("constrained", DecodeConfig(beam_size=8, length_norm=False), []),
        ("regular", DecodeConfig(), ["loss.rnnt_type is regular"]),
        ("modified", DecodeConfig(max_symbols_per_frame=3), ["max_symbols_per_frame is 3"]),
        ("modified", DecodeConfig(skip_unknown=False), ["never shows <unk>"]),
        (
            "modified",
            DecodeConfig(method="modified_beam", beam_size=8, length_norm=False),
            ["beam_size is 8", "length_norm is false"],
        ),
        (
            "modified",
            DecodeConfig(method="modified_beam", fusion=FusionConfig(hotwords="words.txt")),
            ["decode.fusion is used"],
        ),
    ],
)
def test_differences_are_named(rnnt_type: str, decode: DecodeConfig, expected: list[str]) -> None:
    lines = list(differences(make_model(rnnt_type=rnnt_type), decode))
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))
    settings = {
        "source": "test",
        "streaming": False,
        "precisions": ["fp32"],
        "sample_rate": 16000,
        "feature_dim": 80,
        "shortest_seconds": 0.07,
        "differences": lines,
    }
    readme = readme_text(settings)
    assert ("settings differ" in readme) == bool(lines)
    assert all(line in readme for line in lines)


def test_a_predictor_with_a_state_is_refused() -> None:
    check_predictor(make_model())
    with pytest.raises(ExportError, match="kind is lstm: sherpa-onnx runs stateless"):
        check_predictor(make_model(LstmPredictorConfig(dim=8)))
