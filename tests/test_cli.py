"""The command line end to end on a tiny corpus."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.licences.chain import Chain, Origin
from pruned_rnnt.model.kernels.available import kernel_report
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from pruned_rnnt.train.engine.checkpoint import CheckpointError
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.run import find_checkpoint, load_model, run_config
from tests.tiny_corpus import make_corpus, tiny_overrides, trained_run


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["train.steps=6", "train.save_every=2", "train.validate_every=3"]
    return trained_run(corpus, tmp_path_factory.mktemp("exp") / "run", *settings)


@pytest.mark.parametrize("method", ["greedy", "modified_beam"])
def test_decode_writes_results(run: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", str(run), f"decode.method={method}"]) == 0
    shown = capsys.readouterr().out
    assert "WER" in shown
    assert "95% interval" in shown
    assert "real-time factor" in shown
    texts = {}
    for name in ("recogs", "errs", "wer-summary"):
        (path,) = (run / "results").glob(f"{name}-test-{method}-step-00000006-????????.txt")
        texts[name] = path.read_text()
    recogs = texts["recogs"].splitlines()
    assert len(recogs) == 12
    assert recogs[0].startswith("test-0:\tref=['")
    assert texts["errs"].startswith("%WER = ")
    assert texts["wer-summary"].startswith("settings\tWER\n")


@pytest.mark.parametrize("which", ["last", "best"])
def test_decode_other_sets_and_checkpoints(
    run: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"decode.checkpoint={which}", "decode.split=dev", "decode.use_average=false"]
    assert main(["decode", str(run), *settings]) == 0
    assert "dev greedy" in capsys.readouterr().out


@pytest.mark.slow
def test_fused_kernels_are_chosen(run: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path)]
    for command in (["decode", str(run)], ["align", str(run), *output]):
        for mode, report in (("off", "off"), ("auto", "(not )?used")):
            assert main([*command, f"decode.fused_kernels={mode}"]) == 0
            line = kernel_report(torch.device("cuda"))
            assert re.match(f"fused encoder kernels: {report}", line)


def test_average_then_decode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["average", str(run), "--last", "2"]) == 0
    path = run / "average-last-2.pt"
    parts = [run / f"checkpoints/step-0000000{step}.pt" for step in (4, 6)]
    mean = torch.load(path, weights_only=True)["model"]
    states = [torch.load(part, weights_only=True)["model"] for part in parts]
    name = "joiner.output_linear.weight"
    torch.testing.assert_close(mean[name], (states[0][name] + states[1][name]) / 2)
    assert main(["decode", str(run), f"decode.checkpoint={path}"]) == 0
    assert "average-last-2" in capsys.readouterr().out


def test_checkpoints_of_another_run_are_refused(run: Path, tmp_path: Path) -> None:
    """Equal numbers of symbols are no proof that they belong together."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    inside, outside = other / "checkpoints/step-00000004.pt", tmp_path / "saved.pt"
    average = other / "average.pt"
    for path in (outside, average):
        shutil.copy(inside, path)
    for path in (inside, average):
        assert find_checkpoint(other, str(path)) == path
        with pytest.raises(CheckpointError, match=f"of the run {other}, and not of {run}: give"):
            find_checkpoint(run, str(path))
    (tmp_path / "link.pt").symlink_to(inside)
    with pytest.raises(CheckpointError, match=r"link\.pt is a checkpoint of the run"):
        find_checkpoint(run, str(tmp_path / "link.pt"))
    assert find_checkpoint(run, str(outside)) == outside
    inside.unlink()
    inside.symlink_to(run / "checkpoints/step-00000004.pt")
    assert find_checkpoint(other, str(inside)) == inside


@pytest.mark.slow
def test_decode_with_the_average_of_the_last_checkpoints(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("step-*.pt"))
    loaded = load_model(run_config(run, ["decode.checkpoint=average"]))
    assert main(["average", str(run), "--output", str(tmp_path / "mean #1.pt")]) == 0
    (setting,) = shlex.split(capsys.readouterr().out.partition("use it with ")[2])
    written = load_model(run_config(run, [setting]))
    for name, value in written.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], value, rtol=0, atol=0)
    assert main(["decode", str(run), "decode.checkpoint=average"]) == 0
    assert "step-00000006-average-last-3: WER" in capsys.readouterr().out
    assert sorted(run.rglob("step-*.pt")) == before


