"""Find out what kind of model is at a path: a run, a model file, an ONNX folder, an icefall model,
a model of NeMo or transformers.

run       a folder with config.yaml, or a checkpoint in one
file      model.pt of `pruned-rnnt export --format torch`, or its folder
onnx      a folder of `pruned-rnnt export --format onnx`
icefall   a .pt file of icefall's Zipformer recipe with bpe.model or tokens.txt, or their folder
nemo      a .nemo archive, a folder with one, or a folder of transformers with config.json
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pruned_rnnt.export import model_file
from pruned_rnnt.interop.nemo.files import CONFIG_JSON, WEIGHTS
from pruned_rnnt.model.saved_file import read_outline
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine import checkpoint

TOKEN_FILES = ("bpe.model", "tokens.txt")
# Where icefall's recipes, and repositories of its models, keep checkpoints and tokens.
_CHECKPOINT_FOLDERS = (".", "exp")
_TOKEN_FOLDERS = (".", "..", "data/lang*", "../data/lang*")
_PRETRAINED = "pretrained.pt"
_NUMBERED = re.compile(r"(epoch|checkpoint)-\d+\.pt")
_SHOWN_NAMES = 8


class NoModelError(UsageError):
    """There is no model at a path; the message lists what is there and what is needed."""


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model that was found.

    path: of a run, its folder; of a model file, icefall checkpoint or NeMo archive, the file; of an
        ONNX export or a model of transformers, the folder.
    checkpoint: of a run: the checkpoint that was named; None for that of the run's settings.
    tokens: of an icefall model: bpe.model or tokens.txt.
    """

    kind: Literal["run", "file", "onnx", "icefall", "nemo"]
    path: Path
    checkpoint: Path | None = None
    tokens: Path | None = None

    @property
    def settings(self) -> list[str]:
        """Of a run: the setting that chooses the checkpoint that was named, if one was."""
        return [] if self.checkpoint is None else [f"decode.checkpoint={self.checkpoint}"]


def find_model(path: Path, tokens: Path | None = None) -> FoundModel:
    """The model in the folder or file at `path`.

    Args:
        tokens: of an icefall checkpoint; default: bpe.model or tokens.txt near it.

    Raises:
        NoModelError: there is none.
    """
    if path.is_dir():
        return _in_folder(path, tokens)
    if not path.is_file():
        raise NoModelError(f"neither a run nor an exported model at {path}: it does not exist")
    if path.suffix == ".nemo":
        return FoundModel(kind="nemo", path=path)
    kind = _format_of(path)
    if kind == model_file.FORMAT:
        return FoundModel(kind="file", path=path)
    if kind == checkpoint.FORMAT:
        folder = next((p for p in path.parents if RunFolder(p).config.is_file()), None)
        if folder is None:
            raise NoModelError(f"{path}: the checkpoint is not in the folder of its run")
        return FoundModel(kind="run", path=folder, checkpoint=path)
    if path.suffix == ".onnx" and (path.parent / _settings_name()).is_file():
        return FoundModel(kind="onnx", path=path.parent)
    if path.suffix != ".pt":
        raise NoModelError(
            f"{path} is not a model file: pass a run, a model.pt of `pruned-rnnt export --format "
            "torch`, a folder of `--format onnx`, an icefall .pt file with its tokens beside it, "
            "or a .nemo archive"
        )
    tokens = tokens or _tokens_near(path)
    if tokens is None and not _is_icefall_name(path.name):
        return FoundModel(kind="file", path=path)  # loading it raises an error with the reason
    return _icefall(path, tokens)


def _in_folder(folder: Path, tokens: Path | None) -> FoundModel:
    if RunFolder(folder).config.is_file():
        return FoundModel(kind="run", path=folder)
    if (folder / model_file.FILE_NAME).is_file():
        return FoundModel(kind="file", path=folder / model_file.FILE_NAME)
    if any(folder.glob("*.onnx")) and (folder / _settings_name()).is_file():
        return FoundModel(kind="onnx", path=folder)
    found = _icefall_checkpoint(folder)
    has_config = (folder / CONFIG_JSON).is_file()
    # A repository of the hub may have a model in both formats, or a config.json beside an archive.
    if found is None and not (has_config and (folder / WEIGHTS).is_file()):
        archive = _only_archive(folder)
        if archive is not None:
            return FoundModel(kind="nemo", path=archive)
    if found is None and has_config:
        return FoundModel(kind="nemo", path=folder)
    if found is None:
        raise NoModelError(
            f"no model in {folder}, which has {_names_in(folder)}. Needed: config.yaml (a run), "
            f"{model_file.FILE_NAME} (pruned-rnnt export --format torch), {_settings_name()} with "
            "*.onnx files (--format onnx), pretrained.pt or epoch-N.pt of icefall with "
            f"{' or '.join(TOKEN_FILES)}, a .nemo archive, or config.json of transformers"
        )
    return _icefall(found, tokens or _tokens_near(found))


def _settings_name() -> str:
    # Imported here because most models do not need the module, which describes ONNX graphs.
    from pruned_rnnt.export.onnx_folder import SETTINGS_NAME

    return SETTINGS_NAME


def _icefall(path: Path, tokens: Path | None) -> FoundModel:
    if tokens is None:
        raise NoModelError(
            f"{path}: there is no {' or '.join(TOKEN_FILES)} beside this icefall checkpoint"
        )
    return FoundModel(kind="icefall", path=path, tokens=tokens)


def _icefall_checkpoint(folder: Path) -> Path | None:
    """pretrained.pt, or the only epoch-N.pt or checkpoint-N.pt.

    Raises:
        NoModelError: there are several.
    """
    for place in _CHECKPOINT_FOLDERS:
        if (folder / place / _PRETRAINED).is_file():
            return folder / place / _PRETRAINED
        found = sorted(p for p in (folder / place).glob("*.pt") if _is_icefall_name(p.name))
        if len(found) > 1:
            raise NoModelError(
                f"{folder} has several checkpoints of icefall "
                f"({_shown([path.name for path in found])}): pass the path of one of them"
            )
        if found:
            return found[0]
    return None


def _only_archive(folder: Path) -> Path | None:
    """The only .nemo archive; None if there is none.

    Raises:
        NoModelError: there are several.
    """
    found = sorted(path for path in folder.glob("*.nemo") if path.is_file())
    if len(found) > 1:
        raise NoModelError(
            f"{folder} has several .nemo archives ({_shown([path.name for path in found])}): pass "
            "the path of one of them"
        )
    return found[0] if found else None


def _is_icefall_name(name: str) -> bool:
    return name == _PRETRAINED or _NUMBERED.fullmatch(name) is not None


def _tokens_near(path: Path) -> Path | None:
    """bpe.model or tokens.txt of an icefall checkpoint; None if there is none."""
    for place in _TOKEN_FOLDERS:
        for name in TOKEN_FILES:
            for found in sorted(path.parent.glob(f"{place}/{name}")):
                return found
    return None


def _format_of(path: Path) -> str:
    """The format that a file of this package names; empty for other files."""
    values = read_outline(path)
    return str(values.get("format", "")) if isinstance(values, dict) else ""


def _names_in(folder: Path) -> str:
    names = (entry.name for entry in folder.iterdir())
    return _shown(sorted(name for name in names if not name.startswith("."))) or "no files"


def _shown(names: list[str]) -> str:
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
