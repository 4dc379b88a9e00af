"""The length of usual utterances beside a model."""

import pytest

from pruned_rnnt.data.input.training_durations import (
    p99_duration,
    read_p99_duration,
    save_p99_duration,
)


def test_p99_ignores_a_few_long_utterances(tmp_path) -> None:
    seconds = p99_duration([2.0] * 99 + [5.0] * 100 + [400.0])
    assert seconds == 5.0
    assert read_p99_duration(tmp_path) is None
    save_p99_duration(tmp_path, seconds)
    assert read_p99_duration(tmp_path) == 5.0


@pytest.mark.parametrize("text", ["", "{", "[3]", "{}", '{"usual_longest_seconds": "long"}'])
def test_error_names_damaged_file(tmp_path, text: str) -> None:
    path = tmp_path / "utterances.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"utterances\.json is damaged"):
        read_p99_duration(tmp_path)
