"""The direction of imports, and the modules that the package and its commands load."""

import ast
import functools
import subprocess
import sys
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.torch_forks import run_with_torch

PACKAGE = Path(__file__).parent.parent / "pruned_rnnt"

# The parts that each part may import. A part with sub-folders stands for all of them when it is
# imported; as a row it stands for the modules directly in its folder.
ALLOWED = {
    "system": set(),
    "config": {"system"},
    "licences": set(),
    "pruned_rnnt": {"loss", "ops", "pretrained", "transcribe"},
    "ops/common": set(),
    "ops/lattice": {"ops/common"},
    "ops/joiner": {"ops/common", "ops/lattice"},
    "ops/simple": {"ops/common", "ops/joiner", "ops/lattice"},
    "ops/pruning": {"ops/common"},
    "ops/search": {"ops/common", "ops/joiner"},
    "ops/step": {"ops/common", "ops/joiner", "ops/pruning", "ops/simple"},
    "ops": {
        "ops/common",
        "ops/joiner",
        "ops/lattice",
        "ops/pruning",
        "ops/search",
        "ops/simple",
    },
    "loss": {"ops"},
    "diagnostics": {"ops", "loss"},
    "compat": {"ops", "loss"},
    "data/audio": set(),
    "data/tokens": set(),
    "data/input": {"data/audio", "data/tokens", "licences"},
    "data/prepare": {"data/audio", "data/input", "data/tokens", "licences"},
    "model": {"ops", "loss"},
    "decode/search": {"loss", "model", "ops"},
    "decode/fusion": {"data", "decode/search", "model"},
    "decode/scoring": {"data/tokens"},
    "decode": {
        "data",
        "decode/fusion",
        "decode/scoring",
        "decode/search",
        "model",
    },
    "run/folder": set(),
    "run": {"data", "decode"},
    "train/optim": {"model"},
    "train/engine": {"data", "model", "train/optim"},
    "train/tasks": {"data", "decode", "diagnostics", "licences", "model", "train", "train/engine"},
    "train": {
        "data",
        "decode",
        "licences",
        "model",
        "run",
        "train/engine",
        "train/optim",
        "train/tasks",
    },
    "export": {"data", "decode", "licences", "model", "ops"},
    "transcribe": {"data", "decode", "export", "model"},
    "align": {"data", "decode", "diagnostics", "model", "run", "transcribe"},
    "pretrained": {
        "data",
        "decode",
        "export",
        "interop",
        "licences",
        "model",
        "run",
        "train",
        "transcribe",
    },
    "quantise": {"data", "decode", "export", "pretrained", "transcribe"},
    "finetune": {"data", "decode", "export", "interop", "licences", "model", "pretrained", "train"},
    "interop": {"data", "decode", "loss", "model", "train"},
    "selfcheck": {"loss", "model", "ops", "train/engine", "train/optim"},
    "report": {"align", "data", "decode", "diagnostics", "model", "run", "train"},
}
# Rows that every part may import, and modules and parts that may import every part.
BASE = {"system", "config", "run/folder"}
TOP = {"__main__", "cli", "recipes"}


def _row(module: str) -> str | None:
    """The row of the table for a module; None for those that may import every part."""
    names = [name for name in module.split(".")[1:] if name != "__init__"]
    if not names or names == ["public"]:
        return "pruned_rnnt"
    if names[0] in TOP:
        return None
    rows = (row for row in ("/".join(names[:2]), names[0]) if row in ALLOWED)
    return next(rows, names[0])


def _rows_of(part: str) -> set[str]:
    """The rows that a part of the table stands for."""
    return {row for row in ALLOWED if row == part or row.startswith(f"{part}/")}


def _may_import(row: str) -> set[str]:
    """The rows that the modules of a row may name in their imports."""
    named = {other for part in ALLOWED[row] for other in _rows_of(part)}
    return named | {row, "pruned_rnnt"} | (BASE if row not in BASE else set())


def _may_load(row: str) -> set[str]:
    """The rows whose modules an import of this row may load, directly or through others.

    Every import runs `pruned_rnnt/__init__.py`, which loads the losses and their operators.
    """
    found = {row, "pruned_rnnt"} | BASE | _rows_of("loss") | _rows_of("ops")
    waiting = [row]
    while waiting:
        new = {other for part in ALLOWED[waiting.pop()] for other in _rows_of(part)} - found
        found |= new
        waiting += new
    return found


def _sources() -> dict[str, Path]:
    """The modules of the package; the name of a package ends in `.__init__`."""
    return {
        ".".join((PACKAGE.name, *source.relative_to(PACKAGE).with_suffix("").parts)): source
        for source in PACKAGE.rglob("*.py")
    }


