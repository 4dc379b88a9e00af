"""The losses need torch and numpy alone; errors about missing packages name the pip command."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.system.optional_packages import (
    PACKAGES_OF_EXTRA,
    MissingPackageError,
    missing_packages_named,
    require,
)
from tests.torch_forks import run_with_torch

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"

LOSSES = """
import sys
from importlib.machinery import PathFinder
find_all = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.partition(".")[0] in sys.argv[1:] else find_all(name, *rest)
)

import torch, pruned_rnnt
from pruned_rnnt.compat import k2
am, lm = torch.randn(2, 6, 5, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)
targets = torch.randint(1, 5, (2, 3))
simple = pruned_rnnt.rnnt_loss_simple(am, lm, targets)
bounds = pruned_rnnt.prune_bounds(simple.occupancy, torch.full((2,), 6), torch.full((2,), 3), 3)
parts = pruned_rnnt.prune(am, lm, bounds)
loss = pruned_rnnt.rnnt_loss_pruned(parts.am + parts.lm, targets, bounds)
(simple.loss + loss).backward()
print(am.grad.shape, pruned_rnnt.diagnostics.band_edge_mass.__name__)
try:
    pruned_rnnt.load("model.pt")
except ImportError as error:
    print(error)
"""


def test_extras_equal_those_of_error_messages() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert [re.split("[><=]", name)[0] for name in project["dependencies"]] == ["torch", "numpy"]
    for extra, packages in PACKAGES_OF_EXTRA.items():
        listed = [re.split("[><=]", name)[0] for name in project["optional-dependencies"][extra]]
        own = [name.replace("-", "_") for name in listed if not name.startswith("pruned_rnnt[")]
        assert own == list(packages)


def test_losses_need_no_optional_package() -> None:
    packages = [package for names in PACKAGES_OF_EXTRA.values() for package in names]
    done = run_with_torch(LOSSES, *packages)
    losses, error = done.stdout.splitlines()
    assert losses == "torch.Size([2, 6, 5]) band_edge_mass", done.stderr
    # The package that is imported first.
    assert re.fullmatch(r"\w+ is not installed: pip install 'pruned_rnnt\[train\]'", error)


def test_commands_name_missing_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("lhotse", "rich"):
        monkeypatch.setitem(sys.modules, package, None)
    for arguments in (["train", "exp/a"], ["prepare", "own", "a.tsv"], ["inspect", "exp/a"]):
        assert main(arguments) == EXIT_FAILED
        shown = capsys.readouterr().err
        wanted = "lhotse, rich are not installed: pip install 'pruned_rnnt[train]'"
        assert shown == f"pruned-rnnt {arguments[0]}: {wanted}\n"


def test_recipe_names_its_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (
        "pruned_rnnt.recipes.synthetic.prepare",
        "pruned_rnnt.data.prepare.speech_synthesis",
    ):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    assert main(["prepare", "synthetic"]) == EXIT_FAILED
    assert capsys.readouterr().err == (
        "pruned-rnnt prepare: espeakng-loader is not installed: "
        "pip install 'pruned_rnnt[recipes]'\n"
    )


def test_recipe_of_recordings_needs_no_synthesis(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "pruned_rnnt.recipes.fsdd.prepare",
        "pruned_rnnt.recipes.fsdd.synthetic_speakers",
        "pruned_rnnt.data.prepare.speech_synthesis",
    ):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    importlib.import_module("pruned_rnnt.recipes.fsdd.prepare")


def test_errors_about_other_modules_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"No module named 'no_such_module'") as caught,
        missing_packages_named(),
    ):
        import no_such_module  # noqa: F401
    assert not isinstance(caught.value, MissingPackageError)
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    message = r"sounddevice, jinja2 are .*'pruned_rnnt\[microphone,report\]'"
    with pytest.raises(MissingPackageError, match=message):
        require("sounddevice", "jinja2", "rich")
