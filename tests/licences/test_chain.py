"""The chain of licences: its file, the union of two, and the error about a contradiction."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pruned_rnnt.config.files import ConfigError
from pruned_rnnt.licences.chain import (
    Chain,
    Licence,
    Origin,
    add_origins,
    chain_of_weights,
    merged,
    read_chain,
)
from pruned_rnnt.run.folder import RunFolder

CALLS = Origin(
    kind="data", name="calls", licence=Licence(id="CC-BY-NC-4.0", source="x"), digest="counts:1"
)
OTHER = Origin(kind="data", name="other", digest="counts:2")


def test_file_returns_what_was_written(tmp_path: Path) -> None:
    assert read_chain(tmp_path) is None
    chain = Chain(licence="MIT", reason="we own it", origins=(CALLS, OTHER))
    chain.write(tmp_path)
    assert read_chain(tmp_path) == chain


@pytest.mark.parametrize("text", ['{"origins": 3}', '{"origins": [{"kind": "data"}]}', "{", "[]"])
def test_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    RunFolder(tmp_path).licences.write_text(text)
    with pytest.raises(ValueError, match=r"licences\.json is damaged .*: restore it"):
        read_chain(tmp_path)


def test_union_keeps_all_and_prefers_a_known_licence() -> None:
    unknown = replace(CALLS, licence=Licence())
    assert merged([CALLS], [OTHER, CALLS]) == (CALLS, OTHER)
    assert merged([unknown], [CALLS]) == (CALLS,)
    assert merged([CALLS], [unknown]) == (CALLS,)
    # Other contents, or another licence, are another part of the chain.
    larger = replace(unknown, digest="counts:3")
    assert merged([CALLS], [larger]) == (CALLS, larger)
    free = replace(CALLS, licence=Licence(id="CC0-1.0"))
    assert merged([CALLS], [free]) == (CALLS, free)


def test_a_continued_run_adds_to_its_chain(tmp_path: Path) -> None:
    add_origins(tmp_path, [CALLS])
    add_origins(tmp_path, [OTHER])
    found = read_chain(tmp_path)
    assert found is not None
    assert found.origins == (CALLS, OTHER)


def test_contradiction_is_refused_with_names_and_a_way_out() -> None:
    chain = Chain(licence="Apache-2.0", origins=(CALLS, OTHER))
    with pytest.raises(ConfigError) as caught:
        chain.check()
    message = str(caught.value)
    assert "card.license=Apache-2.0" in message
    assert "data calls (CC-BY-NC-4.0): it allows commercial use" in message
    assert "such as CC-BY-NC-4.0, or say in card.license_reason" in message
    replace(chain, reason="a contract with the owner").check()
    replace(chain, licence="CC-BY-NC-4.0").check()
    replace(chain, licence="unknown").check()
    with pytest.raises(ConfigError, match=r"card\.license=Apache-2\.0"):
        replace(chain, reason="  ").check()
    assert chain.unchecked() == ["data other: the licence is unknown"]


def test_demands_that_exclude_each_other_have_no_proposal() -> None:
    shared = replace(CALLS, name="shared", licence=Licence(id="CC-BY-SA-4.0"))
    with pytest.raises(ConfigError, match=r"No usual one fits: say in card\.license_reason"):
        Chain(licence="CC-BY-SA-4.0", origins=(CALLS, shared)).check()


def test_texts_of_others_stay_on_their_line() -> None:
    named = Origin(kind="data", name="a\n## Licence\x1b[31m", licence=Licence(note="b\tc\u2028d"))
    chain = Chain(licence="Apache-2.0", origins=(named,))
    assert chain.lines()[1] == "data a ## Licence [31m: unknown; b c d"
    assert Licence(source="\u0645\u06cc\u200c\u062e").source == "\u0645\u06cc\u200c\u062e"


def test_weights_carry_what_lies_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "pretrained.pt"
    path.write_bytes(b"weights")
    digest = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    own = Origin(kind="weights", name="pretrained.pt", digest=digest)
    assert chain_of_weights(path) == (own,)
    given = Licence(id="Apache-2.0", source="y")
    assert chain_of_weights(path, given) == (replace(own, licence=given),)
    Chain(licence="MIT", origins=(CALLS,)).write(tmp_path)
    assert chain_of_weights(path) == (CALLS, replace(own, licence=Licence(id="MIT")))


def test_plain_values_are_json() -> None:
    chain = Chain(origins=(CALLS,))
    assert json.loads(json.dumps(chain.to_dict()))["origins"][0]["licence"]["source"] == "x"
