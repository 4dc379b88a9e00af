"""The workflows of CI: what they run, with which rights, and that their actions cannot change."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.build_wheels import TORCH_VERSIONS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(path.name for path in FOLDER.glob("*.yml"))
PINNED = re.compile(r"uses: ([\w.-]+/[\w./-]+@[0-9a-f]{40}) # (v\d+\.\d+\.\d+)$")
# The jobs that may do more than read the repository.
RIGHTS = {
    ("docs.yml", "deploy"): {"pages": "write", "id-token": "write"},
    ("wheels.yml", "publish"): {"id-token": "write", "attestations": "write"},
}


def read(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


def jobs(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(name)["jobs"]
    return found


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def test_there_are_workflows() -> None:
    assert WORKFLOWS == ["docs.yml", "nightly.yml", "tests.yml", "wheels.yml"]


def test_actions_are_pinned_to_one_commit_each() -> None:
    versions: dict[str, set[tuple[str, str]]] = {}
    for name in WORKFLOWS:
        lines = [line.strip() for line in (FOLDER / name).read_text("utf-8").splitlines()]
        used = [line.removeprefix("- ") for line in lines if re.match(r"(- )?uses:", line)]
        assert len(used) == sum("uses" in s for job in jobs(name).values() for s in job["steps"])
        for line in used:
            found = PINNED.fullmatch(line)
            assert found, f"{name}: {line} needs a commit and its version as a comment"
            action, _, commit = found[1].partition("@")
            versions.setdefault(action, set()).add((commit, found[2]))
    assert all(len(found) == 1 for found in versions.values()), versions


@pytest.mark.parametrize("name", WORKFLOWS)
def test_rights_are_the_least(name: str) -> None:
    assert read(name)["permissions"] == {"contents": "read"}
    assert "group" in read(name)["concurrency"]
    for key, job in jobs(name).items():
        assert job.get("permissions", {}) == RIGHTS.get((name, key), {}), key
        assert job["timeout-minutes"] <= 120, key
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            # Text of others (titles, branch names) in a script would run as code.
            assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_workflow_runs_others_code_with_secrets(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "pull_request_target" not in text
    assert "secrets." not in text


def test_ci_runs_the_documented_commands_with_the_supported_versions() -> None:
    workflow = read("tests.yml")
    triggers = workflow[True]  # YAML reads `on` as a boolean
    assert set(triggers) == {"push", "pull_request"}
    tests, everything = workflow["jobs"]["tests"], workflow["jobs"]["everything"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert commands(tests) == "bash scripts/test.sh"
    assert f"`{commands(tests)}`" in readme
    assert commands(everything) == "bash .ci/run"
    assert (ROOT / ".ci/run").is_file()
    matrix = tests["strategy"]["matrix"]
    assert tuple(matrix["torch"]) == TORCH_VERSIONS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert commands(jobs("nightly.yml")["newest"]) == "bash .ci/run"
    support = (ROOT / "docs/reference/support.md").read_text(encoding="utf-8")
    for version in (*matrix["python"], *(v.removesuffix(".0") for v in matrix["torch"])):
        assert version in support


def test_dependency_updates_cover_actions_and_packages() -> None:
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))
    found = {each["package-ecosystem"]: each["directory"] for each in updates["updates"]}
    assert found == {"github-actions": "/", "pip": "/", "docker": "/scripts"}
    assert (ROOT / "scripts/Dockerfile").is_file()


def test_the_tag_that_publishes_must_be_the_version() -> None:
    publish = jobs("wheels.yml")["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["needs"] == ["cpu", "cuda"]
    assert "GITHUB_REF_NAME#v" in commands(publish)
