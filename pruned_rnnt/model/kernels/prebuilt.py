"""Variants of kernels that were compiled in advance, one file for each compute capability.

`scripts/compile_kernels.py` writes the files, and csrc/CMakeLists.txt installs them beside the
native libraries:

    lib/encoder_kernels_90.zip
        index.json      {"toolkit": version, "sources": {module: digest},
                         "variants": {variant: function, types, shared bytes, threads, file}}
        0.cubin, 1.cubin, ...

A variant whose source has changed since is not used, but compiled like one that is missing. Machine
code does not depend on the installed version of Triton, and needs a driver of the CUDA toolkit's
major version or a later one.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from pruned_rnnt.model.kernels.binary import Image
from pruned_rnnt.ops.common.native import driver_obstacle, library_folders
from pruned_rnnt.system.whole_files import write_whole

logger = logging.getLogger(__name__)

_INDEX = "index.json"


class Archive:
    """The variants in a file.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._file = zipfile.ZipFile(path)
        index = json.loads(self._file.read(_INDEX))
        self.toolkit: str = index["toolkit"]
        self._sources: dict[str, str] = index["sources"]
        self._variants: dict[str, dict[str, Any]] = index["variants"]

    def image(self, jit: Any, num_warps: int, parts: Sequence[Any]) -> Image | None:
        """A variant; None if it is missing, damaged, or of other sources."""
        found = self._variants.get(_name(jit, num_warps, parts))
        if found is None or self._sources[jit.fn.__module__] != _source_digest(jit.fn.__module__):
            return None
        try:
            with self._lock:
                cubin = self._file.read(found["file"])
        except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            logger.warning("%s cannot be read, so kernels are compiled: %s", self._path, error)
            return None
        return Image(
            name=found["function"],
            cubin=cubin,
            types=tuple(found["types"]),
            shared_bytes=found["shared_bytes"],
            threads=found["threads"],
        )


def image(jit: Any, num_warps: int, parts: Sequence[Any], capability: int) -> Image | None:
    """A variant for GPUs of a compute capability (90 for 9.0), if it was compiled in advance.

    Args:
        jit: Triton's function.
        parts: see `launch.Bound`.
    """
    for each in _archives(capability):
        if (found := each.image(jit, num_warps, parts)) is not None:
            return found
    return None


def is_installed() -> bool:
    """True if there are kernels for some GPUs; CUDA need not have started."""
    return any(any(folder.glob(file_name("*"))) for folder in library_folders())


@cache
def _archives(capability: int) -> list[Archive]:
    # 8.6 and 8.9 also run the machine code for 8.0; Triton's for later ones runs on one alone.
    usable = dict.fromkeys([capability, 80] if capability in (86, 89) else [capability])
    archives = []
    for path in (folder / file_name(each) for each in usable for folder in library_folders()):
        if not path.is_file():
            continue
        try:
            archive = Archive(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            logger.warning("%s cannot be read, so kernels are compiled: %s", path, error)
            continue
        if obstacle := driver_obstacle(archive.toolkit):
            logger.warning("%s is not used, so kernels are compiled: %s", path, obstacle)
            continue
        archives.append(archive)
    return archives


def give_up(capability: int, error: Exception) -> bool:
    """Use the files no more, since a kernel cannot be loaded; False if none is in use."""
    archives = _archives(capability)
    if not archives:
        return False
    archives.clear()
    logger.warning("kernels are compiled, since one of the package cannot be loaded: %s", error)
    return True


def file_name(capability: int | str) -> str:
    return f"encoder_kernels_{capability}.zip"


def write(
    path: Path, images: Mapping[tuple[Any, int, tuple[Any, ...]], Image], toolkit: str
) -> None:
    """Write an archive.

    Args:
        images: by Triton's function, number of warps and parts.
        toolkit: version of the CUDA toolkit whose assembler made them.
    """
    modules = sorted({jit.fn.__module__ for jit, *_ in images})
    files: dict[bytes, str] = {}
    variants = {}
    for (jit, num_warps, parts), each in images.items():
        variants[_name(jit, num_warps, parts)] = {
            "function": each.name,
            "types": each.types,
            "shared_bytes": each.shared_bytes,
            "threads": each.threads,
            "file": files.setdefault(each.cubin, f"{len(files)}.cubin"),
        }
    index = {
        "toolkit": toolkit,
        "sources": {module: _source_digest(module) for module in modules},
        "variants": variants,
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in (
            (_INDEX, json.dumps(index).encode()),
            *((n, c) for c, n in files.items()),
        ):
            # Without the time, so that equal kernels make equal files.
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    write_whole(path, content.getvalue())


def _name(jit: Any, num_warps: int, parts: Sequence[Any]) -> str:
    return f"{jit.fn.__module__}.{jit.__name__} {num_warps} {list(parts)}"


def _folder_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


# Taken when these modules are imported: the files may change while the process runs.
_OWN_FOLDER = _folder_digest()


@cache
def _source_digest(module: str) -> str:
    """Of a module with kernels and of this folder, which has all functions that kernels share."""
    file = sys.modules[module].__file__
    assert file is not None
    return hashlib.sha256(_OWN_FOLDER + Path(file).read_bytes()).hexdigest()
