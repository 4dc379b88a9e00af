"""Names that compat.k2 and compat.torchaudio lack: from the installed package, or replacements."""

import sys
from pathlib import Path

import pytest
import torch

from pruned_rnnt.compat import k2, ragged

pytestmark = pytest.mark.usefixtures("fresh_imports")


def package(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, first on the path."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("no_k2")
def test_stand_ins_without_k2() -> None:
    assert k2.RaggedTensor is ragged.RaggedTensor
    assert k2.ragged.cat is ragged.cat
    assert k2.ragged.RaggedShape is k2.RaggedShape
    assert k2.with_cuda == torch.cuda.is_available()
    assert isinstance(k2.version.__version__, str)


@pytest.mark.usefixtures("no_k2")
def test_classes_of_k2_are_names_without_k2() -> None:
    def annotated(lattice: k2.Fsa, symbols: k2.SymbolTable | None) -> list[k2.Nbest]:
        raise NotImplementedError

    assert annotated.__annotations__["lattice"] is k2.Fsa
    assert not isinstance(3, k2.Fsa)
    with pytest.raises(ImportError, match=r"k2\.Fsa needs k2, which is not installed"):
        k2.Fsa("0 1 2 3.5")
    with pytest.raises(AttributeError, match=r"k2\.Fsa\.from_str needs k2"):
        k2.Fsa.from_str("0 1 2 3.5")


@pytest.mark.usefixtures("no_k2")
def test_unknown_names_raise_the_reason() -> None:
    with pytest.raises(AttributeError, match=r"has no 'ctc_topo' of its own, and k2, .* import"):
        _ = k2.ctc_topo
    assert not hasattr(k2, "ctc_topo")
    with pytest.raises(ImportError, match="ctc_topo"):
        from pruned_rnnt.compat.k2 import ctc_topo  # noqa: F401


def test_the_installed_k2_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class RaggedTensor: pass\ndef ctc_topo(): return 7\ndef rnnt_loss(): return 8\n"
    package(tmp_path, "k2", text, monkeypatch)
    import k2 as installed_k2

    assert k2.RaggedTensor is installed_k2.RaggedTensor
    assert k2.ctc_topo() == 7
    assert k2.rnnt_loss is not installed_k2.rnnt_loss
    with pytest.raises(AttributeError, match="module 'k2' has no attribute 'nothing'"):
        _ = k2.nothing


@pytest.mark.parametrize("error", ["OSError('libk2.so')", "ImportError('another torch')"])
def test_a_k2_that_cannot_be_loaded(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "k2", f"raise {error}", monkeypatch)
    assert k2.RaggedTensor is ragged.RaggedTensor
    with pytest.raises(AttributeError, match=r"could not be imported: (libk2.so|another torch)"):
        _ = k2.ctc_topo


def test_replacing_k2_in_sys_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/compat.md shows this for code that cannot be edited."""
    monkeypatch.setitem(sys.modules, "k2", k2)
    monkeypatch.setitem(sys.modules, "k2.version", k2.version)
    names: dict[str, object] = {}
    exec("import k2\nimport k2.version\ntext = k2.version.__version__", names)
    served = names["k2"]
    assert served is k2
    assert served.RaggedTensor([[1], [2, 3]]).dim0 == 2
    assert names["text"] == k2.version.__version__
    with pytest.raises(AttributeError, match=r"the name k2 refers to pruned_rnnt\.compat\.k2"):
        _ = served.ctc_topo


@pytest.mark.usefixtures("no_k2")
@pytest.mark.parametrize(("side", "shift", "offset"), [("l", 4, 0.035), ("r", 1, 0.313261687)])
def test_swoosh_without_k2(side: str, shift: float, offset: float) -> None:
    x = torch.linspace(-30, 30, 61, dtype=torch.float64, requires_grad=True)
    y = getattr(k2, f"swoosh_{side}")(x)
    expected = torch.logaddexp(torch.zeros_like(x), x - shift) - 0.08 * x - offset
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-8)
    (slope,) = torch.autograd.grad(y.sum(), x)
    value, derivative = getattr(k2, f"swoosh_{side}_forward_and_deriv")(x.detach())
    torch.testing.assert_close(value, y.detach())
    torch.testing.assert_close(derivative, slope, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(getattr(k2, f"swoosh_{side}_forward")(x), y)


@pytest.mark.usefixtures("no_k2")
@pytest.mark.parametrize("name", ["swoosh_l", "swoosh_r"])
def test_dropout_of_swoosh_without_k2(name: str) -> None:
    swoosh = getattr(k2, name)
    x = torch.linspace(-3, 3, 4000, requires_grad=True)
    torch.manual_seed(0)
    dropped, kept = swoosh(x, dropout_prob=0.25), swoosh(x)
    is_kept = dropped != 0
    assert 0.2 < 1 - is_kept.float().mean() < 0.3
    torch.testing.assert_close(dropped[is_kept], kept[is_kept] / 0.75)
    # k2's dropout is that of training: without a gradient there is none.
    assert torch.equal(swoosh(x.detach(), dropout_prob=0.25), kept.detach())
