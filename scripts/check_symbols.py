"""Checks that a compiled library uses only the stable C interface of torch.

    python scripts/check_symbols.py [LIBRARY ...]

Without arguments, checks the libraries of the installed package. Lists the undefined symbols of a
library with `nm`, and fails if one belongs to `at::`, `c10::`, `torch::` or `caffe2::`: those
change between versions of torch, so that the library would work with one version only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

UNSTABLE = re.compile(r"\b(at|c10|torch|caffe2)::")


def undefined_symbols(library: Path) -> list[str]:
    """Demangled names of the undefined symbols of the library."""
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(library)]
    if shutil.which(command[0]) is None:
        sys.exit("nm is not on the path: install binutils")
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.strip().partition(" ")[2] for line in listing.splitlines() if line.strip()]


def unstable_symbols(library: Path) -> list[str]:
    """The undefined symbols that belong to torch's C++ interface."""
    return [name for name in undefined_symbols(library) if UNSTABLE.search(name)]


def installed_libraries() -> list[Path]:
    """The libraries that `import pruned_rnnt` would load."""
    from pruned_rnnt.ops.common.native import library_folders

    return [path for folder in library_folders() for path in sorted(folder.glob("*.so"))]


def main(arguments: list[str]) -> int:
    libraries = [Path(argument) for argument in arguments] or installed_libraries()
    if not libraries:
        print("no library to check: none is installed, and no argument names one")
        return 1
    bad = 0
    for library in libraries:
        unstable = unstable_symbols(library)
        shims = sum("torch_" in name for name in undefined_symbols(library))
        print(f"{library}: {shims} symbols of torch's C interface, {len(unstable)} unstable")
        for name in unstable:
            print(f"  {name}")
        bad += len(unstable)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
