"""`pruned-rnnt ensemble`: a run of several runs, which the other commands use like any run."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from pruned_rnnt import load
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.decode.decode_set import decode_set
from pruned_rnnt.licences.chain import read_chain
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.pretrained import ensemble as module
from pruned_rnnt.pretrained.ensemble import measure_ensemble, measured_data, write_ensemble
from pruned_rnnt.pretrained.found_model import NoModelError
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.run_files import read_p99_duration, save_p99_duration
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.train.tasks.split_errors import SplitErrors, measure_errors
from tests.pretrained.saved_models import save_file
from tests.tiny_corpus import make_corpus, trained_run


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("exp")
    steps = ["train.steps=4", "train.save_every=2", "train.validate_every=4"]
    return [
        trained_run(corpus, root / f"seed{seed}", *steps, f"train.seed={seed}") for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def joined(runs: list[Path]) -> Path:
    folder = runs[0].parent / "joined"
    assert main(["ensemble", *map(str, runs), "--output", str(folder)]) == 0
    return folder


def _weight(run: Path, *settings: str) -> torch.Tensor:
    model = load_model(run_config(run, settings)).model
    assert isinstance(model, TransducerModel)
    return model.joiner.output_linear.weight.detach()


@pytest.mark.slow
def test_commands_use_it_like_any_run(
    runs: list[Path], joined: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.testing.assert_close(
        _weight(joined), torch.cat([_weight(run) for run in runs], dim=1) / 2
    )
    assert main(["decode", str(joined)]) == 0
    assert "test greedy step-00000000: WER" in capsys.readouterr().out
    assert main(["export", str(joined), "--format", "torch", "--output", str(tmp_path)]) == 0
    audio = torch.zeros(16000).numpy()
    texts = [load(path).transcribe(audio).text for path in (joined, tmp_path)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_it_names_what_it_was_made_of(runs: list[Path], joined: Path) -> None:
    chain = read_chain(joined)
    assert chain is not None
    names = [(origin.kind, origin.name) for origin in chain.origins]
    assert [name for kind, name in names if kind == "weights"] == ["seed1", "seed2"]
    assert len([name for kind, name in names if kind == "data"]) == 1
    assert read_p99_duration(joined) == read_p99_duration(runs[0])


@pytest.mark.slow
def test_checkpoints_can_be_chosen(runs: list[Path], tmp_path: Path) -> None:
    first, last = sorted((runs[0] / "checkpoints").glob("step-*.pt"))
    paths = [str(first), str(last)]
    options = ["decode.use_average=false", "--output", str(tmp_path / "two")]
    assert main(["ensemble", *paths, *options]) == 0
    parts = [
        _weight(runs[0], "decode.use_average=false", f"decode.checkpoint={path}") for path in paths
    ]
    torch.testing.assert_close(_weight(tmp_path / "two"), torch.cat(parts, dim=1) / 2)
    assert run_config(tmp_path / "two").decode.checkpoint == "last"


@pytest.mark.slow
def test_the_shortest_training_utterances_count(runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[1], tmp_path / "short")
    save_p99_duration(tmp_path / "short", 0.5)
    write_ensemble([runs[0], tmp_path / "short"], tmp_path / "joined")
    assert read_p99_duration(tmp_path / "joined") == 0.5


@pytest.mark.slow
def test_runs_with_other_symbols_than_their_data(runs: list[Path], tmp_path: Path) -> None:
    """As fine-tuned runs have."""
    data = make_corpus(tmp_path / "corpus", words=("red", "one"))
    for number, run in enumerate(runs):
        shutil.copytree(run, tmp_path / f"run{number}")
        path = tmp_path / f"run{number}/config.yaml"
        text = path.read_text().replace("init: ''", "init: source")
        path.write_text(re.sub(r"path: .*corpus.*", f"path: {data}", text))
    members = [str(tmp_path / f"run{number}") for number in range(2)]
    assert main(["ensemble", *members, "--output", str(tmp_path / "joined")]) == 0
    assert main(["decode", str(tmp_path / "joined")]) == 0


@pytest.mark.slow
def test_it_is_measured_beside_its_members(runs: list[Path], joined: Path) -> None:
    data = measured_data(runs)
    assert data is not None
    errors = measure_ensemble(runs, joined, data)
    assert len(errors) == 3
    assert len({each.words for each in errors}) == 1
    for run, each in zip(runs, errors[:2], strict=True):
        loaded = load_model(run_config(run))
        config, tokenizer = run_config(run), loaded.tokenizer
        assert each == measure_errors(loaded.model, tokenizer, config, "dev", ranks=Ranks())


def test_texts_without_a_finite_score_count(
    runs: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """An error on one process would leave the others waiting for its counts."""
    config = run_config(runs[0])
    loaded = load_model(config)
    whole = measure_errors(loaded.model, loaded.tokenizer, config, "dev", ranks=Ranks())
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(torch.nan)
    with caplog.at_level("WARNING"):
        logging.getLogger("pruned_rnnt").propagate = True
        broken = measure_errors(loaded.model, loaded.tokenizer, config, "dev", ranks=Ranks())
    assert broken.words == whole.words
    assert re.match(r"\d+ utterances of dev, such as .*: the score .* is nan", caplog.messages[-1])
    data = DataModule(config.data, tokenizer=loaded.tokenizer, kind=config.feature_kind)
    with pytest.raises(ValueError, match="the score of the best hypothesis is nan"):
        decode_set(loaded.model, data.test_loader("dev"), loaded.tokenizer, config.decode)


@pytest.mark.parametrize(
    ("errors", "warning"),
    [
        ((2, 6, 4), ""),
        ((2, 6, 5), "more errors than apart in the mean"),
        ((2, 60, 30), "together they make 30 errors, the best of them alone 2: leave out"),
        ((20, 60, 30), ""),
    ],
)
def test_models_that_do_not_fit_are_warned_about(
    runs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    errors: tuple[int, ...],
    warning: str,
) -> None:
    counts = [SplitErrors(errors=n, words=100) for n in errors]
    monkeypatch.setattr(module, "measure_ensemble", lambda *_: counts)
    assert main(["ensemble", *map(str, runs), "--output", str(tmp_path / "two")]) == 0
    printed = capsys.readouterr()
    rates = "100 words of the validation set: {}.00%, {}.00%; together {}.00%"
    assert rates.format(*errors) in printed.out
    assert warning in printed.err
    assert ("warning" in printed.err) == bool(warning)


def test_models_that_make_far_more_errors_together_are_refused(
    runs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = [SplitErrors(errors=n, words=100) for n in (2, 6, 23)]
    monkeypatch.setattr(module, "measure_ensemble", lambda *_: counts)
    assert main(["ensemble", *map(str, runs), "--output", str(tmp_path / "two")]) == EXIT_FAILED
    printed = capsys.readouterr()
    assert "100 words of the validation set: 2.00%, 6.00%; together 23.00%" in printed.err
    assert "Nothing was written" in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gone", [1, 2])
@pytest.mark.slow
def test_the_data_of_any_member_measure_it(
    gone: int, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [shutil.copytree(run, tmp_path / run.name) for run in runs]
    for member in members[:gone]:
        path = member / "config.yaml"
        path.write_text(re.sub(r"path: .*corpus.*", "path: nowhere", path.read_text()))
    assert main(["ensemble", *map(str, members), "--output", str(tmp_path / "of two")]) == 0
    shown = capsys.readouterr().out
    assert ("words of the validation set: " in shown) == (gone == 1)
    assert ("not measured beside its members: none of their validation sets" in shown) == (
        gone == 2
    )
    assert ("decode RUN data.path=FOLDER" in shown) == (gone == 2)
    assert f"pruned-rnnt decode '{tmp_path}/of two'\n" in shown


def test_it_is_not_trained_further(
    joined: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"train.folder={tmp_path / 'run'}", "data.num_workers=0", "train.device=cpu"]
    assert main(["finetune", str(joined), str(corpus), *settings]) != 0
    assert "train its members" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_it_does_not_stream(joined: Path) -> None:
    with pytest.raises(ValueError, match="the model is an ensemble, which cannot stream"):
        load(joined).stream()


@pytest.mark.slow
def test_wrong_runs_are_refused(
    runs: list[Path], joined: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ensemble", str(runs[0]), "--output", str(tmp_path / "a")]) == EXIT_FAILED
    assert "at least 2 models, got 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="already holds a run"):
        write_ensemble(runs, joined)
    with pytest.raises(NoModelError, match="does not exist"):
        write_ensemble([runs[0], tmp_path / "none"], tmp_path / "a")
    loaded = load_model(run_config(runs[0]))
    exported = save_file(tmp_path / "torch", loaded.model, loaded.tokenizer)
    with pytest.raises(NoModelError, match=r"torch is no run: name the run .* exported from"):
        write_ensemble([exported, runs[1]], tmp_path / "a")
    (tmp_path / "model.nemo").touch()
    with pytest.raises(NoModelError, match=r"model\.nemo is no run: `pruned-rnnt import` makes"):
        write_ensemble([runs[0], tmp_path / "model.nemo"], tmp_path / "a")
    with pytest.raises(ConfigError, match="nonsense"):
        write_ensemble(runs, tmp_path / "a", ["decode.nonsense=1"])
    other = make_corpus(tmp_path / "corpus", words=("one", "two"))
    other_run = trained_run(other, tmp_path / "other", "train.steps=1")
    with pytest.raises(ValueError, match=r"the symbols of .*other differ from those of .*seed1"):
        write_ensemble([runs[0], other_run], tmp_path / "a")
    assert not (tmp_path / "a").exists()
