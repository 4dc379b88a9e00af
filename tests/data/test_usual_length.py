"""The length of usual utterances beside a model."""

import pytest

from pruned_rnnt.data.input.training_durations import (
    read_usual_longest,
    save_usual_longest,
    usual_longest,
)


def test_a_few_long_ones_do_not_count(tmp_path) -> None:
    seconds = usual_longest([2.0] * 99 + [5.0] * 100 + [400.0])
    assert seconds == 5.0
    assert read_usual_longest(tmp_path) is None
    save_usual_longest(tmp_path, seconds)
    assert read_usual_longest(tmp_path) == 5.0


@pytest.mark.parametrize("text", ["", "{", "[3]", "{}", '{"usual_longest_seconds": "long"}'])
def test_a_damaged_file_is_named(tmp_path, text: str) -> None:
    path = tmp_path / "utterances.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"utterances\.json is .* it must be"):
        read_usual_longest(tmp_path)
