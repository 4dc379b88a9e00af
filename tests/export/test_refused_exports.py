"""An export that is refused leaves an earlier one as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from tests.pretrained.saved_models import make_model, make_tokenizer, save_run


@pytest.mark.parametrize("name", ["model.nemo", "other.nemo"])
def test_a_refused_export_to_nemo_keeps_the_earlier_archive(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    run = save_run(tmp_path / "run", make_model(tokenizer), tokenizer)
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / name).write_bytes(b"earlier")
    assert main(["export", str(run), "--format", "nemo", "--output", str(folder)]) != 0
    assert "NeMo and transformers need fastconformer" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]
