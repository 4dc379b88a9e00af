"""The documentation: files that a page names exist, and its examples run."""

from __future__ import annotations

import html
import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import pruned_rnnt
from pruned_rnnt.cli import transcribe
from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.run.folder import RunFolder
from scripts.benchmark import pages
from tests.test_imports import ALLOWED

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = ("pruned_rnnt/", "csrc/", "recipes/", "configs/", "scripts/", "tests/", "docs/")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=str)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if name.startswith(FOLDERS)}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "recipes").rglob("*.md")], ids=str)
def test_code_fits_beside_the_tables_of_contents(page: Path) -> None:
    """docs/stylesheets/site.css makes room for 100 characters; longer lines scroll."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    long = [line for block in blocks for line in block.splitlines() if len(line) > 100]
    assert not long, f"wrap {long}"


def test_import_table_equals_the_tested_one() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("<!-- imports -->")[2].partition("<!-- end -->")[0]
    printed = {}
    for line in table.strip().splitlines()[2:]:
        part, *allowed = re.findall(r"`([\w/]+)`", line)
        printed[part] = set(allowed)
    assert printed == ALLOWED


def blocks_of(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_loss_in_your_recipe_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """The code blocks of the page form one program, which learns to transcribe its text."""
    names: dict[str, Any] = {}
    for block in blocks_of("tutorials/loss_in_your_recipe.md"):
        exec(compile(block, "loss_in_your_recipe.md", "exec"), names)
    history = names["history"]
    assert history[-1] < 0.1 * history[0]
    out = capsys.readouterr().out
    assert "s_range=5" in out
    text, recognised = re.findall(r"^(?:text|recognised) +(\[.*\])$", out, flags=re.MULTILINE)
    assert recognised == text


def test_the_diagnostics_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks_of("reference/diagnostics.md"):
        exec(block, names)
    assert "s_range=5" in capsys.readouterr().out


def test_pages_show_the_committed_rows() -> None:
    named = set()
    for path in pages.PAGES:
        page = path.read_text(encoding="utf-8")
        assert pages.rendered(page) == page, "run python -m scripts.benchmark.pages"
        named.update(re.findall(r"<!-- rows: (\w+) -->", page))
    assert named == set(pages.TABLES)


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.stem)
def test_no_measured_number_outside_the_tables(path: Path) -> None:
    text = pages.text_outside(path.read_text(encoding="utf-8"))
    assert not re.findall(r"\d[\d.,]*\s?(?:ms|s|MiB|GiB|x|times|%)(?!\w)", text)


@pytest.mark.parametrize("picture", pages.PICTURES, ids=lambda picture: picture.name)
def test_pictures_show_the_committed_rows(picture: pages.Picture) -> None:
    drawn = html.unescape(pages.path_of(picture).read_text(encoding="utf-8"))
    assert pages.description(picture) in drawn, "run python -m scripts.benchmark.pages"


def test_newest_run_has_the_rows_measured_side_by_side() -> None:
    def row(system: str, commit: str, time: float) -> pages.Row:
        return {"case": "c", "system": system, "commit": commit, "median_ms": time}

    rows = [row("peer", "a", 1), row("pruned_rnnt", "a", 2), row("peer", "b", 3)]
    rows += [row("other", "a", 4), row("pruned_rnnt", "b", 5), row("pruned_rnnt", "b", 6)]
    run = pages.newest_run(rows, "c")
    assert {system: row["median_ms"] for system, row in run.items()} == {
        "pruned_rnnt": 6,
        "peer": 3,
    }
    assert next(iter(run)) == "pruned_rnnt"
    assert pages.newest_run(rows[:1], "c") == {}


def test_a_newer_run_without_peers_stands_beside_the_last_with_them() -> None:
    old, peer, new = (
        {"case": "c", "system": system, "commit": commit}
        for system, commit in (("pruned_rnnt", "1"), ("peer", "1"), ("pruned_rnnt", "2"))
    )
    both = [{"pruned_rnnt": new}, {"pruned_rnnt": old, "peer": peer}]
    assert pages.compared_runs([old, peer, new], "c") == both
    assert pages.compared_runs([new, old, peer], "c") == both[1:]
    assert pages.compared_runs([old, new], "c") == both[:1]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/compat.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    """mkdocs checks only links between pages of the site."""
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing, f"{page} links {missing}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_the_site_stay_in_its_folder(page: Path) -> None:
    """mkdocs refuses the others: name files outside docs/ in backticks."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8"))
    site = ROOT / "docs"
    outside = [link for link in links if site not in (page.parent / link).resolve().parents]
    assert not outside, f"{page.name} links {outside}"


@pytest.mark.parametrize("page", ["docs/tutorials/transcribe_and_export.md", "--help"])
def test_transcribe_names_the_formats_that_it_takes(page: str) -> None:
    text = transcribe.HELP if page == "--help" else (ROOT / page).read_text(encoding="utf-8")
    endings = {suffix[1:] for suffix in AUDIO_SUFFIXES} - {"oga", "aif", "aifc"}  # other names
    assert endings <= set(re.findall(r"\w+", text))


def test_readme_example_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["encoder_out"].grad.isfinite().all()


def test_citation_and_changelog_have_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = OmegaConf.load(ROOT / "CITATION.cff")
    assert str(citation.version) == pruned_rnnt.__version__
    assert citation.license == project["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\d\S*) \((.*)\)$", changelog, flags=re.MULTILINE)[0]
    assert newest == (pruned_rnnt.__version__, str(citation["date-released"]))


@pytest.mark.parametrize(
    "path",
    [
        ".mkdocs.yml",
        ".pre-commit-config.yaml",
        ".github/dependabot.yml",
        *(
            f".github/ISSUE_TEMPLATE/{name}.yml"
            for name in ("bug", "training", "feature", "config")
        ),
    ],
)
def test_yaml_of_the_project_can_be_read(path: str) -> None:
    # Not by OmegaConf, which takes the expressions of workflows for its own.
    assert yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", ["pruned_rnnt", "pruned_rnnt.diagnostics"])
def test_reference_has_every_public_name(module: str) -> None:
    pages_text = "".join(p.read_text(encoding="utf-8") for p in ROOT.glob("docs/reference/*.md"))
    names = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", pages_text, flags=re.MULTILINE))
    # The module diagnostics has pages of its own.
    public = {name for name in importlib.import_module(module).__all__ if not name.startswith("__")}
    public.discard("diagnostics")
    assert public <= names


def test_the_page_of_a_runs_folder_lists_its_files() -> None:
    text = (ROOT / "docs/run_folder.md").read_text(encoding="utf-8")
    listed = {name.replace("-N.", "-3.") for name in re.findall(r"^\| `([^`]+)`", text, re.M)}
    run = RunFolder(Path("run"))
    averages = (run.average(3), run.span_average(3))
    paths = {path.name for path in (*vars(run).values(), *averages)} - {"run"}
    assert listed == paths
