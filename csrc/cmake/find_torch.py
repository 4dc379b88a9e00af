"""Print where the installed torch keeps its headers and libraries: one folder, or nothing.

CMake runs this with the interpreter that the package is built for. torch is not imported: that
would take seconds and needs whatever torch itself needs. Under pip's build isolation the
interpreter's site folders are hidden from `import`, so they are also looked up by `sysconfig`.
uv and build isolate by an environment of their own, in which `sysconfig` does not know the one
that the package is for: where that is activated, PATH, VIRTUAL_ENV or CONDA_PREFIX has it, and uv's
default is `.venv` in the folder where it was called. Any torch from 2.11 on will do, because the
libraries serve all of them.
"""

import importlib.util
import os
import site
import sysconfig
from pathlib import Path

_ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")


def candidates() -> list[Path]:
    """Folders that may be an installed torch package, most trusted first."""
    found = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent)
    names = [sysconfig.get_path(key) for key in ("platlib", "purelib")]
    found += [Path(name) / "torch" for name in (*names, site.getusersitepackages())]
    programs = [Path(entry) for entry in os.get_exec_path() if entry]
    # conda's comes last, as its `base` may be active beside uv's `.venv`.
    active, conda = ([Path(x)] if (x := os.environ.get(name)) else [] for name in _ACTIVE)
    for environment in (
        *active,
        *(folder.parent for folder in programs),
        Path(os.environ.get("PWD", ".")) / ".venv",
        Path(__file__).parents[2] / ".venv",
        *conda,
    ):
        found += sorted(environment.glob("lib/python3.*/site-packages/torch"))
    return found


for folder in candidates():
    if (folder / "include/torch/csrc/stable/library.h").is_file():
        print(folder, end="")
        break
