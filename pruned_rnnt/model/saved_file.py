"""Read files of torch.save that may be damaged or come from an untrusted source, and know what
must not be written because they would be refused.

What a file holds is checked before anything reads the elements of its tensors. A tensor may be a
view that repeats its storage, so a small file can describe a tensor that takes hours to read;
containers may repeat each other in the same way, or contain themselves.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# A training state of a large model has some ten thousand values, and 700 for each GPU.
_MOST_VALUES = 500_000
# Several names may share one tensor, such as tied weights.
_MOST_REPEATS = 4
_SMALL_BYTES = 1 << 20
_SHOWN = 80  # characters of a name in a message
# Types that torch reads without running code, compared exactly: a subclass, such as numpy's float64
# of float, may be refused.
_CONTAINERS = {dict, OrderedDict, Counter, list, tuple, set}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray}
_TENSORS = {Tensor, nn.Parameter}
_OF_TORCH = {torch.Size, torch.dtype, torch.device, torch.layout, torch.qscheme}
_ZIP_START = b"PK\x03\x04"
_LFS_START = b"version https://git-lfs"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def describe_unusable(values: Any, file_bytes: int) -> str:
    """Describe the first value that cannot be read safely; empty if there is none.

    Refused are tensors that are larger than their storage, or not dense on the CPU (meta, sparse
    and quantised ones), storages larger than the file, and more than `_MOST_VALUES` values.

    Args:
        values: what `torch.load` returned: nested dicts, lists and tuples.
        file_bytes: size of the file, uncompressed.
    """
    storages: dict[int, int] = {}
    total = count = 0
    waiting = [("", values)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping | list | tuple | set):
            count += len(value)
            if count > _MOST_VALUES:
                return f"it holds more than {_MOST_VALUES:,} values"
            waiting += _members(name, value)
        elif isinstance(value, Tensor):
            if fault := _fault(value):
                return f"the tensor {name} {fault}"
            total += value.numel() * value.element_size()
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    stored = sum(storages.values())
    if stored > file_bytes:
        return f"its tensors have {stored:,} bytes, more than the file"
    if total > _MOST_REPEATS * stored + _SMALL_BYTES:
        return f"its tensors repeat {stored:,} bytes {total // max(stored, 1)} times"
    return ""


def describe_unreadable(values: Any) -> str:
    """Name the first value or key that `read_saved` would refuse; empty if there is none.

    Args:
        values: what `torch.save` is to write: nested dicts, lists and tuples.
    """
    # The user may have named further types to torch.
    known = {*_PLAIN, *_OF_TORCH, *_TENSORS, *torch.serialization.get_safe_globals()}
    count = 0
    waiting = [("", values)]
    while waiting:
        name, value = waiting.pop()
        kind = type(value)
        if kind in _CONTAINERS:
            count += len(value)
            if count > _MOST_VALUES:  # also if it contains itself
                return f"it holds more than {_MOST_VALUES:,} values"
            waiting += _members(name, value)
            if isinstance(value, dict):
                waiting += [(f"a key of {name or 'it'}", key) for key in value]
        elif kind not in known:
            return f"{name} is of type {kind.__module__}.{kind.__qualname__}"
        elif kind in _TENSORS and (fault := _fault(value, of_file=False)):
            return f"{name} {fault}"
    return ""


def _members(name: str, container: Any) -> list[tuple[str, Any]]:
    """The values in a container, with their names in it."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    prefix = f"{name[:_SHOWN]}." if name else ""
    return [(f"{prefix}{str(key)[:_SHOWN]}", item) for key, item in items]


def _fault(value: Tensor, *, of_file: bool = True) -> str:
    """Why a tensor of a file cannot be read safely; empty if it can.

    Args:
        of_file: it was read from a file; otherwise it is to be written, and may be on a GPU.
    """
    is_elsewhere = value.device.type not in (("cpu",) if of_file else ("cpu", "cuda"))
    if value.layout != torch.strided or is_elsewhere or value.is_quantized:
        kind = "quantised" if value.is_quantized else f"{value.device.type}, {value.layout}"
        return f"is not a dense tensor on the CPU ({kind})"
    stored = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > stored:
        return f"of shape {tuple(value.shape)} repeats its {stored:,} bytes"
    return ""


def describe_no_parameters(state: Any) -> str:
    """Why `state` is not a model's parameters, names with tensors; empty if it is."""
    if not isinstance(state, Mapping):
        return f"it is of type {type(state).__name__}, not names with tensors"
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return f"{str(name)[:_SHOWN]!r} is of type {type(value).__name__}, not a tensor"
    return ""


def lfs_advice(path: Path) -> str:
    """For the message about a file that is unreadable: what to do if Git LFS has left it out of a
    clone; else empty."""
    with path.open("rb") as file:
        if file.read(len(_LFS_START)) != _LFS_START:
            return ""
    return ": it is a pointer of Git LFS, run `git lfs pull` in its repository"


class UnusableFileError(ValueError):
    """A file that cannot be used; the message is one line with its path and the reason."""


