"""The direction of imports, and the modules that `import pruned_rnnt` loads."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.torch_forks import run_with_torch

PACKAGE = Path(__file__).parent.parent / "pruned_rnnt"

# The parts of the package that each part may import. If sub-folders of a part are listed, the
# table holds between them, too.
ALLOWED = {
    "ops/common": set(),
    "ops/lattice": {"ops/common"},
    "ops/joiner": {"ops/common", "ops/lattice"},
    "ops/simple": {"ops/common", "ops/joiner"},
    "ops/pruning": {"ops/common"},
    "ops/search": {"ops/common", "ops/joiner"},
    "ops/step": {"ops/common", "ops/joiner", "ops/pruning", "ops/simple"},
    "loss": {"ops"},
    "diagnostics": {"ops", "loss"},
    "compat": {"ops", "loss"},
    "config": set(),
    "data/audio": set(),
    "data/tokens": set(),
    "data/input": {"data/audio", "data/tokens"},
    "data/prepare": {"data/audio", "data/input", "data/tokens"},
    "model": {"ops", "loss"},
    "decode/search": {"loss", "model", "ops"},
    "decode/fusion": {"data", "decode/search", "model"},
    "decode/scoring": set(),
    "decode": {"data", "model"},
    "train/optim": {"model"},
    "train/engine": {"config", "data", "model", "train/optim"},
    "train/tasks": {
        "config",
        "data",
        "decode",
        "diagnostics",
        "model",
        "train/engine",
        "train/optim",
    },
    "train": {"config", "data", "decode", "model"},
    "export": {"config", "data", "decode", "interop", "model", "ops"},
    "transcribe": {"data", "decode", "export", "model"},
    "align": {"data", "decode", "diagnostics", "model", "transcribe"},
    "pretrained": {"config", "data", "decode", "export", "interop", "model", "train", "transcribe"},
    "finetune": {"config", "data", "decode", "export", "interop", "model", "pretrained", "train"},
    "interop": {"config", "data", "loss", "model", "train"},
    "report": {"align", "config", "data", "decode", "diagnostics", "model", "train"},
}


def _row(module: str) -> str | None:
    """The row of the table for a module: that of its sub-folder if there is one, or of its part."""
    names = module.split(".")[1:]
    return next((row for row in ("/".join(names[:2]), names[0]) if row in ALLOWED), None)


@functools.cache
def _imports() -> dict[str, set[str]]:
    """For every module of the package, the modules of the package that it imports anywhere."""
    sources = {
        ".".join((PACKAGE.name, *source.relative_to(PACKAGE).with_suffix("").parts)): source
        for source in PACKAGE.rglob("*.py")
    }
    imports: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                parent = name.rpartition(".")[0]
                imports[module].update({name, parent, f"{parent}.__init__"} & sources.keys())
    return imports


@pytest.mark.parametrize("row", sorted(ALLOWED))
def test_imports_point_one_way(row: str) -> None:
    allowed = ALLOWED[row]
    for module, imported in _imports().items():
        if _row(module) != row:
            continue
        for other in imported:
            part = _row(other)
            # Modules directly in a part may import its sub-folders, and the reverse.
            own = part in (None, row, row.partition("/")[0]) or part.startswith(f"{row}/")
            assert own or {part, part.partition("/")[0]} & allowed, f"{module} imports {other}"


def test_no_module_imports_itself_through_others() -> None:
    sorter = TopologicalSorter(
        {
            module: {other for other in imported if not other.endswith("__init__")}
            for module, imported in _imports().items()
            if not module.endswith("__init__")
        }
    )
    sorter.prepare()  # raises CycleError, which names the modules of the cycle


def test_no_relative_imports() -> None:
    """The test above would not see relative imports."""
    for source in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level > 0), source


def test_diagnostics_need_no_import_of_their_own() -> None:
    code = (
        "import sys, pruned_rnnt; before = 'pruned_rnnt.diagnostics' in sys.modules;"
        "print(before, pruned_rnnt.diagnostics.retained_mass.__name__, hasattr(pruned_rnnt, 'x'))"
    )
    out = run_with_torch(code)
    assert out.stdout.strip() == "False retained_mass False", out.stderr


def test_import_needs_torch_alone() -> None:
    """`import pruned_rnnt` loads no data, plotting or configuration library."""
    heavy = ["lhotse", "sentencepiece", "omegaconf", "matplotlib", "scipy", "rich", "kaldialign"]
    code = (
        "import sys; before = set(sys.modules); import pruned_rnnt;"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    out = run_with_torch(code)
    assert out.stdout.strip() == "[]", out.stderr


def test_import_leaves_the_compiler_out() -> None:
    """Dynamo takes as long to import as torch; once imported, it still keeps losses whole."""
    code = """
import importlib.util, sys, torch, pruned_rnnt
importlib.util.find_spec("torch._dynamo")  # finds the module without importing it
before = "torch._dynamo" in sys.modules
found = []

def backend(graph, _):
    found.extend(getattr(node.target, "__name__", "") for node in graph.graph.nodes)
    return graph

loss = torch.compile(pruned_rnnt.rnnt_loss, fullgraph=True, backend=backend)
loss(torch.zeros(1, 3, 2, 4), torch.ones(1, 1, dtype=torch.int32))
print(before, "row_loss" in found)
"""
    out = run_with_torch(code)
    assert out.stdout.strip() == "False True", out.stderr