def _named_by(node: ast.AST) -> list[str]:
    """The modules and attributes that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _loaded_by(name: str, sources: Collection[str]) -> set[str]:
    """The modules that importing a name loads by itself: its module and all parents of it."""
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return {each for prefix in prefixes for each in (prefix, f"{prefix}.__init__")} & {*sources}


@functools.cache
def _imports() -> dict[str, set[str]]:
    """For every module of the package, the modules of the package that it imports anywhere."""
    sources = _sources()
    imports: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            for name in _named_by(node):
                parent = name.rpartition(".")[0]
                imports[module].update({name, parent, f"{parent}.__init__"} & sources.keys())
    return imports


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not those of functions or type checkers."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not is_function and not is_typing:
            yield child
            yield from _statements(child)


@functools.cache
def _runs() -> dict[str, set[str]]:
    """For every module, the modules that importing it runs directly, parents included."""
    sources = _sources()
    return {
        module: _loaded_by(module, sources).union(
            *(
                _loaded_by(name, sources)
                for node in _statements(ast.parse(source.read_text(encoding="utf-8")))
                for name in _named_by(node)
            )
        )
        for module, source in sources.items()
    }


def test_every_module_has_a_row() -> None:
    modules = {module for module in _sources() if not module.endswith("__init__")}
    assert {_row(module) for module in modules} - {None} <= ALLOWED.keys()


@pytest.mark.parametrize("row", sorted(ALLOWED))
def test_imports_point_one_way(row: str) -> None:
    allowed = _may_import(row)
    empty = {module for module, imported in _imports().items() if not imported}
    for module, imported in _imports().items():
        for other in imported if _row(module) == row else ():
            # An empty __init__ belongs to the folder below it.
            is_empty_parent = other.endswith("__init__") and other in empty
            assert is_empty_parent or _row(other) in allowed, f"{module} imports {other}"


@pytest.mark.parametrize("row", sorted(ALLOWED))
def test_the_table_is_what_runs(row: str) -> None:
    allowed, runs = _may_load(row), _runs()
    loaded = {module for module in runs if _row(module) == row}
    waiting = list(loaded)
    while waiting:
        module = waiting.pop()
        for other in runs[module] - loaded:
            is_empty_parent = other.endswith("__init__") and runs[other] <= _loaded_by(other, runs)
            assert is_empty_parent or _row(other) in allowed, f"{module} loads {other}"
            loaded.add(other)
            waiting.append(other)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, marks=[] if row in ("train/engine", "decode/search") else pytest.mark.slow
        )
        for row in sorted(ALLOWED)
    ],
)
def test_modules_of_a_fresh_process(row: str) -> None:
    modules = [m for m in _sources() if _row(m) == row and not m.endswith("__init__")]
    code = f"""
import importlib, sys
for module in {modules}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:  # Triton, or a package that `compat` supports
        assert not error.name.startswith("pruned_rnnt"), error
print(*(name for name in sys.modules if name.startswith("pruned_rnnt.")))
"""
    out = run_with_torch(code)
    assert out.stdout, out.stderr
    # A package is that of the modules below it.
    allowed = {m.removesuffix(".__init__") for m in _sources() if _row(m) in _may_load(row)}
    parents = {m.rsplit(".", end)[0] for m in allowed for end in range(1, m.count("."))}
    outside = set(out.stdout.split()) - allowed - parents
    assert not outside


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


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, where nothing is imported."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_losses_need_no_import_of_their_own() -> None:
    """Every name of the package is there at its first use, which imports torch."""
    code = (
        "import sys, pruned_rnnt; before = 'torch' in sys.modules;"
        "from pruned_rnnt import public;"
        "own = {'__version__', 'diagnostics', 'load'};"
        "print(before, set(pruned_rnnt.__all__) == own | set(public.__all__),"
        "all(getattr(pruned_rnnt, name) is not None for name in pruned_rnnt.__all__),"
        "pruned_rnnt.rnnt_loss is public.rnnt_loss)"
    )
    out = run_alone(code)
    assert out.stdout.strip() == "False True True True", out.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["transcribe", "--help"]])
def test_help_loads_no_library(arguments: list[str]) -> None:
    """It comes at once, because torch alone takes more than a second to import."""
    code = (
        "import sys; from pruned_rnnt.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as end: print(end.code)\n"
        "heavy = ('torch', 'numpy', 'lhotse', 'rich', 'importlib.metadata')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = run_alone(code)
    assert out.stdout.splitlines()[-2:] == ["0", "[]"], out.stderr


@pytest.mark.slow
def test_transcribing_loads_no_data_library() -> None:
    """lhotse is for the data of training; with it, the first text comes later."""
    code = (
        "import sys; from pruned_rnnt.pretrained import load; import pruned_rnnt.train.run;"
        "from pruned_rnnt.transcribe import transcribe_command;"
        "from pruned_rnnt.data.audio.features import audio_features;"
        "import numpy; audio_features(numpy.zeros(16000, dtype=numpy.float32));"
        "print([m for m in ('lhotse', 'scipy') if m in sys.modules])"
    )
    out = run_alone(code)
    assert out.stdout.strip() == "[]", out.stderr


def test_losses_need_torch_alone() -> None:
    """The losses load no data, plotting or configuration library."""
    heavy = ["lhotse", "sentencepiece", "omegaconf", "matplotlib", "scipy", "rich", "kaldialign"]
    code = (
        "import sys; before = set(sys.modules); import pruned_rnnt; pruned_rnnt.rnnt_loss;"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    out = run_with_torch(code)
    assert out.stdout.strip() == "[]", out.stderr


@pytest.mark.slow
def test_import_leaves_the_compiler_out() -> None:
    """Dynamo takes as long to import as torch; once imported, it still keeps losses whole."""
    code = """
import importlib.util, sys, torch, pruned_rnnt
pruned_rnnt.rnnt_loss
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