def test_folders_that_cannot_be_written_are_named_before_the_work(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    (copy / "results").write_text("")
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert main(["decode", str(copy)]) == EXIT_FAILED
    shown = capsys.readouterr()
    assert f"cannot write in {copy}/results (File exists): results are stored there" in shown.err
    assert "WER" not in shown.out
    assert main(["train", *tiny_overrides(corpus, tmp_path / "file/run")]) == EXIT_FAILED
    assert "run (Not a directory): choose another train.folder" in capsys.readouterr().err
    page = tmp_path / "file/page.html"
    options = ["--no-pictures", "--no-audio", "--output", str(page)]
    assert main(["report", str(copy), *options]) == EXIT_FAILED
    expected = f"cannot write in {page.parent} (File exists): --output FILE.html writes"
    assert expected in capsys.readouterr().err
    (copy / "export").write_text("")
    assert main(["export", str(copy), "--format", "torch"]) == EXIT_FAILED
    expected = f"cannot write in {copy}/export (File exists): --output FOLDER writes"
    assert expected in capsys.readouterr().err


def test_average_of_fewer_checkpoints(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    for path in sorted(folder.glob("step-*.pt"))[:-2]:
        path.unlink()
    config = run_config(tmp_path / "run", ["decode.checkpoint=average"])
    assert load_model(config).name == "step-00000006-average-last-2"
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="has no checkpoints"):
        load_model(config)


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_bars_are_for_terminals(
    is_terminal: bool,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=80)
    monkeypatch.setattr("pruned_rnnt.cli.start_logging", lambda: console)
    noise_S = 0.1 * np.random.default_rng(0).standard_normal(32000)
    soundfile.write(tmp_path / "a.wav", noise_S, 16000)
    done = (
        ("decoding test, utterances", "6/6"),
        ("aligning, utterances", "6/6"),
        ("1/1 a.wav", "2/2"),
    )
    commands = (
        ["decode", str(run)],
        ["align", str(run), "--output", str(tmp_path / "times")],
        ["transcribe", str(run), str(tmp_path / "a.wav")],
    )
    for command, words in zip(commands, done, strict=True):
        assert main(command) == 0
        shown = screen.getvalue()
        assert all(word in shown for word in words) == is_terminal
        assert bool(shown) == is_terminal
        screen.seek(0)
        screen.truncate()
        assert "\x1b" not in capsys.readouterr().out


def test_inspect_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "WER" in shown
    assert "step-00000006.pt" in shown
    assert f"curves: pruned-rnnt report {run}" in " ".join(shown.split())


def test_inspect_model_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file without licences inside, those beside it are shown."""
    checkpoint = run / "checkpoints/step-00000006.pt"
    assert main(["inspect", str(checkpoint)]) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert f"is a checkpoint, not a model file: pass the folder of its run, {run}" in shown
    files = [tmp_path / name for name in ("model.nemo", "encoder.onnx", "pretrained.pt")]
    for path in files:
        path.write_bytes(b"\xff\x00")
        assert main(["inspect", str(path)]) == EXIT_USAGE
        shown = capsys.readouterr().err
        assert f"{path} is a model file without licences.json beside it" in shown
        assert "pass its folder" in shown
    Chain(licence="CC-BY-4.0", origins=(Origin(kind="data", name="calls"),)).write(tmp_path)
    for path in files:
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "licence CC-BY-4.0" in shown
        assert "data calls" in shown
    assert main(["inspect", str(files[0]), "--keys"]) == EXIT_USAGE
    assert "is a model, and --keys is for a run or a config" in capsys.readouterr().err


def test_inspect_config(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"data:\n  path: {corpus}\n")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "32 utterances" in shown
    assert "encoder" in shown
    assert main(["inspect", str(path), "--keys", "model.joiner_dim=7"]) == 0
    assert "joiner_dim: 7" in capsys.readouterr().out


def test_finished_run_is_not_trained_again(run: Path, corpus: Path) -> None:
    before = (run / "checkpoints/step-00000006.pt").stat().st_mtime_ns
    settings = ["train.steps=6", "train.save_every=2", "train.validate_every=3"]
    assert main(["train", *tiny_overrides(corpus, run, *settings)]) == 0
    assert (run / "checkpoints/step-00000006.pt").stat().st_mtime_ns == before


def test_piped_log_lines_fit_80_columns(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["train.steps=2", "train.save_every=1", "schedule.warm_up_steps=1"]
    assert main(["train", *tiny_overrides(corpus, tmp_path / "run", *settings)]) == 0
    lines = capsys.readouterr().err.splitlines()
    (step,) = [line for line in lines if " step 1/2 " in line]
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d step 1/2 loss \S+ lr \S+ \S+ steps/s 0:\d\d:\d\d left", step
    )
    assert any(line.endswith("saved step-00000001.pt") for line in lines)
    assert any("step 2 validation: loss" in line for line in lines)
    # The line about kernels has the path of a library.
    assert [line for line in lines if len(line) > 80 and "kernels of the losses" not in line] == []
    log = (tmp_path / "run/train.log").read_text()
    assert re.search(r"INFO step 1/2 epoch 0 loss .*pruned .* utt/s", log)
    assert f"saved {tmp_path}/run/checkpoints/step-00000001.pt" in log
    assert " ins, " in log


@pytest.mark.slow
def test_train_continues_a_run(run: Path, corpus: Path, tmp_path: Path) -> None:
    """With its saved configuration, also after the folder was moved."""
    started = tmp_path / "started"
    settings = ["train.steps=6", "train.save_every=2", "train.validate_every=3"]
    assert main(["train", *tiny_overrides(corpus, started, *settings)]) == 0
    moved = started.rename(tmp_path / "moved")
    for step in (4, 6):
        (moved / f"checkpoints/step-0000000{step}.pt").unlink()
    assert main(["train", "train.log_every=3", "--allow-changes", str(moved)]) == 0
    states = [torch.load(folder / "checkpoints/step-00000006.pt") for folder in (run, moved)]
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=0, atol=0)
    assert not started.exists()
    assert (moved / "config.yaml").read_text().count(f"folder: {moved}") == 1


def test_hints_can_be_typed_in_a_shell(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "it's [b]")
    assert main(["inspect", str(copy)]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("curves: "))
    assert shlex.split(line) == ["curves:", "pruned-rnnt", "report", str(copy)]


def test_a_relative_data_path_is_named_with_its_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["decode", str(run.resolve()), "data.path=data/d"]) != 0
    message = f"data.path is data/d, and there is no such folder in {tmp_path}: run"
    assert message in capsys.readouterr().err


def test_decode_errors(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        ("decode.split=train2", "no split 'train2'"),
        ("decode.checkpoint=absent.pt", "not found: absent.pt; decode.checkpoint (in"),
        ("decode.method=magic", "decode.method"),
        ("decode.batch_seconds=3", "batches of `decode` have data.valid_max_duration seconds"),
        ("data.path=/nowhere", "data.path is /nowhere, and there is no such folder"),
        ("decode.fusion.hotwords=none", "decode.fusion.hotwords is none, and there is no such"),
        (f"decode.fusion.lm={run}", "is no run of a language model: check decode.fusion.lm"),
    ]
    for override, message in cases:
        method = ["decode.method=modified_beam"] if "fusion" in override else []
        assert main(["decode", str(run), *method, override]) != 0
        assert message in capsys.readouterr().err
    other = make_corpus(tmp_path / "other", train=1, dev=1, seed=5)
    assert main(["decode", str(run), f"data.path={other}"]) == EXIT_USAGE
    assert "tokens" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decode", "align", "export"])
def test_settings_of_training_cannot_change_afterwards(
    run: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    settings = ["model.joiner_dim=64", "train.steps=7", "loss.s_range=3"]
    assert main([command, str(run), *settings]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "model.joiner_dim: 32 -> 64" in error
    assert "train.steps: 6 -> 7" in error
    assert "loss.s_range: 5 -> 3" in error
    assert "leave them out" in error
    assert "decode.chunk" not in error
    assert main([command, str(run), "model.encoder.chunk_size=2"]) == EXIT_USAGE
    assert "decode.chunk chooses the chunks of decoding" in capsys.readouterr().err


def test_settings_of_training_may_be_repeated(run: Path) -> None:
    settings = ["train.steps=6", "train.device=cpu", "data.valid_max_duration=9"]
    assert run_config(run, settings).train.steps == 6


@pytest.mark.parametrize("last", ["0", "-1"])
def test_average_of_no_checkpoint(run: Path, capsys: pytest.CaptureFixture[str], last: str) -> None:
    assert main(["average", str(run), "--last", last]) == EXIT_USAGE
    assert f"--last must be at least 1, got {last}" in capsys.readouterr().err


def test_average_replaces_only_averages(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint, *_) = sorted((run / "checkpoints").glob("*.pt"))
    copied = Path(shutil.copy(checkpoint, tmp_path / "copy.pt"))
    for path, message in (
        (run / "config.yaml", "needs the name of a file that ends in .pt"),
        (checkpoint, "among the checkpoints of the training"),
        (copied, "exists and is not marked as an average"),
    ):
        before = path.read_bytes()
        assert main(["average", str(run), "--last", "1", "--output", str(path)]) == EXIT_USAGE
        assert message in capsys.readouterr().err
        assert path.read_bytes() == before
    command = ["average", str(run), "--last", "1", "--output", str(tmp_path / "new.pt")]
    assert main(command) == main(command) == 0


def test_ensemble_of_equal_members(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [str(run), f"{run}/checkpoints/.."]
    assert main(["ensemble", *members, "--output", str(tmp_path / "out")]) == EXIT_USAGE
    assert f"{run} is named more than once" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_train_into_a_file(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    assert main(["train", *tiny_overrides(corpus, path)]) == EXIT_USAGE
    assert f"train.folder is {path}, which is no folder" in capsys.readouterr().err
    assert path.read_text() == "kept"


def test_another_model_is_named_by_its_settings(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.joiner_dim=64", "train.steps=9"]
    command = ["train", "--allow-changes", *tiny_overrides(corpus, run, *settings)]
    assert main(command) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "choose another train.folder (model.joiner_dim: 32 -> 64)\n" in error


def test_run_is_locked_while_it_is_trained(run: Path, corpus: Path) -> None:
    with exclusive_folder_lock(run, "is held"):
        settings = ["train.steps=6", "train.save_every=2", "train.validate_every=3"]
        log = (run / "train.log").read_text()
        assert main(["train", *tiny_overrides(corpus, run, *settings)]) == EXIT_FAILED
        assert (run / "train.log").read_text() == log
    assert main(["train", *tiny_overrides(corpus, run, *settings)]) == 0


def test_checkpoint_of_another_model_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    train_tokenizer(["abc"], TokenizerConfig(kind="char")).save(tmp_path / "run/tokens")
    assert main(["transcribe", str(tmp_path / "run"), "a.wav"]) == EXIT_FAILED
    assert "they do not come from the same run" in capsys.readouterr().err


def test_checkpoint_with_settings_of_another_version_is_refused(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    values = torch.load(run / "checkpoints/step-00000006.pt", weights_only=True)
    values["config"]["model"]["encoder"]["chunk_sizes"] = 4
    torch.save(values, path)
    config = run_config(run, [f"decode.checkpoint={path}"])
    message = r"other\.pt has settings that this version .*chunk_sizes.* the version that wrote it"
    with pytest.raises(CheckpointError, match=message):
        load_model(config)


def test_damaged_metrics_are_skipped(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    metrics = tmp_path / "run/metrics.jsonl"
    lines = read_metrics(run)
    damage = b'{"group": "train", "st\n[1]\n{"step": 3}\n{"group": "x", "step": null}\n\xff\x00\n'
    metrics.write_bytes(damage + metrics.read_bytes() + damage)
    assert read_metrics(tmp_path / "run") == lines
    assert main(["inspect", str(tmp_path / "run")]) == 0
