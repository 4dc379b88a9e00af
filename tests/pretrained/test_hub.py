"""Models from and to the hub: huggingface_hub itself runs, without a network.

Fetching reads a cache in huggingface_hub's own layout; pushing stops where a commit would be sent.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import soundfile

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.finetune.source import load_source
from pruned_rnnt.licences.chain import read_chain
from pruned_rnnt.pretrained.found_model import NoModelError
from pruned_rnnt.pretrained.hub import HubError, hub_name, local_path, push
from pruned_rnnt.system.optional_packages import MissingPackageError
from pruned_rnnt.train.experiment import FinetuneConfig
from tests.pretrained.saved_models import (
    make_model,
    make_tokenizer,
    save_file,
    save_icefall,
    save_run,
)
from tests.transcribe.random_model import sound

COMMIT = "0123456789012345678901234567890123456789"
needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="needs huggingface_hub"
)


@pytest.fixture
def hub() -> ModuleType:
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors

    return huggingface_hub


@pytest.fixture
def cache(hub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, from which alone huggingface_hub reads."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def snapshot_folder(cache: Path, name: str, revision: str = "main") -> Path:
    """The folder of a commit in the cache's layout."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


@needs_hub
def test_model_of_a_repository_is_loaded(cache: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    expected = save_file(cache.parent / "here", model, tokenizer)
    text = pruned_rnnt.load(expected).transcribe(sound(2.0)).text
    save_file(snapshot_folder(cache, "owner/file"), model, tokenizer)
    save_icefall(snapshot_folder(cache, "owner/icefall", "v1") / "x", model, tokenizer)
    for name in ("owner/file", "hf://owner/file"):
        assert pruned_rnnt.load(name).transcribe(sound(2.0)).text == text
    folder = local_path("owner/icefall@v1") / "x"
    assert pruned_rnnt.load(folder).transcribe(sound(2.0)).text == text


@needs_hub
def test_commands_take_a_repository(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    save_file(snapshot_folder(cache, "owner/model"), make_model(tokenizer), tokenizer)
    soundfile.write(tmp_path / "a.wav", sound(2.0), 16000)
    assert main(["transcribe", "hf://owner/model", str(tmp_path / "a.wav")]) == 0
    assert len(capsys.readouterr().out.split()) > 2
    for command, code in (
        (["transcribe", "owner/other", "a.wav"], EXIT_FAILED),
        (["finetune", "owner/other", str(tmp_path)], EXIT_USAGE),
    ):
        assert main(command) == code
        shown = capsys.readouterr().err.strip()
        assert "the model owner/other is neither a path here nor a repository" in shown
        assert len(shown.splitlines()) == 1


@needs_hub
def test_paths_come_before_repositories(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp/run").mkdir(parents=True)
    assert local_path("exp/run") == Path("exp/run")
    assert local_path("exp/absent") == Path("exp/absent")  # a typing error in a local path
    assert local_path("/absent/run") == Path("/absent/run")
    assert local_path("absent.pt") == Path("absent.pt")
    with pytest.raises(HubError, match="the model owner/name is neither"):
        local_path("owner/name")


@needs_hub
def test_sources_have_the_name_of_the_repository(cache: Path) -> None:
    """The folder in the cache has that of a commit."""
    tokenizer = make_tokenizer()
    save_icefall(snapshot_folder(cache, "owner/calls", "v1"), make_model(tokenizer), tokenizer)
    assert load_source(Path("owner/calls@v1"), FinetuneConfig()).name == "calls"
    assert load_source(Path("hf://owner/calls@v1"), FinetuneConfig()).name == "calls"


@needs_hub
def test_models_of_repositories_are_imported(cache: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    save_icefall(snapshot_folder(cache, "owner/calls"), make_model(tokenizer), tokenizer)
    assert main(["import", "owner/calls", str(tmp_path / "run")]) == 0
    chain = read_chain(tmp_path / "run")
    assert chain is not None
    assert chain.origins[-1].licence.source == "Hugging Face hub, owner/calls"


@needs_hub
@pytest.mark.parametrize("error", ["RepositoryNotFoundError", "RevisionNotFoundError"])
def test_the_reason_of_the_hub_is_shown(
    hub: ModuleType, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    kind = getattr(hub.errors, error)
    # Its own arguments differ between versions.
    raised = type("Refused", (kind,), {"__init__": lambda self, text: OSError.__init__(self, text)})

    def refuse(*_: Any, **__: Any) -> None:
        raise raised("404 Client Error. (Request ID: 1)\n\nNot Found for url: x.\nMore.")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(HubError, match=r"can be fetched: Not Found for url: x( \(|$)") as caught:
        local_path("owner/name")
    assert ("hf auth login" in str(caught.value)) == (error == "RepositoryNotFoundError")


@needs_hub
def test_an_incomplete_download_is_named(cache: Path) -> None:
    (snapshot_folder(cache, "owner/model") / "README.md").write_text("a model")
    with pytest.raises(
        NoModelError, match=r"has README\.md.* the download of owner/model is incom"
    ):
        pruned_rnnt.load("owner/model")


def test_names() -> None:
    assert hub_name("hf://a/b-c.d@v1") == ("a/b-c.d", "v1")
    assert hub_name("a/b") == ("a/b", None)
    assert str(hub_name("hf:/a/b@x")) == "a/b@x"
    for wrong in ("a", "a/b/c", "hf://a", "a b/c"):
        with pytest.raises(HubError, match="needs to be owner/name"):
            hub_name(wrong)


def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    wanted = r"huggingface-hub is not .*pruned_rnnt\[hub\]"
    with pytest.raises(
        MissingPackageError, match=f"no file or folder owner/name, and .*: {wanted}"
    ):
        pruned_rnnt.load("owner/name")
    with pytest.raises(MissingPackageError, match=f"^{wanted}"):
        pruned_rnnt.load("hf://owner/name")
    assert main(["export", str(tmp_path), "--format", "torch", "--push", "a/b"]) == EXIT_FAILED
    assert "pip install 'pruned_rnnt[hub]'" in capsys.readouterr().err


class Server:
    """Stands in for the hub behind HfApi: keeps what is created and committed."""

    def __init__(self, files: tuple[str, ...] = ()) -> None:
        self.files = files
        self.created: list[tuple[str, bool]] = []
        self.commits: list[dict[str, Any]] = []

    def create_repo(self, api: Any, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.created.append((repo_id, private))

    def list_repo_files(self, api: Any, repo_id: str, **_: Any) -> list[str]:
        return list(self.files)

    def create_commit(self, api: Any, repo_id: str, operations: Any, **details: Any) -> Any:
        operations = list(operations)
        added = {
            item.path_in_repo: content
            if isinstance(content := item.path_or_fileobj, bytes)
            else Path(content).read_bytes()
            for item in operations
            if hasattr(item, "path_or_fileobj")
        }
        deleted = [item.path_in_repo for item in operations if hasattr(item, "is_folder")]
        message = details["commit_message"]
        self.commits.append({"added": added, "deleted": deleted, "message": message})
        return type("CommitInfo", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})()


@pytest.mark.slow
@needs_hub
@pytest.mark.usefixtures("without_programs")
def test_export_is_pushed_in_one_commit(
    hub: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stale = ["encoder.int8.onnx", "model.nemo", "tokens.txt"]
    others = ("notes.md", "requirements.txt", "results.json", "handler.py", "model.safetensors")
    server = Server(files=("model.pt", *stale, *others, "old/model.nemo"))
    for name in ("create_repo", "list_repo_files", "create_commit"):
        call = getattr(server, name)
        monkeypatch.setattr(
            hub.HfApi, name, lambda api, *args, call=call, **kwargs: call(api, *args, **kwargs)
        )
    tokenizer = make_tokenizer()
    run = save_run(tmp_path / "run", make_model(tokenizer), tokenizer)
    command = ["export", str(run), "--format", "torch", "--push", "me/model", "--private"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "pushed to https://hub/me/model/commit/1" in shown.out
    assert f"deleted from me/model, of an earlier export: {', '.join(stale)}" in shown.err
    assert server.created == [("me/model", True)]
    (commit,) = server.commits
    folder = run / "export/torch"
    assert commit["added"].keys() == {path.name for path in folder.iterdir()}
    assert commit["added"]["model.pt"] == (folder / "model.pt").read_bytes()
    assert commit["deleted"] == stale
    assert commit["message"] == "run, step-00000007"
    card = commit["added"]["README.md"].decode()
    assert 'pruned_rnnt.load("me/model")' in card
    assert "pruned-rnnt transcribe me/model a.wav" in card
    assert 'load(".")' in (folder / "README.md").read_text()
    # The hub's own reader takes the card.
    data = hub.ModelCard(card).data
    assert data.license == "unknown"
    assert data.pipeline_tag == "automatic-speech-recognition"


@needs_hub
def test_a_new_branch_is_created(
    hub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, branches = Server(), []
    for name in ("create_repo", "create_commit"):
        call = getattr(server, name)
        monkeypatch.setattr(
            hub.HfApi, name, lambda api, *args, call=call, **kwargs: call(api, *args, **kwargs)
        )

    def create_branch(api: Any, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        assert exist_ok
        branches.append(branch)

    def list_repo_files(api: Any, repo_id: str, *, revision: str | None) -> list[str]:
        assert revision in (None, "refs/pr/1", *branches)
        return []

    tags = SimpleNamespace(tags=[SimpleNamespace(name="v1")])
    monkeypatch.setattr(hub.HfApi, "create_branch", create_branch)
    monkeypatch.setattr(hub.HfApi, "list_repo_files", list_repo_files)
    monkeypatch.setattr(hub.HfApi, "list_repo_refs", lambda *_: tags)
    (tmp_path / "model.pt").write_bytes(b"model")
    for name in ("me/model", "me/model@new", "me/model@refs/pr/1"):
        push(tmp_path, hub_name(name))
    assert branches == ["new"]  # a pull request is no branch
    assert len(server.commits) == 3
    with pytest.raises(HubError, match=r"to me/model@v1: v1 is a tag, needs a branch$"):
        push(tmp_path, hub_name("me/model@v1"))


@needs_hub
def test_refused_push_is_one_line(
    hub: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise hub.errors.LocalTokenNotFoundError("Token is required\nsecond line")

    monkeypatch.setattr(hub.HfApi, "create_repo", refuse)
    tokenizer = make_tokenizer()
    run = save_run(tmp_path / "run", make_model(tokenizer), tokenizer)
    assert main(["export", str(run), "--format", "icefall", "--push", "me/model"]) == EXIT_FAILED
    shown = capsys.readouterr().err.strip()
    assert "cannot be pushed to me/model: Token is required (log in with `hf auth" in shown
    assert len(shown.splitlines()) == 1
    assert main(["export", str(run), "--format", "icefall", "--push", "model"]) == EXIT_FAILED
    assert "needs to be owner/name" in capsys.readouterr().err
    assert main(["export", str(run), "--format", "icefall", "--private"]) == EXIT_USAGE
