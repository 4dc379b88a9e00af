"""Ids that would write lines or colours of their own are refused where they enter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.data.input.manifest_items import id_fault, manifest_items
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from tests.data.recorded_speech import write_audio

LINE_BREAK = "a:\thyp=['forged']\nb"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (LINE_BREAK, r"control character '\\t'"),
        ("a\x1b[31m", r"control character '\\x1b'"),
        ("a\x85b", r"control character '\\x85'"),
        ("a\u2028b", r"control character '\\u2028'"),
        ("a\u202etxt", r"control character '\\u202e'"),
        ("a\udcff", r"control character '\\udcff'"),
        ("", "not a text"),
        (5, "not a text"),
    ],
)
def test_faults_of_ids(tmp_path: Path, name: object, fault: str) -> None:
    assert fault.replace("\\\\", "\\") in id_fault(name)
    inner = {"id": name, "recording_id": "r", "start": 0, "duration": 1, "text": "a"}
    cut = {"id": "u", "start": 0, "duration": 1, "channel": 0, "type": "MonoCut"}
    for line in ({**cut, "id": name, "supervisions": []}, {**cut, "supervisions": [inner]}):
        path = tmp_path / "cuts.jsonl"
        path.write_text(json.dumps({**cut, "supervisions": []}) + "\n" + json.dumps(line) + "\n")
        with pytest.raises(ValueError, match=rf"cuts\.jsonl:2 .* the id .*{fault}") as caught:
            list(manifest_items(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a b", "नमस्ते-1", "می‌خواهم", "été_dup3", "a.b:c", "spk-1|2", "../a", ".b"]
)
def test_other_ids_are_used(name: str) -> None:
    assert id_fault(name) == ""


def test_prepare_leaves_out_and_names_such_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good.wav", "x\ny.wav"):
        write_audio(tmp_path / "audio" / name, 1.0)
        (tmp_path / "audio" / name).with_suffix(".txt").write_text("one two")
    output = tmp_path / "out"
    options = ["--tokens", "char", "--dev-share", "0", "--test-share", "0"]
    arguments = ["prepare", "own", str(tmp_path / "audio"), "--output", str(output), *options]
    assert main(arguments) == 0
    assert "id that cannot be used" in capsys.readouterr().out
    assert [cut.id for cut in PreparedFolder(output).cuts("train")] == ["good"]
    left_out = [json.loads(line) for line in (output / "left_out.jsonl").open()]
    assert [Path(each["origin"]).name for each in left_out] == ["x\ny.txt"]
