"""Publish models to repositories of the Hugging Face hub, and fetch them from there.

A repository is named `owner/name` or `hf://owner/name`, both optionally with `@REVISION`. Access
tokens, the cache folder and offline use are those of huggingface_hub (`hf auth login`, HF_HOME,
HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import NamedTuple

from pruned_rnnt.system.optional_packages import MissingPackageError, require

logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"hf:/{1,2}")  # a Path has one slash
# The first line of its errors, which have the reason below.
_STATUS = re.compile(r"\A\d{3} (Client|Server) Error\b.*\s*")
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Not needed to load a model: programs for torch.export, and ONNX files of smaller precision.
_NOT_FETCHED = ["*.pt2", "*.int8.onnx", "*.int4.onnx", "*.fp16.onnx", "*jit*.pt", "*.wav"]


class HubError(ValueError):
    """A repository that cannot be reached or denies access; the message is one line."""


class HubName(NamedTuple):
    """A repository of models; revision: branch, tag or commit, None for the main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def hub_name(text: str) -> HubName:
    """Read a name.

    Raises:
        HubError: it is not of the form `owner/name`.
    """
    match = _NAME.fullmatch(_PREFIX.sub("", text, count=1))
    if match is None:
        raise HubError(f"{text} is not the name of a repository: it needs to be owner/name")
    return HubName(match["repository"], match["revision"])


def local_path(model: Path | str) -> Path:
    """A path on this machine: `model` itself, or where the repository that it names was fetched to.

    `owner/name` without a prefix names a repository if there is no such file or folder.

    Raises:
        HubError: there is no such repository, or it cannot be reached.
        MissingPackageError: huggingface_hub is not installed.
    """
    text = str(model)
    if _PREFIX.match(text) is None and (Path(model).exists() or not _NAME.fullmatch(text)):
        return Path(model)
    if _PREFIX.match(text) is None and Path(model).parent.is_dir():
        return Path(model)  # a missing file of an existing folder: the caller raises the error
    try:
        return fetch(hub_name(text))
    except MissingPackageError as error:
        if _PREFIX.match(text) is None:
            error.msg = (
                f"there is no file or folder {text}, and no repository can be fetched: {error}"
            )
        raise


def source_name(model: Path | str, path: Path) -> str:
    """Where the weights of `model` come from, for chains of licences; empty if `path`, the
    `local_path` of it, is `model` itself."""
    return "" if path == Path(model) else f"Hugging Face hub, {model}"


def fetch(name: HubName) -> Path:
    """Download a repository into huggingface_hub's cache; returns its folder there.

    Files that are already in the cache are not downloaded again.

    Raises:
        HubError, MissingPackageError: as `local_path`.
    """
    require("huggingface_hub")
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            name.repository, revision=name.revision, ignore_patterns=_NOT_FETCHED
        )
    # Errors of the network are those of an HTTP library that differs between versions.
    except Exception as error:
        reason = _first_line(error)
        # What the hub also answers for a private repository without a token.
        if isinstance(error, RepositoryNotFoundError):
            reason += (
                " (check the name; for a private or gated repository, log in with `hf auth login`)"
            )
        raise HubError(
            f"the model {name} is neither a path here nor a repository that can be fetched: "
            f"{reason}"
        ) from error
    return Path(folder)


def push(folder: Path, name: HubName, *, private: bool = False, message: str = "") -> str:
    """Upload an exported folder as one commit; returns the address of the commit.

    Creates the repository and the branch if there are none; the revision `refs/pr/1` is a pull
    request, to which the commit is added. Files of earlier exports that the folder does not have
    are deleted, and logged; others stay. In the uploaded README the examples load the repository
    instead of a local folder.

    Args:
        folder: what `pruned-rnnt export` wrote.
        private: whether a new repository is private.
        message: of the commit.

    Raises:
        HubError: not logged in, no permission, or the revision is a tag.
        MissingPackageError: huggingface_hub is not installed.
    """
    require("huggingface_hub")
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    # Imported here because it loads the whole export, which fetching a model does not need.
    from pruned_rnnt.pretrained.export_folder import EXPORTED_FILES

    exported = {file for names in EXPORTED_FILES.values() for file in names}
    api = HfApi(library_name="pruned_rnnt")
    files = _files_to_push(folder, name)
    try:
        api.create_repo(name.repository, private=private, exist_ok=True)
        # Pull requests, refs/pr/1, are no branches.
        if name.revision is not None and not name.revision.startswith("refs/"):
            tags = api.list_repo_refs(name.repository).tags
            if any(tag.name == name.revision for tag in tags):
                raise HubError(
                    f"{folder} cannot be pushed to {name}: {name.revision} is a tag, needs a branch"
                )
            api.create_branch(name.repository, branch=name.revision, exist_ok=True)
        before = api.list_repo_files(name.repository, revision=name.revision)
        stale = [path for path in before if path in exported and path not in files]
        done = api.create_commit(
            name.repository,
            [
                *(CommitOperationAdd(path, content) for path, content in files.items()),
                *(CommitOperationDelete(path) for path in stale),
            ],
            revision=name.revision,
            commit_message=message or "Export of pruned_rnnt",
        )
    except HubError:
        raise
    # Errors of the network are those of an HTTP library that differs between versions.
    except Exception as error:
        raise HubError(
            f"{folder} cannot be pushed to {name}: {_first_line(error)} (log in with `hf auth "
            "login`, or set HF_TOKEN to a token that may write)"
        ) from error
    if stale:
        logger.info("deleted from %s, of an earlier export: %s", name, ", ".join(stale))
    return str(done.commit_url)


def _files_to_push(folder: Path, name: HubName) -> dict[str, Path | bytes]:
    """The files of the folder by name; the README has the name of the repository."""
    # Imported here because they load the whole export, which fetching a model does not need.
    from pruned_rnnt.export.readme import HERE
    from pruned_rnnt.pretrained.model_card import FILE_NAME as CARD_NAME

    files: dict[str, Path | bytes] = {
        path.name: path for path in sorted(folder.iterdir()) if path.is_file()
    }
    if CARD_NAME in files:
        text = (folder / CARD_NAME).read_text(encoding="utf-8")
        for before, after in (
            (f'load("{HERE}")', f'load("{name}")'),
            (f"transcribe {HERE} ", f"transcribe {name} "),
            (f"finetune {HERE} ", f"finetune {name} "),
        ):
            text = text.replace(before, after)
        files[CARD_NAME] = text.encode()
    return files


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    text = _STATUS.sub("", text, count=1) or text or type(error).__name__
    return text.splitlines()[0].rstrip(".")
