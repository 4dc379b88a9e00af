"""Files of torch.save that describe more than they hold are refused by name, before it is read."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.export.model_file import ModelFile, load_model, save_model
from pruned_rnnt.interop.icefall_model import read_icefall, to_icefall_state
from pruned_rnnt.interop.icefall_run import ImportedRun, read_run
from pruned_rnnt.model.saved_file import UnusableFileError, read_saved
from tests.tiny_models import tiny_model, zipformer_of_icefall

HUGE = 10**11


def nested(levels: int) -> list[Any]:
    """Lists that contain each other: 10 ** levels values in a few bytes."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value] * 10
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "view": (lambda: {"a": {"w": torch.zeros(1).expand(HUGE)}}, "tensor a.w of shape .*repeats"),
    "stride": (lambda: [torch.zeros(9).as_strided((HUGE, 9), (0, 1))], "tensor 0 of shape"),
    "overlap": (lambda: torch.zeros(99).as_strided((90, 10), (1, 1)), "of shape .*repeats its 396"),
    "meta": (lambda: {"w": torch.zeros(3, device="meta")}, r"tensor w is not a dense .*\(meta"),
    "sparse": (lambda: {"w": torch.eye(3).to_sparse()}, "is not a dense tensor .*sparse_coo"),
    "names": (lambda: dict.fromkeys(range(50), torch.zeros(10**5)), "repeat 400,000 bytes 50"),
    "lists": (lambda: nested(9), "it holds more than"),
    "endless": (endless, "it holds more than"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_more_than_the_file_holds_is_refused(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    torch.save(make(), tmp_path / "a.pt")
    with pytest.raises(UnusableFileError, match=rf"a\.pt is refused: .*{message}"):
        read_saved(tmp_path / "a.pt", "checkpoint")


@pytest.mark.filterwarnings("ignore:.*quant")
def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "a")
    with pytest.raises(UnusableFileError, match=r"a is refused: .*w is not a dense .*quantised"):
        read_saved(tmp_path / "a", "checkpoint")


def test_a_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jit_script.pt"
    torch.save({"w": torch.ones(3)}, path)
    with zipfile.ZipFile(path, "a") as archive:  # by which torch knows programs of TorchScript
        archive.writestr("jit_script/constants.pkl", b"")
    with pytest.raises(UnusableFileError, match=r"a program of TorchScript, needs a checkpoint"):
        read_saved(path, "checkpoint")


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(UnusableFileError, match="not a checkpoint: it is a pointer of Git LFS"):
        read_saved(tmp_path / "a.pt", "checkpoint")


def test_shared_and_sliced_tensors_are_read(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    values = {"a": weight, "tied": weight, "row": weight[1], "turned": weight.T, "none": weight[:0]}
    torch.save(values, tmp_path / "a.pt")
    read = read_saved(tmp_path / "a.pt", "checkpoint")
    assert all(torch.equal(read[name], value) for name, value in values.items())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["one two"], TokenizerConfig(kind="char"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 10**9}, "holds .* parameters, the model has far more"),
        ({"vocab_size": -1}, "'vocab_size' is '-1'"),
        ({"state": [1]}, "'state' has no parameters: it is of type list"),
        ({"state": {"a": 3}}, "'a' is of type int"),
        ({"tokenizer": torch.zeros(9)}, "its tokenizer, calibration or stream_sizes"),
        ({"tokenizer": 3}, "its tokenizer, calibration or stream_sizes"),
        ({"usual_longest": "x"}, "its tokenizer, calibration or stream_sizes"),
        ({"usual_longest": -1}, "usual_longest is -1"),
        ({"calibration": {"times": 3}}, "its tokenizer, calibration or stream_sizes"),
        ({"config": {"model": 3}}, "'config' has no model"),
        ({"encoder": {"layers": 10**9}}, "the model has far more"),
        ({"encoder": {"dim": 10**7}}, "the model has far more"),
        ({"encoder": {"kind": nested(4)}}, r"more than 10,000 values"),
        ({"encoder": {"kind": torch.zeros(2)}}, "not a supported primitive type"),
    ],
)
def test_impossible_model_files_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.pt"
    save_model(ModelFile(tiny_model(vocab_size=len(tokenizer)), tokenizer), path, "test")
    values = torch.load(path, weights_only=True)
    values["config"]["model"]["encoder"].update(change.get("encoder", {}))
    torch.save({**values, **change}, path)
    with pytest.raises(ValueError, match=rf"model\.pt.*{message}"):
        load_model(path)


ICEFALL: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "model_avg": (lambda s: {"model": s, "model_avg": 5}, "in 'model_avg', it is of type int"),
    "tensors": (lambda s: {"model": {**s, "a": 5}}, "in 'model', 'a' is of type int"),
    "no model": (lambda s: {"state": s}, "has no `model`"),
    "stacks": (
        lambda s: {"model": {**s, f"encoder.encoders.{'9' * 30}.layers.0.norm.bias": s[NORM]}},
        "",
    ),
    "only stacks": (lambda s: {"model": {f"encoder.encoders.{'9' * 5000}.norm.bias": s[NORM]}}, ""),
    "stack 99": (
        lambda s: {"model": {**s, "encoder.encoders.99.layers.0.norm.bias": s[NORM]}},
        "not those of a Zipformer",
    ),
    "shapes": (lambda s: {"model": {**s, NORM: torch.tensor(1.0)}}, "impossible shapes"),
    "wide": (lambda s: {"model": {**s, NORM: torch.zeros(4 * 10**6)}}, "far more|does not fit"),
    "nan": (lambda s: {"model": {**s, NORM: s[NORM] * float("nan")}}, "has NaN values"),
    "view": (lambda s: {"model": {**s, "x": torch.zeros(1).expand(HUGE)}}, "repeats its 4 bytes"),
    "code": (lambda s: {"model": s, "params": Path}, "refused: .*use trust=True"),
}
NORM = "encoder.encoders.0.layers.0.norm.bias"


@pytest.mark.parametrize("kind", ICEFALL)
def test_odd_checkpoints_of_icefall(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    change, message = ICEFALL[kind]
    state = to_icefall_state(tiny_model(zipformer_of_icefall(), len(tokenizer)))
    path, tokens = tmp_path / "pretrained.pt", tmp_path / "bpe.model"
    torch.save(change(state), path)
    tokens.write_bytes(tokenizer.model)

    def read() -> ImportedRun:
        return read_run(path, tokens, tmp_path / "run")

    if kind == "stacks":  # the number is not one of a stack, and the name is an unknown parameter
        assert read().fit.unused
        return
    with pytest.raises(ValueError, match=rf"pretrained\.pt.*{message}"):
        read()


def test_averages_of_other_models_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    state = {"a": torch.ones(2)}
    for name, average, step in (("1", {"a": torch.ones(3)}, 1), ("2", state, 2), ("3", state, "x")):
        values = {"model": state, "model_avg": average, "batch_idx_train": step}
        torch.save(values, tmp_path / f"epoch-{name}.pt")
    with pytest.raises(ValueError, match=r"epoch-2\.pt and .*epoch-1\.pt have different"):
        read_icefall(tmp_path / "epoch-2.pt", tmp_path / "epoch-1.pt")
    with pytest.raises(ValueError, match=r"epoch-3\.pt .* batch_idx_train is no number"):
        read_icefall(tmp_path / "epoch-3.pt", tmp_path / "epoch-1.pt")
