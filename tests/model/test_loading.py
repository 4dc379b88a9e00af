"""What makes loading a model fast: no random numbers, and only the parts of a file that matter."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from pruned_rnnt.model.build_model import UninitialisedParameters
from pruned_rnnt.model.saved_file import UnusableFileError, read_outline, read_saved
from pruned_rnnt.system.device import start_device


def test_parameters_without_random_numbers() -> None:
    before = torch.get_rng_state()
    with UninitialisedParameters():
        layer = nn.Conv1d(3, 4, 5)
        nn.init.normal_(layer.weight, std=2.0)
        nn.Parameter(torch.empty(7)).data.uniform_(-1, 1)
        assert nn.init.zeros_(tensor=torch.empty(3)).shape == (3,)
        assert torch.ones(3).mul_(2).tolist() == [2, 2, 2]
        assert nn.Parameter(torch.ones(3)).data.mul_(2).tolist() == [2, 2, 2]
        with torch.no_grad():
            assert nn.Parameter(torch.ones(3)).mul_(2).tolist() == [1, 1, 1]
    assert torch.equal(torch.get_rng_state(), before)
    layer.reset_parameters()
    assert not torch.equal(torch.get_rng_state(), before)


def test_an_outline_is_read_without_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"format": "ours", "weight": torch.arange(10_000.0)}, path)
    assert read_outline(path)["format"] == "ours"

    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert read_outline(path)["format"] == "ours"
    with pytest.raises(UnusableFileError, match="checksum"):
        read_saved(path, "model", mapped=True)

    path.write_bytes(content[:1000])
    assert read_outline(path) is None
    torch.save([1, 2], path)
    assert read_outline(path) == [1, 2]


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("touched"),)


def test_an_outline_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"format": "ours", "code": _Runs(), "state": OrderedDict(a=torch.ones(2), b={1, 2})}
    torch.save(values, "model.pt")
    assert read_outline(Path("model.pt"))["format"] == "ours"
    assert not Path("touched").exists()
    torch.load("model.pt", weights_only=False)
    assert Path("touched").exists()


def test_a_mapped_file_has_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    values = {"weight": torch.randn(100, 3), "half": torch.randn(7).bfloat16(), "name": "x"}
    torch.save(values, path)
    read, mapped = read_saved(path, "model"), read_saved(path, "model", mapped=True)
    for name, value in values.items():
        same = torch.equal if isinstance(value, torch.Tensor) else str.__eq__
        assert same(read[name], value), name
        assert same(mapped[name], value), name


def test_only_cuda_devices_are_started() -> None:
    assert start_device(torch.device("cpu"), compiles=True) is None
    # An error of a missing device stays in the thread.
    thread = start_device(torch.device("cuda"), compiles=False)
    assert thread is not None
    thread.join()
