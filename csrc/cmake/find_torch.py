"""Print where the installed torch keeps its headers and libraries: one folder, or nothing.

CMake runs this with the interpreter that the package is built for. torch is not imported: that
would take seconds and needs whatever torch itself needs. Under pip's build isolation the
interpreter's site folders are hidden from `import`, so they are also looked up by `sysconfig`.
"""

import importlib.util
import site
import sysconfig
from pathlib import Path


def candidates() -> list[Path]:
    """Folders that may be an installed torch package, most trusted first."""
    found = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent)
    names = [sysconfig.get_path(key) for key in ("platlib", "purelib")]
    return found + [Path(name) / "torch" for name in (*names, site.getusersitepackages())]


for folder in candidates():
    if (folder / "include/torch/csrc/stable/library.h").is_file():
        print(folder, end="")
        break
