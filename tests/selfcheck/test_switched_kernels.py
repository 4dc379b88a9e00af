"""The file of switched kernels: what it applies to, and that its use is never silent."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.encode import choose_graphs
from pruned_rnnt.model.conformer import Conformer
from pruned_rnnt.model.encoder_graphs import graph_obstacle
from pruned_rnnt.model.kernels import available
from pruned_rnnt.ops.common.native import library_file
from pruned_rnnt.selfcheck.encoders import encoder_configs
from pruned_rnnt.system import switched_kernels
from pruned_rnnt.system.switched_kernels import (
    ENCODERS,
    GRAPHS,
    LOSSES,
    current_switches,
    read_switches,
    switch_file,
    why_switched,
    write_switches,
)
from tests.test_imports import run_alone
from tests.torch_forks import run_with_torch


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(switched_kernels, "_ignored", False)
    names = switched_kernels.device_names
    monkeypatch.setattr(
        switched_kernels,
        "device_names",
        lambda device: ["NVIDIA Test"] if device == "cuda" else names(device),
    )
    switched_kernels._why_switched.cache_clear()
    available._obstacle.cache_clear()
    yield
    switched_kernels._why_switched.cache_clear()
    available._obstacle.cache_clear()


def switch(part: str, device: str, library: Path | None = None) -> None:
    current = current_switches(part, device, library)
    assert current
    write_switches(current, [x.because("the gradient is wrong") for x in current])


def test_a_switched_part_says_why_and_once(caplog: pytest.LogCaptureFixture) -> None:
    assert why_switched(ENCODERS, "cuda") == ""
    switch(ENCODERS, "cuda")
    with caplog.at_level(logging.WARNING, "pruned_rnnt"):
        reasons = {why_switched(ENCODERS, "cuda") for _ in range(3)}
    (reason,) = reasons
    assert "the gradient is wrong" in reason
    assert str(switch_file()) in reason
    assert caplog.messages == [f"encoder kernels run in plain torch on NVIDIA Test: {reason}"]
    assert why_switched(GRAPHS, "cuda") == ""
    assert why_switched(ENCODERS, "cpu") == ""


@pytest.mark.parametrize("changed", ["name", "torch", "driver", "triton", "pruned_rnnt"])
def test_another_gpu_or_version_has_its_kernels(changed: str) -> None:
    switch(ENCODERS, "cuda")
    values = json.loads(switch_file().read_text())
    (entry,) = values["switched"]
    place = entry if changed == "name" else entry["versions"]
    assert changed in place
    place[changed] = "another"
    switch_file().write_text(json.dumps(values))
    assert why_switched(ENCODERS, "cuda") == ""


def test_a_library_that_was_built_again_is_used(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"first")
    switch(LOSSES, "cpu", library)
    assert why_switched(LOSSES, "cpu", library)
    switched_kernels._why_switched.cache_clear()
    library.write_bytes(b"second build")
    assert why_switched(LOSSES, "cpu", library) == ""


def test_writing_keeps_entries_about_others() -> None:
    switch(ENCODERS, "cuda")
    switch(GRAPHS, "cuda")
    assert [x.part for x in read_switches()] == [ENCODERS, GRAPHS]
    write_switches(current_switches(ENCODERS, "cuda"), [])
    assert [x.part for x in read_switches()] == [GRAPHS]
    assert list(switch_file().parent.iterdir()) == [switch_file()]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"switched": 1}', '{"switched": [1]}', '{"switched": [{}]}']
)
def test_a_damaged_file_is_named_and_nothing_is_switched(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    switch_file().parent.mkdir()
    switch_file().write_text(text)
    with caplog.at_level(logging.WARNING, "pruned_rnnt"):
        assert why_switched(ENCODERS, "cuda") == ""
    (message,) = caplog.messages
    assert str(switch_file()) in message
    assert "is damaged" in message
    with pytest.raises(ValueError, match="delete it, and run"):
        write_switches([], [])


def test_encoder_kernels_and_graphs_are_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "find_spec", lambda name: SimpleNamespace())
    switch(ENCODERS, "cuda")
    report = available.kernel_report(torch.device("cuda"))
    assert "not used, switched off by `pruned-rnnt check --write`" in report

    switch(GRAPHS, "cuda")
    encoder = Conformer(encoder_configs()["Conformer"])  # type: ignore[arg-type]
    parameter = SimpleNamespace(device=torch.device("cuda"), requires_grad=True, is_cuda=True)
    monkeypatch.setattr(encoder, "parameters", lambda: iter([parameter]))
    assert "switched off" in graph_obstacle(encoder)
    model = SimpleNamespace(
        parameters=lambda: iter([parameter]),
        encoder=SimpleNamespace(can_be_captured=True),
        inference_graphs=1,
    )
    choose_graphs("auto", model)  # type: ignore[arg-type]
    assert model.inference_graphs is None


@pytest.mark.slow
@pytest.mark.skipif(library_file("cpu") is None, reason="the CPU library is not built")
def test_switched_losses_run_in_plain_torch(tmp_path: Path) -> None:
    switch(LOSSES, "cpu", library_file("cpu"))
    code = (
        "import pruned_rnnt; print(pruned_rnnt.backend_summary('cpu'));"
        "from pruned_rnnt.ops.common.native import has_native_kernel as has;"
        "print(has('log_probs', 'cpu'))"
    )
    out = run_with_torch(code, XDG_CONFIG_HOME=str(tmp_path))
    assert out.stdout.startswith("fallback (switched off by `pruned-rnnt check --write`"), out
    assert out.stdout.endswith("False\n")
    assert out.stderr.count("losses run in plain torch on") == 1
    forced = run_with_torch(
        f"import os; os.environ['PRUNED_RNNT_BACKEND'] = 'native'\n{code}",
        XDG_CONFIG_HOME=str(tmp_path),
    )
    assert "ImportError: PRUNED_RNNT_BACKEND=native, but for cpu: switched off" in forced.stderr


NO_HOME = """
import os, pwd
os.environ.pop("HOME", None)
os.environ.pop("XDG_CONFIG_HOME", None)
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""


