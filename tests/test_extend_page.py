"""The page about encoders, searches and losses of one's own, followed as a newcomer would."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.model import encoder_kinds
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.train.engine.log import read_metrics
from tests.tiny_corpus import tiny_overrides

PAGE = Path(__file__).parent.parent / "docs/extend.md"


@pytest.fixture(autouse=True)
def registered_for_one_test() -> Iterator[None]:
    """Forget the page's encoder: other tests list the encoders of the package."""
    yield
    encoder_kinds._ENCODERS.pop("lstm", None)
    encoder_kinds.ENCODER_CONFIGS.pop("lstm", None)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def own_settings(corpus: Path, run: Path, *more: str) -> list[str]:
    """Settings of a tiny run, without those of the Conformer."""
    settings = tiny_overrides(corpus, run, *more)
    return [each for each in settings if not each.startswith("model.encoder.")]


@pytest.mark.slow
def test_the_page_works(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, search, loss = blocks()
    assert len(encoder.splitlines()) <= 50
    program, run = tmp_path / "my_encoder.py", tmp_path / "lstm"
    program.write_text(encoder, encoding="utf-8")
    settings = own_settings(corpus, run, "train.steps=30", "train.log_every=10")
    of_encoder = ["model.encoder.kind=lstm", "model.encoder.dim=32", "loss.ctc_scale=1.0"]
    for arguments in (["train", *settings, *of_encoder], ["decode", str(run)]):
        command = [sys.executable, str(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "WER" in done.stdout
    losses = [line["total_per_frame"] for line in read_metrics(run) if line["group"] == "train"]
    assert losses[-1] < losses[0]
    # A program that has not imported the file.
    assert main(["decode", str(run)]) != 0
    kinds = "conformer, ensemble, fastconformer, transformers, zipformer"
    advice = "if it is your own, import the file that calls register_encoder"
    assert f"'model.encoder.kind=lstm' is none of {kinds}; {advice}" in capsys.readouterr().err

    # Each block is a file of its own.
    names: dict[str, Any] = {}
    for block in (encoder, search, loss):
        of_block: dict[str, Any] = {"__name__": "page"}
        exec(compile(block, "extend.md", "exec", dont_inherit=True), of_block)
        names |= of_block
    for refused, message in (
        (["decode", str(run), "decode.chunk=4"], "the encoder is not causal"),
        (["export", str(run)], "torch cannot export the encoder for any number of"),
        (["export", str(run), "--format", "torch"], "; --format onnx may be able to"),
    ):
        assert main(refused) != 0
        assert message in capsys.readouterr().err.splitlines()[-1]
    few, many = (names["word_errors"](run, penalty) for penalty in (0.0, 1e9))
    assert few.reference_words == many.reference_words > 0
    # Without blanks, symbols take their place.
    assert many.insertions > few.insertions
    small = tmp_path / "small"
    assert names["train"](*own_settings(corpus, small, *of_encoder)) == "finished"
    measured = read_metrics(small)
    assert {line["group"] for line in measured} == {"train", "valid"}
    assert all(line["energy_per_symbol"] > 0 for line in measured)
    lines = [line for line in measured if line["group"] == "train"]
    first = lines[0]
    parts = sum(first[f"{name}_per_frame"] for name in ("ctc",)) + 0.1 * first["energy_per_frame"]
    assert first["total_per_frame"] > parts


def test_output_does_not_depend_on_padding() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks()[0], "extend.md", "exec", dont_inherit=True), names)
    torch.manual_seed(0)
    encoder = names["LstmEncoder"](names["LstmConfig"](dim=8)).eval()
    features = torch.randn(2, 23, 80)
    encoded, lengths = encoder(features, torch.tensor([23, 14]))
    assert encoded.shape == (2, 5, 8)
    assert lengths.tolist() == [5, 3]
    alone, _ = encoder(features[1:, :14], torch.tensor([14]))
    torch.testing.assert_close(encoded[1, :3], alone[0])


@dataclass(frozen=True, kw_only=True)
class Taken(EncoderConfig):
    kind: Literal["conformer"] = "conformer"


@dataclass(frozen=True, kw_only=True)
class New(EncoderConfig):
    kind: Literal["new"] = "new"


@dataclass(frozen=True, kw_only=True)
class Nameless(EncoderConfig):
    dim: int = 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Taken, "Taken.kind is 'conformer', an encoder of this package; needs another name"),
        (Nameless, "Nameless.kind has no default, needs the name of the encoder"),
        (dict, "config is <class 'dict'>, needs a dataclass derived from EncoderConfig"),
        ("lstm", "config is 'lstm', needs a dataclass"),
    ],
)
def test_wrong_encoders_are_refused(config: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        encoder_kinds.register_encoder(config, torch.nn.Module)  # type: ignore[arg-type]


def test_an_encoder_made_by_a_function_must_say_its_rate() -> None:
    with pytest.raises(TypeError, match="has no subsampling_factor: set this attribute"):
        encoder_kinds.register_encoder(New, lambda config: torch.nn.Module())  # type: ignore[arg-type, return-value]
