"""The files that `pruned-rnnt export` writes in a folder, and which folders it may write in."""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.export import model_file
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME, file_name
from pruned_rnnt.export.precision import QUANTISED
from pruned_rnnt.pretrained import model_card
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.usage_errors import UsageError

_GRAPHS = ("encoder", "decoder", "joiner", "model")
# By format, beside the card and licences.json.
EXPORTED_FILES = {
    "onnx": (
        *(file_name(graph, name) for graph in _GRAPHS for name in ("fp32", *QUANTISED, "fp16")),
        SETTINGS_NAME,
        "recognise.py",
        "tokens.txt",
        "tokens.model",
    ),
    "torch": (model_file.FILE_NAME, *(f"{graph}.pt2" for graph in _GRAPHS)),
    "icefall": ("pretrained.pt", "bpe.model", "tokens.txt"),
    "nemo": ("model.nemo",),
}


def check_output(folder: Path, form: str) -> None:
    """Check the folder that the user names before anything is computed.

    Args:
        form: key of `EXPORTED_FILES`.

    Raises:
        UsageError: it is a file, or the folder of a run; or it has files that the export would
            replace and that are not of an earlier export, or files of another format, which would
            be loaded instead of these.
    """
    for each in (folder, *folder.parents):
        if each.exists() and not each.is_dir():
            raise UsageError(f"--output is {folder}, but {each} is a file, not a folder")
    run = RunFolder(folder)
    if run.config.exists():
        raise UsageError(
            f"--output is {folder}, the folder of a run: name another one, such as "
            f"{run.export / form}"
        )
    own = (model_card.FILE_NAME, run.licences.name, *EXPORTED_FILES[form])
    names = dict.fromkeys((*own, *(name for names in EXPORTED_FILES.values() for name in names)))
    found = [name for name in names if (folder / name).exists()]
    if found and not model_card.is_card(folder / model_card.FILE_NAME):
        raise UsageError(
            f"--output is {folder}, which has {found[0]} and is not the folder of an earlier "
            "export: name another folder, or move that file away"
        )
    if others := [name for name in found if name not in own]:
        raise UsageError(
            f"--output is {folder}, which has an export in another format than {form} "
            f"({', '.join(others)}): name another folder, or delete these files"
        )
