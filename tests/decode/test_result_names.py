"""Results are named by what produced them, and equal names mean equal inputs."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.data.input.batch import Batch, BatchIdentity
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.decode.decode_config import DecodeConfig, label, result_settings
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.run.result_file import find_results
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.run.results import free_stem, measurement_path
from pruned_rnnt.system.whole_files import write_lines
from tests.report.run_folders import transcript, write_decoded
from tests.tiny_corpus import trained_run

BEAM = "modified_beam"


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ("train.steps=4", "train.save_every=2", "train.validate_every=100")
    return trained_run(corpus, tmp_path_factory.mktemp("named") / "run", *settings)


def decoded(run: Path, *settings: str) -> dict[str, bytes]:
    """The files of results after decoding with these settings."""
    assert main(["decode", str(run), "data.num_workers=0", *settings]) == 0
    return {p.name: p.read_bytes() for p in (run / "results").iterdir() if p.name != "scores.json"}


@pytest.mark.slow
def test_changed_hotwords_are_another_result(run: Path, tmp_path: Path) -> None:
    words = tmp_path / "hot.txt"
    settings = ("decode.method=modified_beam", f"decode.fusion.hotwords={words}")
    words.write_text("red\n")
    first = decoded(run, *settings)
    words.write_text("blue\n")
    second = decoded(run, *settings)
    assert first.items() <= second.items()
    assert len(second) == len(first) + 5


@pytest.mark.slow
def test_no_result_is_replaced_by_another(run: Path, corpus: Path, tmp_path: Path) -> None:
    """Sets, folders, changed folders, checkpoints, settings and contents of files."""
    changed = shutil.copytree(corpus, tmp_path / corpus.name)
    cuts = list(PreparedFolder(corpus).cuts("test"))[1:]
    manifest = PreparedFolder(changed).cuts_path("test")
    type(PreparedFolder(corpus).cuts("test")).from_cuts(cuts).to_file(manifest)
    words = tmp_path / "hot.txt"
    words.write_text("red\n")
    beam = f"decode.method={BEAM}"
    kept: dict[str, bytes] = {}
    shutil.rmtree(run / "results", ignore_errors=True)
    for settings in (
        [],
        ["decode.split=dev"],
        [f"data.path={changed}"],
        ["decode.checkpoint=average"],
        [f"decode.checkpoint={run / 'checkpoints/step-00000002.pt'}"],
        ["decode.use_average=false"],
        ["decode.skip_unknown=false"],
        ["decode.metric=cer"],
        ["decode.max_symbols_per_frame=2"],
        [beam],
        [beam, "decode.length_norm=false"],
        [beam, "decode.num_best=2"],
        [beam, f"decode.fusion.hotwords={words}"],
        [beam, f"decode.fusion.hotwords={words}", "decode.fusion.hotword_bonus=2"],
        [beam, "decode.fusion.symbol_bonus=0.25"],
        [beam, f"decode.fusion.word_texts={words}", "decode.fusion.word_unknown=0.1"],
        [beam, f"decode.fusion.word_texts={words}"],
    ):
        found = decoded(run, *settings)
        assert kept.items() <= found.items(), settings
        assert len(found) == len(kept) + 5, settings
        kept = found


def test_the_same_computation_has_the_same_name(run: Path) -> None:
    first = decoded(run)
    assert decoded(run, "decode.beam_size=9").keys() == first.keys()  # greedy search has no beam


@pytest.mark.slow
def test_several_sets_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("dev,test", "[dev, test]"):
        assert main(["decode", str(run), f"decode.split={value}"]) == 0
        shown = capsys.readouterr().out
        assert "dev greedy" in shown
        assert "test greedy" in shown
    assert main(["decode", str(run), "decode.split=dev,odd"]) == 1
    assert "no split 'odd'" in capsys.readouterr().err
    assert main(["decode", str(run), "data.train=[train, dev]"]) != 0
    assert "'data.train': takes one value, not a list" in capsys.readouterr().err


def test_scores_hold_the_inputs_and_all_results(run: Path) -> None:
    names = decoded(run)
    scores = json.loads((run / "results/scores.json").read_text())
    assert {line["file"] for line in scores} == {n for n in names if n.startswith("scores-")}
    for line in scores:
        assert line["inputs"]["settings"]["method"] in ("greedy", BEAM)
        assert line["configuration"]["decode"]["split"] == line["split"]
        inputs = ResultInputs.from_dict(line["inputs"])
        assert inputs.fingerprint == line["fingerprint"]
        assert f"scores-{inputs.stem()}.json" == line["file"]


def test_other_folders_have_other_sets(run: Path, corpus: Path, tmp_path: Path) -> None:
    for name in ("calls", corpus.name):
        other = shutil.copytree(corpus, tmp_path / name)
        decoded(run, f"data.path={other}")
        (result,) = [each for each in find_results(run) if each.data_path == str(other)]
        assert (result.split, result.set_name) == ("test", f"test@{name}")
        assert (run / "results" / f"errs-{result.stem}.txt").is_file()


def inputs_of(**changes: Any) -> ResultInputs:
    values = {"split": "test", "utterances": "u", "checkpoint": "last", "model": "m", "label": "x"}
    return ResultInputs(**{**values, **changes})


def test_inputs_with_the_same_first_digits(tmp_path: Path) -> None:
    inputs = inputs_of()
    path = measurement_path(tmp_path, inputs.stem())
    path.write_text(json.dumps({"fingerprint": inputs.fingerprint}))
    assert free_stem(tmp_path, inputs) == inputs.stem()
    path.write_text(json.dumps({"fingerprint": inputs.fingerprint[:8] + "f" * 56}))
    assert free_stem(tmp_path, inputs) == inputs.stem(16)


def test_names_stay_short() -> None:
    stem = inputs_of(split="s" * 300, label="größe/x" * 20).stem()
    assert len(f".wer-summary-{stem}.txt.1234567".encode()) < 255
    assert "/" not in stem
    assert stem != inputs_of(split="s" * 300, label="größe/x" * 20, model="n").stem()


@pytest.mark.parametrize(
    "change",
    [
        {"beam_size": 8},
        {"length_norm": False},
        {"skip_unknown": False},
        {"use_average": False},
        {"checkpoint": "average"},
        {"precision": "bfloat16"},
        {"chunk": 8},
        {"left": 64},
        {"fusion": FusionConfig(symbol_bonus=0.5)},
        {"fusion": FusionConfig(ilm_scale=0.5)},
        {"fusion": FusionConfig(lm="exp/lm", lm_scale=0.4)},
        {"fusion": FusionConfig(word_ngram="a", word_unknown=0.1)},
        {"fusion": FusionConfig(hotwords="a", hotword_bonus=3.0)},
        {"fusion": FusionConfig(ngram="a", ngram_scale=0.3)},
    ],
)
def test_every_setting_counts(change: dict[str, Any]) -> None:
    plain = DecodeConfig(method="modified_beam")
    changed = replace(plain, **change)
    assert result_settings(changed) != result_settings(plain)
    names = [label(result_settings(config)) for config in (plain, changed)]
    assert names[0] != names[1] or changed.checkpoint == "average"  # which the checkpoint names


def test_no_setting_is_forgotten() -> None:
    """A new setting is either one of results, or named here as one that does not change them."""
    others = {"fused_kernels", "cuda_graphs", "batch_seconds", "split", "checkpoint"}
    methods = ("greedy", BEAM, "ctc_prefix_beam")
    fusion = FusionConfig(
        ngram="a",
        bigram_texts="a",
        word_ngram="a",
        lm="a",
        hotwords="a",
        ilm_scale=1.0,
        symbol_bonus=1.0,
    )
    known: set[str] = set()
    for method in methods:
        config = DecodeConfig(method=method, fusion=fusion if method == BEAM else FusionConfig())
        known |= {key.partition(".")[0] for key in result_settings(config)}
        known |= {key for key in result_settings(config) if "." in key}
    names = {field.name for field in fields(DecodeConfig)}
    assert names - known == others
    files = {"ngram", "bigram_texts", "word_ngram", "word_texts", "lm", "hotwords"}
    scales = {key.partition(".")[2] for key in known if key.startswith("fusion.")}
    assert set(FusionConfig.__dataclass_fields__) - scales == files


def batch(ids: tuple[str, ...], features_NTF: torch.Tensor, text: str = "a") -> Batch:
    count = len(ids)
    return Batch(
        features_NTF=features_NTF,
        feature_lengths_N=torch.full((count,), 3),
        targets_NU=torch.zeros(count, 1, dtype=torch.int32),
        target_lengths_N=torch.ones(count, dtype=torch.int32),
        texts=(text,) * count,
        ids=ids,
        durations=(0.03,) * count,
        words=((),) * count,
    )


def identity(*batches: Batch) -> BatchIdentity:
    found = BatchIdentity()
    assert [len(each) for each in found.over(batches)] == [len(each) for each in batches]
    return found


def test_identity_of_data() -> None:
    features_NTF = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    whole = identity(batch(("a", "b"), features_NTF))
    padded = features_NTF.clone()
    padded[:, 3:] = 7.0
    alone = [batch((name,), padded[n : n + 1]) for n, name in enumerate("ab")]
    assert identity(*reversed(alone)).digest == whole.digest
    changed = features_NTF.clone()
    changed[1, 2, 3] += 1e-6
    assert identity(batch(("a", "b"), changed)).digest != whole.digest
    assert identity(batch(("a", "c"), features_NTF)).digest != whole.digest
    assert identity(batch(("a", "b"), features_NTF, "b")).digest != whole.digest
    assert whole.audio["a"].frames == 3
    assert whole.audio["a"].mean == pytest.approx(float(features_NTF[0, :3].mean()), abs=1e-4)


def _write(folder: Path, number: int) -> None:
    write_decoded(folder, [transcript("u", "a", "a")], label=f"greedy-left{number}")


def test_processes_do_not_lose_each_others_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, n)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    scores = json.loads((tmp_path / "results/scores.json").read_text())
    assert {line["setting"] for line in scores} == {f"greedy-left{n}" for n in range(8)}
    assert not list((tmp_path / "results").glob(".*"))


def test_writers_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    """As processes with the same number on two machines, whose folder is shared."""

    def lines() -> Iterator[str]:
        yield "first"
        write_lines(tmp_path / "a", ["other"])
        yield "last"

    write_lines(tmp_path / "a", lines())
    assert (tmp_path / "a").read_text() == "first\nlast\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
def test_alignments_of_another_model_are_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = f"decode.checkpoint={run / 'checkpoints/step-00000002.pt'}"
    command = ["align", str(run), "--format", "ctm"]
    for settings in ([], [], [older]):
        assert main([*command, *settings]) in (0, 1)
    folders = sorted(path.name[:-8] for path in (run / "alignments").iterdir())
    assert folders == ["test-step-00000002-", "test-step-00000004-"]
    output = ["--output", str(tmp_path)]
    assert main([*command, *output]) in (0, 1)
    before = (tmp_path / "test-words.ctm").read_bytes()
    capsys.readouterr()
    assert main([*command, *output, older]) == 2
    assert "holds alignments of test by step-00000004" in capsys.readouterr().err
    assert (tmp_path / "test-words.ctm").read_bytes() == before
