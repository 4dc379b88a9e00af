"""`pruned-rnnt report` on runs that `train` and `decode` made, with audio and pictures."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, Recording
from PIL import Image

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.report import clips
from pruned_rnnt.report.clips import ByteBudget, Clip, _checkpoint_of, audio_clip
from pruned_rnnt.report.report_run import read_run
from pruned_rnnt.report.training_charts import validation_table
from pruned_rnnt.run.result_file import find_results
from tests.data import spoken_corpus
from tests.report.run_folders import Element, parse, table, transcript, write_decoded, write_run
from tests.tiny_corpus import tiny_overrides

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoded run on recordings of noise; what it recognises is nonsense."""
    folder = tmp_path_factory.mktemp("spoken")
    corpus = spoken_corpus.make_corpus(folder / "data", train=8)
    run = folder / "run"
    assert main(["train", *tiny_overrides(corpus, run, "train.steps=2")]) == 0
    assert main(["decode", str(run)]) == 0
    return run


def report(run: Path, tmp_path: Path, *options: str) -> Element:
    path = tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(path), *options]) == 0
    return parse(path.read_text(encoding="utf-8"))


def payload(source: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(source.partition("base64,")[2]))


def images(element: Element) -> list[Image.Image]:
    """The images in a picture, which is an SVG file."""
    head, _, data = element.attributes["src"].partition(",")
    assert head == "data:image/svg+xml"
    svg = ElementTree.fromstring(unquote(data))
    return [
        Image.open(payload(image.attrib["{http://www.w3.org/1999/xlink}href"]))
        for image in svg.iter("{http://www.w3.org/2000/svg}image")
    ]


def test_worst_utterances_have_audio_and_pictures(run: Path, tmp_path: Path) -> None:
    page = report(run, tmp_path, "--utterances", "3")
    articles = page.find("article")
    assert len(articles) == 3
    assert [each.attributes.get("id") for each in page.find("section")].count("ranges") == 1
    seconds = table(page, "set-0-utterances")
    for article in articles:
        name = article.find("h3")[0].text
        expected = seconds["Seconds"][seconds["Utterance"].index(name)]
        samples, rate = soundfile.read(payload(article.find("audio")[0].attributes["src"]))
        assert len(samples) / rate == pytest.approx(expected, abs=0.1)
        spectrogram, lattice = images(article.find("img")[0])[:2]
        assert min(spectrogram.width, lattice.width) > 100
        # Not empty pictures.
        assert len(np.unique(np.asarray(spectrogram.convert("L")))) > 20
        assert len(np.unique(np.asarray(lattice.convert("RGBA")))) > 20


