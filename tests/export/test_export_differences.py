"""Settings that sherpa-onnx decodes differently are listed; other predictors are errors."""

from __future__ import annotations

import pytest

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.export.differences import check_predictor, differences
from pruned_rnnt.export.readme import onnx_use
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.system.usage_errors import ExportError
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("rnnt_type", "decode", "expected"),
    [
        ("modified", DecodeConfig(), []),
        ("constrained", DecodeConfig(beam_size=8, length_norm=False), []),
        ("regular", DecodeConfig(), ["loss.rnnt_type is regular"]),
        ("modified", DecodeConfig(max_symbols_per_frame=3), ["max_symbols_per_frame is 3"]),
        ("modified", DecodeConfig(skip_unknown=False), ["never emits <unk>"]),
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
    lines = list(differences(tiny_model(rnnt_type=rnnt_type), decode))
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))
    settings = {
        "source": "test",
        "kind": "transducer",
        "streaming": False,
        "precisions": ["fp32"],
        "sample_rate": 16000,
        "feature_dim": 80,
        "shortest_seconds": 0.07,
        "differences": lines,
    }
    readme = onnx_use(settings)
    assert ("may decode differently" in readme) == bool(lines)
    assert all(line in readme for line in lines)


def test_recurrent_predictor_is_an_error() -> None:
    check_predictor(tiny_model())
    with pytest.raises(ExportError, match="kind is lstm: sherpa-onnx runs only stateless"):
        check_predictor(tiny_model(predictor=LstmPredictorConfig(dim=8)))
