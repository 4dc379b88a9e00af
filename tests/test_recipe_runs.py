"""`python -m scripts.recipe_runs`: plans, a run from training to its line, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.recipe_runs.__main__ import main, metrics
from scripts.recipe_runs.plan import read_plan
from scripts.recipe_runs.table import read_lines, table
from tests.tiny_corpus import make_corpus, tiny_overrides

PLAN = """
config: synthetic
settings: [train.log_every=1]
splits: [dev]
searches:
  greedy: []
  beam: [decode.method=modified_beam]
variants:
  plain:
  wide:
    settings: [model.joiner_dim=32]
    searches: [beam]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_plan_has_defaults_and_what_the_file_says(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path / "plan.yaml", PLAN))
    assert plan.config == "synthetic"
    assert plan.splits == ("dev",)
    assert plan.default_searches == ("greedy",)
    assert plan.variants["plain"].settings == ()
    assert plan.variants["wide"].settings == ("model.joiner_dim=32",)
    assert plan.searches["beam"] == ("decode.method=modified_beam",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("settings: []", "lacks the key `config`"),
        ("config: a\nvariant: {}", "unknown key variant; there are config, settings"),
        ("config: a\nvariants: {x: {setting: []}}", "unknown key variants.x.setting"),
        ("config: a\nsettings: train.steps=3", "settings needs a list, got 'train.steps=3'"),
        ("config: a\nvariants: {x: {searches: [b]}}", "variants.x.searches has 'b'"),
        ("config: a\nsearches: [greedy]", "searches needs names with their lists of settings"),
        ("config: a\nvariants: [x]", "variants needs names with their changes, got ['x']"),
        ("- a", "needs keys such as `config`"),
        ("config: [", "is no YAML"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "plan.yaml", text)
    with pytest.raises(ValueError, match=str(path)) as error:
        read_plan(path)
    assert message in str(error.value)


def line(variant: str, seed: int, dev: float, test: float, **changes: Any) -> dict[str, Any]:
    def score(wer: float) -> dict[str, Any]:
        errors = round(wer * 100)
        return {"wer": wer, "errors": [1, 0, errors - 1], "interval": [wer - 0.01, wer + 0.01]}

    # The other search is worse on dev, though better on test.
    results = {
        "dev": {"greedy": score(dev), "beam": score(dev + 0.1)},
        "test": {"greedy": score(test), "beam": score(test - 0.1)},
    }
    values = {"steps": 100, "planned_steps": 100, "parameters": 1_500_000, "train_seconds": 60.0}
    return {"variant": variant, "seed": seed, **values, "results": results, **changes}


def test_table_selects_on_dev_and_averages_seeds(tmp_path: Path) -> None:
    lines = [line("a", seed, 0.3 + seed / 100, 0.4 + seed / 100) for seed in (1, 2, 3)]
    lines += [line("b", 1, 0.5, 0.6, steps=40), {"variant": "c", "seed": 1, "error": "killed"}]
    path = write(tmp_path / "r.jsonl", "".join(json.dumps(values) + "\n" for values in lines))
    rows = table(read_lines(path), split="test", select="dev").splitlines()
    assert len(rows) == 4
    assert rows[2].split(" | ") == [
        *("| a", "1.50 M", "100", "3", "greedy", "32.00%", "42.00%", "41.00% .. 43.00%"),
        *("42 (1, 0, 41)", "41.00% .. 43.00%", "60 s |"),
    ]
    assert "40 (stopped)" in rows[3]
    assert "| beam |" in table(read_lines(path), split="test", select="dev", search="beam")


def test_error_for_another_file_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", json.dumps(line("a", 1, 0.1, 0.1)) + '\n{"x": 1}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is no result"):
        read_lines(path)


@pytest.mark.slow
def test_variants_train_decode_and_add_lines(tmp_path: Path) -> None:
    data = make_corpus(tmp_path / "data")
    plan = write(tmp_path / "plan.yaml", PLAN)
    results = tmp_path / "out" / "results.jsonl"
    where = ["--json", str(results), "--folder", str(tmp_path / "exp")]
    changes = [*tiny_overrides(data, tmp_path / "unused"), "train.steps=2"]
    main([str(plan), *where, "--seeds", "3", *changes])
    plain, wide = read_lines(results)
    assert (plain["variant"], wide["variant"]) == ("plain", "wide")
    assert plain["steps"] == plain["planned_steps"] == 2
    assert set(plain["results"]["dev"]) == {"greedy"}
    assert set(wide["results"]["dev"]) == {"greedy", "beam"}
    assert plain["validations"][-1]["step"] == 2
    assert "seed: 3" in (tmp_path / "exp" / "plain-3" / "config.yaml").read_text()
    assert metrics(tmp_path / "exp" / "plain-3", "train")


def test_probe_without_a_step_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.recipe_runs.__main__.probe", lambda run, seconds: 0.0)
    plan = write(tmp_path / "plan.yaml", PLAN)
    arguments = [str(plan), "--json", str(tmp_path / "r.jsonl"), "--folder", str(tmp_path / "exp")]
    with pytest.raises(SystemExit):
        main([*arguments, "--seconds", "60", "--probe", "5"])
    assert "no variant trained 10 steps in 5 s" in capsys.readouterr().err
    assert not (tmp_path / "exp").exists()