@pytest.mark.skipif(library_file("cpu") is None, reason="the CPU library is not built")
@pytest.mark.slow
def test_a_user_without_a_home_has_the_kernels() -> None:
    out = run_with_torch(f"{NO_HOME}\nimport pruned_rnnt; print(pruned_rnnt.backend_report())")
    assert "cpu: native" in out.stdout, out.stderr


@pytest.mark.slow
def test_a_command_that_needs_a_home_says_so() -> None:
    out = run_with_torch(
        f"{NO_HOME}\nfrom pruned_rnnt.cli import main\nprint(main(['inspect', '/no/such/run']))"
    )
    assert out.stderr.endswith("Set HOME to your home folder (--debug shows where)\n")
    assert out.stdout == "1\n"


def test_a_file_that_must_not_be_read_switches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    switch(ENCODERS, "cuda")
    monkeypatch.setattr(Path, "is_file", refused)
    assert why_switched(ENCODERS, "cuda") == ""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            OSError("libcuda.so.1: no such file"),
            "the first kernel fails (OSError: libcuda.so.1: no",
        ),
        (TypeError("launch takes 3"), "the first kernel fails (TypeError: launch takes 3)"),
    ],
)
def test_kernels_that_do_not_run_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, advice: str
) -> None:
    pytest.importorskip("triton")
    calls = [torch.OutOfMemoryError("CUDA out of memory"), error]

    def failing(*args: object) -> Tensor:
        raise calls.pop(0)

    monkeypatch.setattr("pruned_rnnt.model.kernels.swoosh.swoosh_forward", failing)
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: None)
    with pytest.raises(torch.OutOfMemoryError):  # of a moment, so that the next call tries again
        available._obstacle()
    assert advice in available._obstacle()
    assert advice in available._obstacle()
    (message,) = caplog.messages
    assert message.startswith("the encoders run in plain torch")
    assert advice in message


def test_without_a_file_nothing_is_read() -> None:
    code = (
        "import sys; from pruned_rnnt.system.switched_kernels import why_switched;"
        "print(repr(why_switched('losses', 'cuda')), 'torch' in sys.modules)"
    )
    assert run_alone(code).stdout == "'' False\n"