class NewerFileError(UnusableFileError):
    """The file has a format of a later version of this package."""


class CodeInFileError(UnusableFileError):
    """The file holds an object that can run code when it is loaded."""


def read_saved(
    path: Path,
    kind: str,
    *,
    mapped: bool = False,
    trust: bool = False,
    allowed: Sequence[type] = (),
) -> Any:
    """Read CPU tensors and plain values that torch.save wrote.

    Args:
        path: an existing file.
        kind: the expected kind of file for error messages, for example "checkpoint".
        mapped: tensors are views of the file, for a caller who copies them at once: the file must
            not change until then.
        trust: run the code of the file, as pickle files can hold it.
        allowed: harmless types that the file may hold besides tensors and plain values.

    Raises:
        UnusableFileError: the file is truncated, damaged, of another kind, holds code without
            `trust` (CodeInFileError), or tensors that `describe_unusable` refuses.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        start = file.read(len(_ZIP_START))
    if not start:
        raise UnusableFileError(f"{path} is empty")
    if start != _ZIP_START:
        raise UnusableFileError(f"{path} is damaged or not a {kind}{lfs_advice(path)}")
    try:
        # torch writes checksums but does not verify them.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            size = sum(member.file_size for member in archive.infolist())
            is_program = any(_is_in_root(name, "constants.pkl") for name in archive.namelist())
        if damaged is None and not is_program:
            with torch.serialization.safe_globals(list(allowed)):
                values = torch.load(path, map_location="cpu", weights_only=not trust, mmap=mapped)
    except pickle.UnpicklingError as error:
        # The checksums are right, so the file is not damaged.
        raise CodeInFileError(
            f"{path} is refused: it holds {objects_in(error)}, which can run code; "
            f"a {kind} has only tensors and plain values"
        ) from error
    # Damaged archives raise many kinds of errors: zlib, struct, unicode and key errors, sizes
    # beyond memory, unsupported zip features.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnusableFileError(f"{path} is truncated or damaged ({reason})") from error
    if damaged is not None:
        raise UnusableFileError(f"{path} is damaged: the checksum of {damaged} is wrong")
    if is_program:
        raise UnusableFileError(
            f"{path} is a program of TorchScript, needs a {kind}: pass the file with the parameters"
        )
    if fault := describe_unusable(values, size):
        raise UnusableFileError(f"{path} is refused: {fault}")
    return values


def read_outline(path: Path) -> Any:
    """The plain values of a file of torch.save, with a stand-in for each tensor and other object;
    None if the file is unusable.

    For a look at what a file is; `read_saved` checks its contents and raises errors. No code of the
    file runs, and no tensor is made, which for a thousand of them takes a tenth of a second.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if _is_in_root(name, "data.pkl"))
            with archive.open(name) as file:
                return _Outline(file).load()
    except Exception:  # as for `read_saved`; formats of other programs too
        return None


def _is_in_root(name: str, file: str) -> bool:
    """True for `ROOT/file`: torch.save puts all that it writes in one folder."""
    return name.count("/") == 1 and name.endswith(f"/{file}")


class _Anything:
    """Takes the place of any object while values are unpickled, and ignores what it is given."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __call__(self, *arguments: Any, **options: Any) -> _Anything:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _Outline(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    def persistent_load(self, key: Any) -> Any:
        return _Anything()


def objects_in(error: Exception) -> str:
    """The object that torch refused to load; torch's own message suggests loading it anyway."""
    found = _GLOBAL.search(str(error))
    return f"an object of {found.group(1)}" if found else "an object that is not a tensor"


def check_contents(
    values: Mapping[str, Any],
    path: Path,
    version: int,
    *,
    parameters: Sequence[str],
    optional: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> None:
    """Raise an error for contents that this program cannot use.

    Args:
        values: contents of the file at `path`.
        version: the newest version that this program reads.
        parameters: keys of models' parameters; required, as are version, config and vocab_size.
        optional: keys that may be None.
        needed: other required keys.

    Raises:
        UnusableFileError: a key is missing or of another type, or the file has a newer version
            (NewerFileError).
    """
    required = ("version", "config", "vocab_size", *parameters, *needed)
    missing = [name for name in required if name not in values]
    if missing:
        raise UnusableFileError(f"{path} is damaged: it has no {', '.join(map(repr, missing))}")
    if not isinstance(values["version"], int) or not isinstance(values["config"], dict):
        raise UnusableFileError(f"{path} is damaged: 'version' or 'config' has the wrong type")
    if values["version"] > version:
        raise NewerFileError(
            f"{path} has version {values['version']}, this program reads up to {version}: update "
            "pruned_rnnt"
        )
    size = values["vocab_size"]
    is_absent = size is None and "vocab_size" in optional
    if not is_absent and (not isinstance(size, int) or size < 1):
        raise UnusableFileError(f"{path} is damaged: 'vocab_size' is {str(size)[:20]!r}")
    for name in parameters:
        fault = describe_no_parameters(values[name])
        if fault and not (name in optional and values[name] is None):
            raise UnusableFileError(f"{path} is damaged: {name!r} has no parameters: {fault}")
