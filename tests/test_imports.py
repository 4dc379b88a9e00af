"""The direction of imports, and what `import pruned_rnnt` may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pruned_rnnt"

# What each part of the package may import from the others.
ALLOWED = {
    "ops": set(),
    "loss": {"ops"},
    "diagnostics": {"ops", "loss"},
    "compat": {"ops", "loss"},
    "data": set(),
    "config": set(),
    "model": {"ops", "loss"},
    "train": {"config", "data", "decode", "diagnostics", "loss", "model"},
    "decode": {"config", "data", "diagnostics", "loss", "model"},
    "align": {"config", "data", "decode", "diagnostics", "loss", "model"},
    "export": {"align", "config", "data", "decode", "loss", "model"},
}


def _imported_parts(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = {name.split(".")[1] for name in names if name.startswith("pruned_rnnt.")}
    return parts & ALLOWED.keys()


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_point_one_way(part: str) -> None:
    single = PACKAGE / f"{part}.py"
    sources = [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))
    for source in sources:
        wrong = _imported_parts(source) - ALLOWED[part] - {part}
        assert not wrong, f"{source.relative_to(PACKAGE)} imports {sorted(wrong)}"


def test_no_relative_imports() -> None:
    """Relative imports would slip past the test above."""
    for source in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level > 0), source


def test_diagnostics_need_no_import_of_their_own() -> None:
    code = (
        "import sys, pruned_rnnt; before = 'pruned_rnnt.diagnostics' in sys.modules;"
        "print(before, pruned_rnnt.diagnostics.retained_mass.__name__, hasattr(pruned_rnnt, 'x'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False retained_mass False"


def test_import_needs_torch_alone() -> None:
    """A loss-only user pays for no data, plotting or configuration library."""
    heavy = ["lhotse", "sentencepiece", "omegaconf", "matplotlib", "scipy", "rich", "kaldialign"]
    code = (
        "import torch, sys; before = set(sys.modules); import pruned_rnnt;"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
