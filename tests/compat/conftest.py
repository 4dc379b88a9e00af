"""Fixtures for tests that replace installed packages: imports do not outlive a test."""

import sys
from collections.abc import Iterator

import pytest

from pruned_rnnt.compat import installed

_PACKAGES = ("k2", "torchaudio")


@pytest.fixture
def fresh_imports() -> Iterator[None]:
    """compat imports the packages again in the test, and after it."""
    before = _imported()
    installed.imported_package.cache_clear()
    yield
    for name in _imported():
        del sys.modules[name]
    sys.modules.update(before)
    installed.imported_package.cache_clear()


@pytest.fixture
def no_k2(fresh_imports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if k2 were not installed: Python then raises ImportError for it."""
    monkeypatch.setitem(sys.modules, "k2", None)


def _imported() -> dict[str, object]:
    return {name: x for name, x in sys.modules.items() if name.split(".")[0] in _PACKAGES}
