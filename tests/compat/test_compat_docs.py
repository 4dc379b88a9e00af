"""docs/compat.md: its lines of code run, and it names every module."""

import re
import sys
from pathlib import Path

import pytest

import pruned_rnnt.compat

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.usefixtures("no_k2")
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_code_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "k2.version", None)
    exec(block, {})


@pytest.mark.parametrize(
    "package",
    ["k2", "fast_rnnt", "torchaudio", "warprnnt_pytorch", "warp_rnnt", "optimized_transducer"],
)
def test_every_package_has_its_section(package: str) -> None:
    assert re.search(rf"^## {package}\b", PAGE, flags=re.MULTILINE)
    assert f"`{package}`" in (pruned_rnnt.compat.__doc__ or "")