def test_error_rate_and_interval_are_those_that_decode_prints(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decode", str(run)]) == 0
    printed = re.search(
        r"WER ([\d.]+%) .* interval of the WER ([\d.]+%) \.\. ([\d.]+%)", capsys.readouterr().out
    )
    assert printed is not None
    page = report(run, tmp_path, "--no-pictures", "--no-audio")
    tile = page.find("div", class_="main")[0]
    assert tile.find("span", class_="value")[0].text == printed[1]
    shown = tile.find("span", class_="note")[0].text
    assert shown == f"95% interval {printed[2]} to {printed[3]}"


def test_default_path_is_in_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--no-audio", "--no-pictures"]) == 0
    assert (run / "report.html").is_file()
    assert f"report: {run / 'report.html'} (" in capsys.readouterr().out
    assert not parse((run / "report.html").read_text(encoding="utf-8")).find("audio")


def test_a_link_to_a_page_stays_a_link(run: Path, tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    assert main(["report", str(run), "--no-audio", "--no-pictures", "--output", str(link)]) == 0
    assert link.is_symlink()
    assert page.is_file()


def test_pages_have_a_largest_size(run: Path, tmp_path: Path) -> None:
    page = report(run, tmp_path, "--megabytes", "0.02", "--no-pictures")
    embedded = sum(len(audio.attributes["src"]) for audio in page.find("audio"))
    assert 0 < embedded <= 20_000
    assert len(page.find("audio")) < len(page.find("article"))
    assert "are left out, because the page would exceed" in page.find("p", class_="hint")[-1].text


def test_later_clips_that_fit_are_kept() -> None:
    budget = ByteBudget(10)
    taken = [budget.take(Clip("x" * size)).url for size in (6, 8, 4, 1)]
    assert [len(url) for url in taken] == [6, 0, 4, 0]
    assert budget.left_out == 2
    assert budget.take(Clip("", "no audio")).problem == "no audio"
    assert budget.left_out == 2


def test_without_the_checkpoint_pictures_have_no_lattice(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    page = report(copy, tmp_path, "--utterances", "1")
    assert "have no lattice" in page.find("p", class_="hint")[0].text
    (spectrogram,) = images(page.find("img")[0])
    assert spectrogram.width > 100


def test_activation_ranges_that_cannot_be_computed_say_why(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("needs CUDA")

    monkeypatch.setattr(clips, "activation_ranges", fail)
    options = ("--utterances", "1", "--no-audio", "--megabytes", "inf")
    page = report(run, tmp_path, *options)
    hints = [hint.text for hint in page.find("p", class_="hint")]
    assert "No activation ranges: needs CUDA." in hints
    assert page.find("img")


def test_a_checkpoint_that_was_written_again_is_named(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (scores,) = (copy / "results").glob("scores-*.json")
    values = json.loads(scores.read_text())
    values["inputs"]["model"] = "0" * 16
    scores.write_text(json.dumps(values))
    page = report(copy, tmp_path, "--utterances", "1", "--no-audio")
    assert "The lattices are not those of the model" in page.find("p", class_="hint")[0].text


@pytest.mark.parametrize(
    ("checkpoint", "found"),
    [
        ("my-model", "my-model.pt"),
        ("model", "model.pt"),
        ("average-last-5", "average-last-5.pt"),
        # Of checkpoints that are no longer the newest ones.
        ("step-00000001-average-last-5", None),
    ],
)
def test_the_checkpoint_of_a_result_has_its_name(
    tmp_path: Path, checkpoint: str, found: str | None
) -> None:
    for name in ("average-last-5.pt", "model.pt", "my-model.pt"):
        (tmp_path / name).touch()
    stem = write_decoded(tmp_path, [transcript("a", "b", "b")], checkpoint=checkpoint)
    (result,) = find_results(tmp_path)
    assert result.stem == stem
    config: Any = SimpleNamespace(folder=tmp_path)
    assert _checkpoint_of(config, result) == (found and str(tmp_path / found))


def test_missing_recording_is_named(run: Path, tmp_path: Path) -> None:
    data = shutil.copytree(run.parent / "data", tmp_path / "data")
    shutil.rmtree(data / "audio")
    page = report(run, tmp_path, "--utterances", "2", "--no-pictures", f"data.path={data}")
    assert not page.find("audio")
    for article in page.find("article"):
        assert "audio cannot be shown" in article.find("p", class_="missing")[0].text


def test_utterance_without_reference_has_a_picture(run: Path, tmp_path: Path) -> None:
    """The lattice of an empty text has one row."""
    copy = shutil.copytree(run, tmp_path / "run")
    data = PreparedFolder(run.parent / "data")
    cut = next(iter(data.cuts("test")))
    moved = shutil.copytree(data.path, tmp_path / "data")
    cut.supervisions[0].text = ""
    CutSet.from_cuts([cut]).to_file(moved / "test_cuts.jsonl.gz")
    nbest = next((copy / "results").glob("nbest-*"))
    nbest.write_text(
        f'{{"id": "{cut.id}", "reference": "", "hypotheses": [{{"text": "on", "tokens": [], '
        '"words": []}]}\n'
    )
    page = report(copy, tmp_path, f"data.path={moved}")
    assert len(page.find("article")) == len(page.find("img")) == 1


def test_audio_of_a_shar(tmp_path: Path) -> None:
    """A Shar has the audio of several utterances in one tar file, here at 8 kHz."""
    samples = 0.3 * np.sin(np.arange(8000) / 5)
    rows = []
    for number in range(3):
        soundfile.write(tmp_path / f"{number}.wav", samples[: 4000 + 1000 * number], 8000)
        rows.append(f"{number}.wav\tword {['one', 'two', 'three'][number]}\n")
    (tmp_path / "table.tsv").write_text("".join(rows))
    output = tmp_path / "data"
    arguments = ["prepare", "own", str(tmp_path / "table.tsv"), "--output", str(output)]
    options = ["--shar", "--features", "waveform", "--tokens", "char", "--dev-share", "0"]
    assert main([*arguments, *options, "--test-share", "0"]) == 0
    cuts = list(PreparedFolder(output).cuts("train"))
    assert len(cuts) == 3
    for cut in cuts:
        samples, rate = soundfile.read(payload(audio_clip(cut).url))
        assert rate == 8000
        assert len(samples) / rate == pytest.approx(cut.duration, abs=0.1)
        assert np.abs(samples).max() == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize(("rate", "written"), [(10000, 16000), (12000, 12000), (44100, 16000)])
def test_audio_of_any_rate(tmp_path: Path, rate: int, written: int) -> None:
    """libsndfile writes MP3 at a few rates alone."""
    soundfile.write(tmp_path / "a.wav", 0.3 * np.sin(np.arange(rate) / 5), rate)
    cut = Recording.from_file(tmp_path / "a.wav").to_cut()
    samples, found = soundfile.read(payload(audio_clip(cut).url))
    assert found == written
    assert len(samples) / found == pytest.approx(1.0, abs=0.1)


def test_data_with_features_only(corpus: Path) -> None:
    cut = next(iter(PreparedFolder(corpus).cuts("test")))
    assert audio_clip(cut) == Clip("", "no audio: the data hold features only")


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (["--utterances", "-1"], "--utterances must be at least 0, got -1", EXIT_USAGE),
        (["--megabytes", "nan"], "--megabytes must be at least 0, got nan", EXIT_USAGE),
        (["--result", "beam*"], "matches 'beam*'; it has greedy-step-00000002", EXIT_USAGE),
        (["--other", "nowhere"], "nowhere is not a run", EXIT_USAGE),
        (["--output", "README.md"], "--output is README.md, needs the name of a file", EXIT_USAGE),
        (["--other", "RUN"], "choose the same result of test, greedy-step-00000002", EXIT_USAGE),
        (["train.steps=7"], "was trained with other settings (train.steps: 2 -> 7)", EXIT_USAGE),
    ],
)
def test_wrong_options(
    run: Path, options: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option.replace("RUN", str(run)) for option in options]
    assert main(["report", str(run), *options]) == code
    assert message in capsys.readouterr().err


def test_only_reports_are_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    path.write_text("<title>by hand</title>")
    command = ["report", str(run), "--no-pictures", "--no-audio", "--output", str(path)]
    assert main(command) == EXIT_USAGE
    assert f"--output is {path}, which exists and is no report" in capsys.readouterr().err
    assert path.read_text() == "<title>by hand</title>"
    path.unlink()
    assert main(command) == main(command) == 0


def test_missing_package_is_one_line(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run(tmp_path / "run", corpus)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(run)]) == EXIT_FAILED
    expected = "pruned-rnnt report: jinja2 is not installed: pip install 'pruned_rnnt[report]'\n"
    assert capsys.readouterr().err == expected


def test_values_that_are_no_numbers_are_dashes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"task: lm\ntrain:\n  folder: {tmp_path}\n")
    line = '{"group": "valid", "step": 4, "total": 1.5, "perplexity": null}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    headings, (row,) = validation_table(read_run(tmp_path))
    assert dict(zip(headings, row, strict=True)) == {
        "step": "4",
        "loss": "1.5000",
        "perplexity": "\N{EN DASH}",
    }


def test_report_of_a_language_model_has_curves(tmp_path: Path) -> None:
    run = tmp_path / "lm"
    run.mkdir()
    (run / "config.yaml").write_text(f"task: lm\ntrain:\n  steps: 4\n  folder: {run}\n")
    line = '{"group": "valid", "step": 4, "total": 1.5, "perplexity": 4.5}\n'
    (run / "metrics.jsonl").write_text(line)
    page = report(run, tmp_path)
    assert "Validation perplexity" in [figure.find("h3")[0].text for figure in page.find("figure")]
    assert not page.find("p", class_="hint")
